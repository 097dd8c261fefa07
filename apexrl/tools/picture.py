"""Pictures of evaluation curves: lines with bands, in panels. Needs matplotlib, which is in requirements-dev.txt."""

import io
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.ticker import EngFormatter

NUM_COLOURS, DASHES = 10, ("solid", "dashed", "dotted", "dashdot")  # the latter for more lines than colours


class Line(NamedTuple):
    """One curve, with a band between `low` and `high` where these are numbers, and thin curves of its parts."""

    label: str
    positions: np.ndarray
    values: np.ndarray
    low: np.ndarray
    high: np.ndarray
    parts: Sequence[tuple[np.ndarray, np.ndarray]] = ()


class Panel(NamedTuple):
    """One pair of axes."""

    title: str
    position_name: str
    lines: list[Line]


def picture_of(rows: Sequence[Sequence[Panel]], value_name: str) -> bytes:
    """Returns a PNG of rows of panels. The panels of a row share their value axis; a label has one colour and dash."""
    labels = list(dict.fromkeys(line.label for row in rows for panel in row for line in panel.lines))
    drawn: dict[str, Line2D] = {}
    figure = Figure(figsize=(11, 4 * len(rows)))
    grid = figure.subplots(len(rows), len(rows[0]), sharey="row", squeeze=False)
    for panel, axes in zip((panel for row in rows for panel in row), grid.flat, strict=True):
        for line in panel.lines:
            lap, number = divmod(labels.index(line.label), NUM_COLOURS)
            colour, dash = f"C{number}", DASHES[lap % len(DASHES)]
            for positions, values in line.parts:
                axes.plot(positions, values, color=colour, alpha=0.35, linewidth=0.7, marker=".", markersize=2)
            (drawn[line.label],) = axes.plot(line.positions, line.values, color=colour, linestyle=dash)
            axes.fill_between(line.positions, line.low, line.high, color=colour, alpha=0.2, linewidth=0)
        axes.set(xlabel=panel.position_name, title=panel.title)
        if axes.get_xlim()[1] >= 1000:
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 20k, 5M
        axes.grid(alpha=0.3)
    for axes in grid[:, 0]:
        axes.set_ylabel(value_name)
    grid[0, -1].legend(drawn.values(), drawn.keys(), fontsize="small")
    for text in figure.findobj(Text):
        text.set_parse_math(False)  # a name may have a dollar sign
    figure.tight_layout()
    png = io.BytesIO()
    figure.savefig(png, dpi=110, format="png")
    return png.getvalue()
