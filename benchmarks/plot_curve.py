"""Draws evaluation curves: `python -m benchmarks.plot_curve OUT.png RUN.csv [RUN.csv ...]` (requirements-bench.txt).

A CSV is a run's evaluations.csv: one line for each evaluation, with seconds and frames since the start. `apexrl
compare` draws means over seeds.
"""

import sys
from pathlib import Path

from apexrl.tools.picture import Line, Panel, picture_of
from apexrl.tools.run_results import read_curve


def main(out: Path, runs: list[Path]) -> None:
    """Writes one picture: mean return over minutes, and over frames, with the range from the worst to the best game."""
    panels = [Panel("", "minutes", []), Panel("", "frames", [])]
    for path in runs:
        curve = read_curve(path)
        for panel, positions in zip(panels, (curve.seconds / 60, curve.frames), strict=True):
            panel.lines.append(Line(path.stem, positions, curve.returns, curve.worst, curve.best))
    out.write_bytes(picture_of([panels], "evaluation return (mean, worst to best game)"))


if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
