"""The runs below a directory, by the small files that each of them holds. Loads no network and no environment."""

import csv
import io
import itertools
import math
import os
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import msgspec

from apexrl.config.words import flags_in
from apexrl.errors import UNREADABLE, ConfigError, fault_of
from apexrl.files import read_json, read_whole
from apexrl.lines import say
from apexrl.types import Count, Finite, Name

RUNS = Path("runs")  # where runs lie unless told otherwise
CONFIG_FILE, STATUS_FILE, CURVE_FILE, SUMMARY_FILE = "config.json", "status.json", "evaluations.csv", "summary.json"
SWEEP_FILE = "sweep.json"  # of the directory of a sweep
CHECKPOINTS = ("checkpoints/best.safetensors", "checkpoints/latest.safetensors")  # the first that there is is played
VIDEOS = "videos"  # the directory of a run's videos
Which = Literal["best", "latest"]  # network of a run
DEPTHS = ("*", "*/*")  # a run, or a run of a sweep


class _Environment(msgspec.Struct):
    env: Name


class _Command(msgspec.Struct):
    env: _Environment
    agent: Name = ""


class _Config(msgspec.Struct):
    command: _Command


class _Counters(msgspec.Struct):
    best_evaluation_return: Finite | None = None
    last_evaluation_return: Finite | None = None


class _Status(msgspec.Struct):
    frames: Count = 0
    counters: _Counters = msgspec.field(default_factory=_Counters)


class FoundRun(NamedTuple):
    """A run as a list shows it."""

    directory: Path
    env: str
    agent: str
    frames: int
    best_return: float | None  # None before the first evaluation
    last_return: float | None
    started_at: float  # the newest start, in seconds since the epoch
    changed_at: float


class CurvePoint(NamedTuple):
    """A line of CURVE_FILE: an evaluation, with the seconds, frames and updates of the run at its parameters."""

    seconds: float
    frames: int
    updates: int
    episodes: int
    mean: float
    median: float
    min: float
    max: float
    exploration: float = math.nan  # in the agent's own measure; unknown in files of earlier versions


UNFIT = re.compile(r"[^\w.+=]+")  # for the name of a directory
MAX_NAME_BYTES = 80
# Flags that do not tell runs apart: the place, the end and the processes of a run.
UNNAMED = {
    *("env", "run-dir", "fork", "guest", "at", "from-journal", "journal-dir", "keys", "trust", "callback", "port-base"),
    *("total-frames", "total-updates", "stop-at-return", "tensorboard", "wandb", "mlflow", "evaluator", "smoke"),
    *("episodes", "record-dir", "film-every", "max-restarts", "memory-gb", "num-workers", "keep-checkpoints"),
    *("device", "actor-device", "learner-devices"),
}
UNNAMED_ENDS = ("-port", "-host", "-seconds")
MOST = (*[2.0**53] * 4, *[1e300] * 5)  # of each number


def new_run(env: str, words: Sequence[str] = ()) -> str:
    """Returns the directory of a run that begins now, and was given none: its environment, its --name, its time.

    Args:
      words: the command line; without a --name, its flags that tell about the learning are the name.
    """
    flags = {flag.removeprefix("--"): " ".join(values) for flag, values in flags_in(words)}
    named = flags.pop("name", "") or "-".join(
        part for flag, value in flags.items() if is_telling(flag.removeprefix("no-")) for part in (flag, value) if part
    )
    name = UNFIT.sub("-", named).encode()[:MAX_NAME_BYTES].decode(errors="ignore")
    parts = [env, name.strip("-"), time.strftime("%Y%m%d-%H%M%S")]
    return str(RUNS / UNFIT.sub("-", "-".join(filter(None, parts))))


def is_telling(flag: str) -> bool:
    """Returns whether a flag, without its hyphens, may decide how a run learns."""
    return flag not in UNNAMED and not flag.endswith(UNNAMED_ENDS)


def video_name(params_version: int) -> str:
    """Returns the name of the video of the games with some parameters."""
    return f"game-{params_version:08d}.webm"


def made_run(directory: str) -> str:
    """Makes the directory of a new run that was given none; where another run has it, one with a number behind.

    Returns: its path.
    Raises: ConfigError when it cannot be made.
    """
    for number in itertools.count(1):
        path = Path(directory if number == 1 else f"{directory}-{number}")
        try:
            path.mkdir(parents=True)
            return str(path)
        except OSError as error:
            if not os.path.isdir(path):  # False also for a name that is too long
                raise ConfigError(f"{path} cannot be made ({error.strerror}): give a --run-dir") from error
    raise AssertionError("numbers do not end")


def found_checkpoint(run: Path, which: Which = "best") -> tuple[Path, Path]:
    """Returns the directory of a run and the checkpoint to play, by either of them.

    Args:
      which: of a run; without a best one its latest is played.
    Raises: ConfigError when there is none, or `which` is neither.
    """
    if run.is_file():
        folder = run.resolve().parent
        is_run = folder.name == Path(CHECKPOINTS[0]).parent.name  # other directories may have a config.json, too
        is_run = is_run and any((folder.parent / name).is_file() for name in (CONFIG_FILE, CURVE_FILE))
        return (folder.parent if is_run else run.parent), run
    if which not in (known := get_args(Which)):
        raise ConfigError(f"which={which!r} is neither of {', '.join(known)}")
    names = CHECKPOINTS if which == "best" else CHECKPOINTS[1:]
    for name in names:
        if (run / name).is_file():
            return run, run / name
    raise ConfigError(f"{run} has no {' or '.join(names)}: give the directory of a run, or a checkpoint")


def evaluation_of(directory: Path, updates: int) -> CurvePoint | None:
    """Returns the evaluation of the network that a run had after so many updates, None where there was none.

    Raises: ConfigError when the evaluations of the run cannot be read.
    """
    path = directory / CURVE_FILE
    rows = _all_evaluations(path) if path.is_file() else []
    points = _kept(rows)  # before those that a kill has taken, one of which may have the best network
    return next((point for point in [*reversed(points), *reversed(rows)] if point.updates == updates), None)


def network_words(directory: Path, updates: int) -> str:
    """Returns a network of a run in words: its update, and the games by which it was evaluated."""
    try:
        point = evaluation_of(directory, updates)
    except ConfigError:  # of what only tells about it
        point = None
    told = "not evaluated"
    if point is not None:
        games = "1 game" if point.episodes == 1 else f"{point.episodes} games"
        told = f"mean {point.mean:.2f} over {games}"
        if not math.isnan(point.exploration):  # of an earlier version
            told += f" with exploration {point.exploration:g}"
    return f"update {updates:,}, {told}"


def read_evaluations(path: Path) -> list[CurvePoint]:
    """Returns the evaluations of a run's CURVE_FILE, oldest first.

    A run that goes on from a checkpoint after a kill repeats the time since then. Evaluations of the parameters that
    were lost are left out.

    Raises: ConfigError when it cannot be read, or a line is no evaluation.
    """
    return _kept(_all_evaluations(path))


def _all_evaluations(path: Path) -> list[CurvePoint]:
    kinds, rows = CurvePoint.__annotations__, []
    try:
        reader = csv.DictReader(io.StringIO(read_whole(path).decode(), newline=""))
    except UNREADABLE as error:
        raise ConfigError(f"{path} cannot be read: {fault_of(error)}") from error
    try:
        for row in reader:
            if None in row:  # more than the names
                raise ValueError("too many numbers")
            is_old = row.get("exploration") is None
            numbers = {name: float(row[name]) for name in CurvePoint._fields[: -1 if is_old else None]}
            if not all(abs(number) <= most for number, most in zip(numbers.values(), MOST, strict=False)):
                raise ValueError("too large, or no number")
            rows.append(CurvePoint(**{name: kinds[name](number) for name, number in numbers.items()}))
    except (ValueError, KeyError, TypeError, csv.Error) as error:
        raise ConfigError(f"{path}: line {reader.line_num} is no evaluation: mend or remove that line") from error
    return rows


def _kept(rows: Sequence[CurvePoint]) -> list[CurvePoint]:
    kept: list[CurvePoint] = []
    least: tuple[float, ...] = (math.inf, math.inf, math.inf)  # of all later lines
    for found in reversed(rows):
        if all(number <= bound for number, bound in zip(found[:3], least, strict=True)):
            kept.append(found)
        least = tuple(map(min, found[:3], least))
    return kept[::-1]


Scalar = bool | int | float | str | None
Value = Scalar | list[Scalar | list[Scalar]]
Section = dict[str, Value | dict[str, Value | dict[str, Value]]]
"""The configuration of a command as CONFIG_FILE holds it: flags, and sections of flags."""


def flat(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of nested sections by name. The names of flags are unique over all sections."""
    values: dict[str, Any] = {}
    for name, value in sections.items():
        values |= flat(value) if isinstance(value, dict) else {name: value}
    return values


def read_found(directory: Path) -> FoundRun:
    """Returns a run by its directory.

    Raises: ConfigError when there is none, or a file of it cannot be read.
    """
    path = config = directory / CONFIG_FILE
    command = read_json(path, _Config).command
    status = _Status()
    try:
        started_at = changed_at = config.stat().st_mtime
        path = directory / STATUS_FILE
        if path.exists():  # not before the first update
            status = read_json(path, _Status)
            changed_at = max(changed_at, path.stat().st_mtime)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {fault_of(error)}") from error
    returns = status.counters.best_evaluation_return, status.counters.last_evaluation_return
    return FoundRun(directory, command.env.env, command.agent, status.frames, *returns, started_at, changed_at)


def found_runs(directory: Path, faults: list[str]) -> list[FoundRun]:
    """Returns the runs below a directory, the one that was started last first.

    Adds a line to `faults` for each that cannot be read.
    """
    runs = []
    for config in sorted(path for depth in DEPTHS for path in directory.glob(f"{depth}/{CONFIG_FILE}")):
        try:
            runs.append(read_found(config.parent))
        except ConfigError as error:
            faults.append(str(error))
    return sorted(runs, key=lambda run: run.started_at, reverse=True)


def newest_run(directory: Path, needs: Iterable[str] = ()) -> Path:
    """Returns the directory of the run that was started last, of those that have one of some files, if any are named.

    Raises: ConfigError when there is none.
    """
    files, faults = list(needs), list[str]()
    runs = found_runs(directory, faults)
    for fault in faults:  # it may be of the run that was meant
        say(f"left out: {fault}", file=sys.stderr)
    for run in runs:
        if not files or any((run.directory / name).is_file() for name in files):
            return run.directory
    lack = f" with {' or '.join(files)}" if files else ""
    raise ConfigError(f"{directory.resolve()} has no run{lack}: begin one, or name the directory of one")
