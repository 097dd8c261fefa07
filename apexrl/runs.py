"""The runs below a directory, by the small files that each of them holds. Loads no network and no environment."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

from apexrl.errors import ConfigError

RUNS = Path("runs")  # where runs lie unless told otherwise
CONFIG_FILE, STATUS_FILE = "config.json", "status.json"
DEPTHS = ("*", "*/*")  # a run, or a run of a sweep


class _Environment(msgspec.Struct):
    env: str


class _Command(msgspec.Struct):
    env: _Environment
    agent: str = ""


class _Config(msgspec.Struct):
    command: _Command


class _Counters(msgspec.Struct):
    best_evaluation_return: float | None = None
    last_evaluation_return: float | None = None


class _Status(msgspec.Struct):
    frames: int = 0
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


def read_found(directory: Path) -> FoundRun:
    """Returns a run by its directory.

    Raises: ConfigError when there is none, or a file of it cannot be read.
    """
    path = config = directory / CONFIG_FILE
    try:
        command = msgspec.json.decode(path.read_bytes(), type=_Config).command
        started_at = changed_at = config.stat().st_mtime
        path = directory / STATUS_FILE
        status = _Status()
        if path.exists():  # not before the first update
            status = msgspec.json.decode(path.read_bytes(), type=_Status)
            changed_at = max(changed_at, path.stat().st_mtime)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
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
    files = list(needs)
    for run in found_runs(directory, []):
        if not files or any((run.directory / name).is_file() for name in files):
            return run.directory
    lack = f" with {' or '.join(files)}" if files else ""
    raise ConfigError(f"{directory.resolve()} has no run{lack}: begin one, or name the directory of one")
