"""The results of runs, read from their directories, and groups of runs that differ in the seed alone.

Knows no algorithm: a run's settings are names and values. Writes nothing, and reads a run that goes on, too.
"""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from apexrl.config.words import flag_of
from apexrl.errors import ConfigError
from apexrl.files import read_json
from apexrl.learning.record.status_file import STATUS_FILE, Status
from apexrl.running.run_directory import OF_ONE_START, saved_values
from apexrl.runs import CONFIG_FILE, CURVE_FILE, flat, read_evaluations

FINAL_EVALUATIONS = 3
CURVE_NAMES = ("seconds", "frames", "updates", "mean", "min", "max", "median")  # the fields of a Curve in CURVE_FILE
ELSEWHERE = {"wires"}  # a section of hosts and ports
# Settings that tell runs of one configuration apart: the seed, the place, the end of one start.
OF_ONE_RUN = {
    *OF_ONE_START,
    *("seed", "name", "run_dir", "resume", "fork", "at"),
    *("max_restarts", "memory_gb", "journal_dir", "record_dir"),
    *("tensorboard", "tensorboard_port", "tensorboard_host", "wandb", "mlflow"),
}


class Curve(NamedTuple):
    """The evaluations of one run: arrays of one length, in the order in which they came. Returns are unclipped."""

    seconds: np.ndarray
    frames: np.ndarray
    updates: np.ndarray
    returns: np.ndarray  # the mean of an evaluation's games
    worst: np.ndarray  # its worst game
    best: np.ndarray
    medians: np.ndarray  # of an evaluation's games


class RunResult(NamedTuple):
    """The results of one run."""

    directory: Path
    env: str
    settings: dict[str, Any]  # by name; empty for a run without CONFIG_FILE, whose roles were started by hand
    frames: int
    seconds: float
    samples_per_insert: float | None  # None while nothing has been inserted
    curve: Curve

    @property
    def final_return(self) -> float:
        """The mean of the last FINAL_EVALUATIONS evaluations, or of all when there are fewer."""
        return float(self.curve.returns[-FINAL_EVALUATIONS:].mean())

    @property
    def final_median(self) -> float:
        """The mean of the medians of the same evaluations."""
        return float(self.curve.medians[-FINAL_EVALUATIONS:].mean())

    def first_reaching(self, threshold: float) -> tuple[float, float]:
        """Returns frames and seconds of the first evaluation of at least the threshold; infinite when none is."""
        reached = np.flatnonzero(self.curve.returns >= threshold)
        if not len(reached):
            return np.inf, np.inf
        return self.curve.frames[reached[0]], self.curve.seconds[reached[0]]


def read_run(directory: Path) -> RunResult:
    """Returns the results in a run directory.

    Raises: ConfigError when there is no such run, it has no evaluation yet, or a file of it cannot be read.
    """
    if not directory.is_dir():
        fault = "this is no directory of a run" if directory.exists() else "there is no such run"
        raise ConfigError(f"{directory}: {fault}")
    if not ((directory / STATUS_FILE).exists() and (directory / CURVE_FILE).exists()):
        raise ConfigError(f"{directory}: no evaluation yet, or it is no run directory")
    status = read_json(directory / STATUS_FILE, Status)
    curve = read_curve(directory / CURVE_FILE)
    if not len(curve.returns):
        raise ConfigError(f"{directory}: no evaluation yet")
    path = directory / CONFIG_FILE
    values = saved_values(path) if os.path.lexists(path) else {}
    settings = flat({name: value for name, value in values.items() if name not in ELSEWHERE})
    settings = {name: value for name, value in settings.items() if name not in OF_ONE_RUN}
    if "guest" in settings:  # whose seeds may each follow another run
        settings["guest"] = "yes" if settings["guest"] else "no"
    counters = status.counters
    inserted = counters.transitions_inserted
    ratio = counters.transitions_sampled / inserted if inserted else None
    return RunResult(directory, status.env, settings, status.frames, counters.seconds, ratio, curve)


def readable_runs(directories: Iterable[Path], faults: list[str]) -> list[RunResult]:
    """Returns the results of runs; adds a line to `faults` for each that `read_run` refuses."""
    runs = []
    for directory in directories:
        try:
            runs.append(read_run(directory))
        except ConfigError as error:
            faults.append(str(error))
    return runs


def read_curve(path: Path) -> Curve:
    """Returns the evaluations of a run's CURVE_FILE.

    Raises: ConfigError when it cannot be read, or a line is no evaluation.
    """
    rows = [[getattr(row, name) for name in CURVE_NAMES] for row in read_evaluations(path)]
    return Curve(*np.array(rows, np.float64).reshape(-1, len(CURVE_NAMES)).T)


def named_by_settings(runs: Iterable[RunResult], faults: list[str]) -> dict[str, list[RunResult]]:
    """Returns runs by a name of their settings: the algorithm, and the settings that others of it on this game change.

    Adds a line to `faults` for each whose settings are not known, and leaves it out.
    """
    alike: dict[tuple[str, str], list[RunResult]] = {}
    for run in runs:
        if not run.settings:
            faults.append(f"{run.directory} has no {CONFIG_FILE} to group it by: give --group NAME={run.directory}")
            continue
        alike.setdefault((run.env, str(run.settings.get("agent"))), []).append(run)
    groups: dict[str, list[RunResult]] = {}
    for (_, agent), members in alike.items():
        names = _changed(members)
        for run in members:
            changed = [f"{flag_of(name)} {_text(run.settings[name])}" for name in names if name in run.settings]
            groups.setdefault(" ".join([agent, *changed]), []).append(run)
    return groups


def _changed(runs: Sequence[RunResult]) -> list[str]:
    """Returns the names of the settings that are not the same in all runs that have them: older ones lack some."""
    values: dict[str, list[Any]] = {}
    for run in runs:
        for name, value in run.settings.items():
            values.setdefault(name, []).append(value)
    return [name for name, (first, *others) in values.items() if any(other != first for other in others)]


def _text(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
