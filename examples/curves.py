"""Draws the curves of runs, with matplotlib.

.venv/bin/python -m pip install matplotlib
.venv/bin/python examples/curves.py RUN RUN
"""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from apexrl import Run

if __name__ == "__main__":
    for directory in sys.argv[1:]:
        rows = Run(directory).evaluations
        plt.plot([row.frames for row in rows], [row.mean for row in rows], label=Path(directory).name)
        plt.fill_between([r.frames for r in rows], [r.min for r in rows], [r.max for r in rows], alpha=0.2)
    plt.xlabel("frames")
    plt.ylabel("evaluation return: mean, least and greatest")
    plt.legend()
    plt.savefig("curves.png", dpi=120)
    print("curves.png")
