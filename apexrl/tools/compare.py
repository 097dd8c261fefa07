"""`apexrl compare RUN RUN ...`: finds the runs to compare; `comparison` compares them."""

import glob
import math
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import tyro

from apexrl.config.words import program
from apexrl.errors import ConfigError
from apexrl.lifecycle import attempt
from apexrl.lines import printable, say


def compare(
    runs: tyro.conf.Positional[tuple[str, ...]] = (),
    group: tuple[str, ...] = (),
    threshold: float | None = None,
    scale: tuple[str, ...] = (),
    out: Path = Path("comparison"),
) -> int:
    """Compares runs by their evaluations: prints a table, writes OUT.csv and OUT.png.

    Args:
      runs: Run directories, or patterns of them. Runs whose settings differ in the seed alone are one group.
      group: NAME=RUN,RUN,... makes a group of runs, or of patterns. May be given several times.
      threshold: Say when an evaluation first had this mean return.
      scale: ENV=LOW:HIGH are the returns of a game that count as 0 and 1 where games are averaged; by default the
        lowest and the highest evaluation of these runs. May be given several times.
      out: Where the files go, without .csv and .png.
    """
    bounds = dict(map(_bounds, scale))
    if out.name in ("", ".."):
        raise ConfigError(f"--out {out}: give a path without .csv and .png, such as {out / 'comparison'}")
    if threshold is not None and not math.isfinite(threshold):
        raise ConfigError(f"--threshold {threshold} makes no sense: give a mean return")
    # They load torch, and a mistake in the command line is answered before.
    from apexrl.tools.comparison import Scale, write_comparison  # noqa: PLC0415
    from apexrl.tools.run_results import named_by_settings, readable_runs  # noqa: PLC0415

    scales = {env: Scale(low, high) for env, (low, high) in bounds.items()}
    faults: list[str] = []
    patterns: dict[str, list[str]] = {}
    for name, of_group in map(_group, group):
        patterns.setdefault(name, []).extend(of_group)
    groups = {name: readable_runs(matching(of_group), faults) for name, of_group in patterns.items()}
    by_settings = named_by_settings(readable_runs(matching(runs), faults), faults)
    if taken := groups.keys() & by_settings.keys():
        raise ConfigError(f"--group {min(taken)}=...: runs without a group have this name, too; give another")
    groups |= by_settings
    groups = {name: members for name, members in groups.items() if members}
    if not groups:
        raise ConfigError("\n".join(faults) or "give the directories of runs")
    for fault in faults:
        say(f"left out: {fault}", file=sys.stderr)
    write_comparison(groups, out, threshold, scales)
    return 0


def _group(text: str) -> tuple[str, list[str]]:
    name, _, patterns = text.partition("=")
    if not name or not patterns:
        raise ConfigError(f"--group {text}: give NAME=RUN,RUN,...")
    return printable(name), patterns.split(",")  # it goes into a file and a picture, too


def _bounds(text: str) -> tuple[str, tuple[float, float]]:
    env, _, bounds = text.rpartition("=")
    try:
        low, high = map(float, bounds.split(":"))
    except ValueError:
        low = high = 0.0
    if not env or not float("-inf") < low < high < float("inf"):
        raise ConfigError(f"--scale {text}: give ENV=LOW:HIGH, two returns, the second one higher")
    return env, (low, high)


def matching(patterns: Iterable[str]) -> list[Path]:
    """Returns the paths that match patterns, each once, and a pattern as it is where nothing matches."""
    found = (Path(path) for pattern in patterns for path in _paths_of(pattern))
    return list({os.path.realpath(path): path for path in found}.values())


def _paths_of(pattern: str) -> list[str]:
    return [pattern] if Path(pattern).exists() else sorted(glob.glob(pattern)) or [pattern]


def main() -> int:
    """Runs the command line; returns the exit status."""
    return attempt("compare", lambda: tyro.cli(compare, prog=program(), config=(tyro.conf.UseAppendAction,)))
