"""Draws the efficiency of several learners: `python -m benchmarks.plot_learners OUT.png` (requirements-dev.txt).

The figures are those in docs/results: simulated arithmetic, the model fitted to it, and hosts with a slowed network.
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from apexrl.tools.picture import Line, Panel, picture_of

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"
HOROVOD = np.array([5.8, 10.8, 18.8, 21.6])  # thousand frames a second with 1, 2, 4 and 8 learners, as published


def rows_of(name: str) -> list[dict[str, Any]]:
    """Returns the rows of a file of results."""
    rows: list[dict[str, Any]] = json.loads((RESULTS / name).read_text())["rows"]
    return rows


def line(label: str, learners: Iterable[int], efficiency: Iterable[float]) -> Line:
    """Returns a curve without a band."""
    values = np.array([*efficiency])
    return Line(label, np.array([*learners]), values, values, values)


def main(out: Path) -> None:
    """Writes the picture."""
    alone, network = rows_of("learners-benchmark.json"), rows_of("learners-network-benchmark.json")
    groups = {part: [row for row in alone if row["part"] == part] for part in ("simulated", "model")}
    groups |= {
        f"25 Gbit/s, {4 * numbers / 1e6:.1f} MB": [row for row in network if row["parameters"] == numbers]
        for numbers in sorted({row["parameters"] for row in network})
    }
    lines = [
        line(label, (row["learners"] for row in rows), (row["efficiency"] for row in rows))
        for label, rows in groups.items()
    ]
    lines.append(line("Horovod, published", (1, 2, 4, 8), HOROVOD / HOROVOD[0] / (1, 2, 4, 8)))
    out.write_bytes(picture_of([[Panel("", "learners", lines)]], "updates/s of each learner, of one alone"))


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
