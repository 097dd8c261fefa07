"""Groups of runs compared by their evaluations: a table, mean curves as CSV, and a picture. Knows no algorithm.

The runs of a group differ in the seed. Its numbers are means over them, with bootstrap intervals of 95 %.
"""

import csv
import io
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from apexrl.errors import ConfigError
from apexrl.extras import why_missing
from apexrl.files import first_line, write_durably
from apexrl.lines import aligned, say
from apexrl.tools.intervals import MeanCurve, bootstrap_interval, interquartile_mean, mean, mean_curve
from apexrl.tools.run_results import RunResult

POSITIONS: dict[str, Callable[[RunResult], np.ndarray]] = {
    "frames": lambda run: run.curve.frames,
    "minutes": lambda run: run.curve.seconds / 60,
}
CSV_COLUMNS = ("group", "env", "against", "position", "return", "low", "high", "seeds")


class Line(NamedTuple):
    """The runs of one group on one game."""

    group: str
    env: str
    runs: list[RunResult]


class Scale(NamedTuple):
    """The returns of a game that count as 0 and as 1."""

    low: float
    high: float


def write_comparison(
    groups: Mapping[str, Sequence[RunResult]], out: Path, threshold: float | None, scales: Mapping[str, Scale]
) -> None:
    """Prints the table of groups, none of them empty, and writes OUT.csv and OUT.png.

    Raises: ConfigError when a scale is of no game, OUT.csv is something else, or a file cannot be written.
    """
    table = out.with_name(f"{out.name}.csv")
    if table.exists() and first_line(table).decode(errors="replace").strip() != ",".join(CSV_COLUMNS):
        raise ConfigError(f"--out {out}: {table} is no comparison: give another name, or remove that file")
    picture = out.with_name(f"{out.name}.png")
    if picture.exists() and not table.exists():
        raise ConfigError(f"--out {out}: {picture} is there without its {table.name}: give another name, or remove it")
    lines = [Line(group, env, alike) for group, runs in groups.items() for env, alike in _by_game(runs).items()]
    games = list(dict.fromkeys(line.env for line in lines))
    lines.sort(key=lambda line: games.index(line.env))
    if unknown := scales.keys() - games:
        raise ConfigError(f"--scale {min(unknown)}: these runs are of {', '.join(games)}")
    say(_table_of(lines, threshold))
    common = [env for env in games if sum(line.env == env for line in lines) == len(groups)]
    if len(common) > 1:
        try:
            say(f"\n{_table_of_averages([line for line in lines if line.env in common], scales)}")
        except ConfigError as error:
            say(f"no average over games: {error}", file=sys.stderr)
    curves = {
        (line.group, line.env, against): mean_curve([(position(run), run.curve.returns) for run in line.runs])
        for line in lines
        for against, position in POSITIONS.items()
    }
    _write(table, _csv_of(lines, curves))
    _write(picture, _picture_of(lines, curves))


def _by_game(runs: Iterable[RunResult]) -> dict[str, list[RunResult]]:
    games: dict[str, list[RunResult]] = {}
    for run in runs:
        games.setdefault(run.env, []).append(run)
    return games


def _table_of(lines: Sequence[Line], threshold: float | None) -> str:
    """Returns a line for each group and game, of means over its seeds: `last` and `best` of such evaluations."""
    names = ["group", "env", "seeds", "frames", "minutes", "samples an insert"]
    names += ["final return", "final median", "last", "best"]
    names += [] if threshold is None else [f"frames to {threshold:g}", f"minutes to {threshold:g}"]
    return markdown(names, [_cells(line, threshold) for line in lines])


def _cells(line: Line, threshold: float | None) -> list[str]:
    runs = line.runs
    ratios = [run.samples_per_insert for run in runs if run.samples_per_insert is not None]
    cells = [line.group, line.env, str(len(runs)), f"{np.mean([run.frames for run in runs]):,.0f}"]
    cells += [f"{np.mean([run.seconds for run in runs]) / 60:.1f}", f"{np.mean(ratios):.2f}" if ratios else "unknown"]
    cells += [_estimate([_finals(runs)], mean), f"{np.mean([run.final_median for run in runs]):.2f}"]
    cells += [f"{np.mean([run.curve.returns[-1] for run in runs]):.2f}"]
    cells += [f"{np.mean([run.curve.returns.max() for run in runs]):.2f}"]
    return cells if threshold is None else cells + _reached(runs, threshold)


def _reached(runs: Sequence[RunResult], threshold: float) -> list[str]:
    """Returns median frames and minutes to the threshold; a seed that does not reach it takes for ever."""
    frames, seconds = np.median([run.first_reaching(threshold) for run in runs], axis=0)
    count = sum(np.isfinite(run.first_reaching(threshold)[0]) for run in runs)
    share = f" ({count} of {len(runs)} seeds)" if count < len(runs) else ""
    if not np.isfinite(frames):
        return [f"not reached{share}"] * 2
    return [f"{frames:,.0f}{share}", f"{seconds / 60:.1f}{share}"]


def _table_of_averages(lines: Sequence[Line], scales: Mapping[str, Scale]) -> str:
    """Returns the interquartile mean of each group over its games and seeds, of returns from 0 to 1.

    Raises: ConfigError when all returns of a game are the same, so that no scale follows from them.
    """
    used = {env: scales.get(env) or _scale_of(env, lines) for env in dict.fromkeys(line.env for line in lines)}
    groups: dict[str, list[np.ndarray]] = {}
    for line in lines:
        low, high = used[line.env]
        groups.setdefault(line.group, []).append((_finals(line.runs) - low) / (high - low))
    rows = [[name, str(len(games)), _estimate(games, interquartile_mean)] for name, games in groups.items()]
    scale = ", ".join(f"{env}: {low:g} is 0 and {high:g} is 1" for env, (low, high) in used.items())
    return f"{markdown(['group', 'games', 'interquartile mean'], rows)}\n{scale}"


def _scale_of(env: str, lines: Sequence[Line]) -> Scale:
    returns = np.concatenate([run.curve.returns for line in lines if line.env == env for run in line.runs])
    if returns.min() == returns.max():
        raise ConfigError(f"{env} has no return but {returns[0]:g}: give compare --scale {env}=LOW:HIGH")
    return Scale(returns.min(), returns.max())


def _finals(runs: Sequence[RunResult]) -> np.ndarray:
    """Returns the final returns [N, 1] of N runs."""
    return np.array([[run.final_return] for run in runs])


def _estimate(strata: Sequence[np.ndarray], statistic: Callable[[np.ndarray], np.ndarray]) -> str:
    value, (low, high) = statistic(np.concatenate(strata)), bootstrap_interval(strata, statistic)
    return f"{value[0]:.2f}" + (f" [{low[0]:.2f}, {high[0]:.2f}]" if np.isfinite(low[0]) else "")


def markdown(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table whose columns are aligned: the first two to the left, numbers to the right."""
    head, *others = aligned([names, *rows], range(2, len(names)))
    rule = [f"{'':-<{len(cell) - 1}}{'-' if i < 2 else ':'}" for i, cell in enumerate(head)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *others))


def _csv_of(lines: Sequence[Line], curves: Mapping[tuple[str, str, str], MeanCurve]) -> bytes:
    """Returns the mean curves, a line a point; `low` and `high` are empty where one seed says nothing of others."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    seeds = {line[:2]: len(line.runs) for line in lines}
    for (group, env, against), curve in curves.items():
        for point in zip(*curve, strict=True):
            numbers = ["" if np.isnan(number) else f"{number:.12g}" for number in point]
            writer.writerow([group, env, against, *numbers, seeds[group, env]])
    return file.getvalue().encode()


def _picture_of(lines: Sequence[Line], curves: Mapping[tuple[str, str, str], MeanCurve]) -> bytes:
    """Returns a PNG with a row of panels for each game; without matplotlib it says so, and returns nothing."""
    try:
        from apexrl.tools import picture  # noqa: PLC0415 - the only part that needs matplotlib
    except ModuleNotFoundError as error:
        say(f"no picture: {why_missing(error) or error}", file=sys.stderr)
        return b""
    rows = []
    for env in dict.fromkeys(line.env for line in lines):
        rows.append([picture.Panel(env, against, []) for against in POSITIONS])
        for line in (line for line in lines if line.env == env):
            for panel in rows[-1]:
                curve, position = curves[line.group, env, panel.position_name], POSITIONS[panel.position_name]
                seeds = [(position(run), run.curve.returns) for run in line.runs]
                panel.lines.append(picture.Line(line.group, *curve, seeds))
    return picture.picture_of(rows, "evaluation return (mean, 95 % interval)")


def _write(path: Path, data: bytes) -> None:
    if data:
        try:
            write_durably(path, data)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written ({error.strerror}): give another --out") from error
        say(path)
