"""`apexrl runs [DIR]`: lists the runs below a directory, the newest first."""

import sys
import time
from pathlib import Path

import tyro

from apexrl.config.words import program
from apexrl.lines import aligned, say
from apexrl.runs import RUNS, FoundRun, found_runs

HEAD = ("run", "environment", "agent", "frames", "best", "last", "when")
NUMBERS = [HEAD.index(name) for name in ("frames", "best", "last")]


def row_of(run: FoundRun) -> tuple[str, ...]:
    """Returns a run in words, by HEAD."""
    best, last = ("-" if number is None else f"{number:.1f}" for number in (run.best_return, run.last_return))
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.changed_at))
    return str(run.directory), run.env, run.agent, f"{run.frames:,}", best, last, when


def list_runs(directory: tyro.conf.Positional[Path] = RUNS) -> int:
    """Lists runs: environment, algorithm, frames, best and last evaluation, and when it was last heard of.

    Args:
      directory: The directory that the runs lie in, or the directory of a sweep.
    """
    faults: list[str] = []
    runs = found_runs(directory, faults)
    for fault in faults:
        say(f"left out: {fault}", file=sys.stderr)
    if not runs:
        lack = "has no runs" if directory.is_dir() else "is no directory: `apexrl runs` lists those in ./runs"
        say(f"{directory.resolve()} {lack}", file=sys.stderr)
        return 1
    for row in aligned([HEAD, *map(row_of, runs)], NUMBERS):
        say("  ".join(row).rstrip())
    return 0


def main() -> int:
    """Runs the command line; returns the exit status."""
    return tyro.cli(list_runs, prog=program())
