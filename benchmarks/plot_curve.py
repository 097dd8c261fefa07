"""Draws evaluation curves: `python -m benchmarks.plot_curve OUT.png RUN.csv [RUN.csv ...]` (requirements-bench.txt).

A CSV is a run's evaluations.csv: one line for each evaluation, with seconds and frames since the start. `apexrl
compare` draws means over seeds.
"""

import sys
from pathlib import Path

from apexrl.errors import ConfigError
from apexrl.files import write_durably
from apexrl.lifecycle import attempt
from apexrl.runs import CURVE_FILE
from apexrl.tools.picture import Line, Panel, picture_of
from apexrl.tools.run_results import read_curve


def draw(out: Path, runs: list[Path]) -> int:
    """Writes one picture: mean return over minutes, and over frames, with the range from the worst to the best game.

    Returns: the exit status.
    Raises: ConfigError when a CSV cannot be read, or the first path is no picture's.
    """
    if out.suffix != ".png":
        raise ConfigError(f"{out}: the first path is the picture that is written, and ends in .png")
    panels = [Panel("", "minutes", []), Panel("", "frames", [])]
    for path in runs:
        curve = read_curve(path)
        for panel, positions in zip(panels, (curve.seconds / 60, curve.frames), strict=True):
            name = path.resolve().parent.name if path.name == CURVE_FILE else path.stem
            panel.lines.append(Line(name, positions, curve.returns, curve.worst, curve.best))
    write_durably(out, picture_of([panels], "evaluation return (mean, worst to best game)"))
    return 0


if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    sys.exit(attempt("draw", lambda: draw(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])))
