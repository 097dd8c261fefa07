"""Draws evaluation curves: `python -m benchmarks.plot_curve OUT.png RUN.csv [RUN.csv ...]` (requirements-bench.txt).

A CSV is a run's evaluations.csv: one line for each evaluation, with seconds and frames since the start.
"""

import csv
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


def main(out: Path, runs: list[Path]) -> None:
    """Writes one picture: mean return over minutes, and over frames, with the range from the worst to the best game."""
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), sharey=True)
    for run in runs:
        with run.open() as file:
            rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
        mean, low, high = ([row[name] for row in rows] for name in ("mean", "min", "max"))
        for axis, xs in ((axes[0], [r["seconds"] / 60 for r in rows]), (axes[1], [r["frames"] / 1e6 for r in rows])):
            (line,) = axis.plot(xs, mean, label=run.stem)
            axis.fill_between(xs, low, high, alpha=0.15, color=line.get_color(), linewidth=0)
    axes[0].set(xlabel="minutes", ylabel="evaluation return (mean, worst to best game)")
    axes[1].set(xlabel="million frames")
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.legend()
    figure.tight_layout()
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
