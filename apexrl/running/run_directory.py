"""The directory of a run, as its launcher uses it: the lock, the configuration, and results to continue from."""

import contextlib
import dataclasses
import importlib.metadata
import platform
import subprocess
import typing
from pathlib import Path
from typing import Any

import msgspec
import psutil

from apexrl.config import RunCommand
from apexrl.errors import ConfigError
from apexrl.files import TEMPORARY, locked, write_json
from apexrl.flags import default_command
from apexrl.learning.run_record import CHECKPOINTS, CURVE_FILE, latest_checkpoint
from apexrl.learning.status_file import STATUS_FILE
from apexrl.networks.checkpoint import LATEST, Counters

ROOT = Path(__file__).resolve().parents[2]
CONFIG_FILE, SUMMARY_FILE, LOCK_FILE = "config.json", "summary.json", "run.lock"
RESULTS = (CHECKPOINTS, CURVE_FILE, "tensorboard", STATUS_FILE, SUMMARY_FILE)


@dataclasses.dataclass(frozen=True)
class SavedConfig:
    """The content of config.json."""

    command: RunCommand
    revision: str
    versions: dict[str, str]


class _Saved(msgspec.Struct):
    """Its part that is read again, before it is known which algorithm's configuration it holds."""

    command: dict[str, Any]


def lock_run(directory: str) -> contextlib.AbstractContextManager[None]:
    """Returns the lock of a run's directory as a context manager. Hold it while the run goes on.

    Raises: ConfigError on entry, when another run holds the lock or the directory cannot be written.
    """
    return locked(Path(directory) / LOCK_FILE, "a run that goes on")


def check_new(directory: Path) -> None:
    """Raises ConfigError when the directory of a new run is not empty. Writes nothing.

    A start that was killed at once leaves a lock, and at most the temporary file of its configuration.
    """
    if directory.is_dir() and any(
        path.name not in (LOCK_FILE, CONFIG_FILE + TEMPORARY) for path in directory.iterdir()
    ):
        raise ConfigError(f"{directory} is not empty: give another --run-dir, or --resume {directory} to continue it")


def saved_command(directory: Path) -> tuple[RunCommand, list[str]]:
    """Returns the configuration of the run to continue, and the names of fields that its file does not have.

    Raises: ConfigError when there is no such run, or its configuration cannot be read.
    """
    path = directory / CONFIG_FILE
    if not path.is_file():
        raise ConfigError(f"{directory} has no {CONFIG_FILE}: --resume takes the directory of an earlier run")
    command, not_given = read_config(path)
    learning = dataclasses.replace(command.learning, total_updates=0, total_frames=0)
    command = dataclasses.replace(  # without the flags that hold for one start only
        command, run_dir=str(directory), learning=learning, max_seconds=0.0, smoke=False, from_scratch=False
    )
    return command, not_given


def read_config(path: Path) -> tuple[RunCommand, list[str]]:
    """Returns the command that a file holds, and the names that it does not give; these have their defaults.

    Raises: ConfigError when the file cannot be read, or was written by a version before --agent.
    """
    given = saved_values(path)
    try:
        if not isinstance(given.get("agent"), str):
            raise ConfigError(
                f"{path} was written by an earlier version, whose experience this one cannot read: begin a new run"
            )
        not_given: list[str] = []
        return _restored(given, default_command(RunCommand, given["agent"]), not_given), not_given
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is not the configuration of a run: {error}") from error


def saved_values(path: Path) -> dict[str, Any]:
    """Returns the values of a command's fields as a file gives them, unchecked; sections are dictionaries.

    Raises: ConfigError when the file cannot be read.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Saved).command
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path} is not the configuration of a run: {error}") from error


def _restored(given: dict[str, Any], default: Any, not_given: list[str]) -> Any:
    """Returns the default with the values that are given; names without one are added to `not_given`.

    Raises: ValidationError when a value has another type than its field.
    """
    hints = typing.get_type_hints(type(default))
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(default):
        value = getattr(default, field.name)
        if field.name not in given:
            not_given.append(field.name)
        elif dataclasses.is_dataclass(value):
            section = msgspec.convert(given[field.name], dict[str, Any])
            changes[field.name] = _restored(section, value, not_given)
        else:
            changes[field.name] = msgspec.convert(given[field.name], hints[field.name])
    return dataclasses.replace(default, **changes)


def save_config(command: RunCommand) -> None:
    """Writes the configuration of a run, the git revision, the versions of packages and the machine."""
    versions = {name: importlib.metadata.version(name) for name in ("torch", "ale-py", "gymnasium", "numpy", "pyzmq")}
    versions |= {"python": platform.python_version(), "machine": platform.platform(), "cores": str(psutil.cpu_count())}
    write_json(Path(command.run_dir) / CONFIG_FILE, SavedConfig(command, _revision(), versions))


def _revision() -> str:
    """Returns the git revision of the code, marked when the code has changed since, or "unknown"."""
    try:
        result = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return result.stdout.strip() or "unknown"


def latest_path(directory: Path) -> Path:
    """Returns the path of the checkpoint that a later start continues."""
    return directory / CHECKPOINTS / LATEST


def continued(directory: Path) -> Counters | None:
    """Returns the counters of the run to continue, None when it has neither a checkpoint nor results yet.

    Raises: ConfigError when its checkpoint is damaged, or is missing while there are results to replace.
    """
    for file in (directory / STATUS_FILE, directory / SUMMARY_FILE, directory / CURVE_FILE):
        if file.is_dir():
            raise ConfigError(f"{file} is a directory: remove it, a file of the run belongs there")
    checkpoint = latest_checkpoint(directory)
    return None if checkpoint is None else checkpoint.header.counters


def set_aside(directory: Path) -> Path:
    """Moves the results of a run into the first free DIRECTORY/earlier-N, and returns that path."""
    number = 1
    while (aside := directory / f"earlier-{number}").exists():
        number += 1
    aside.mkdir()
    for name in RESULTS:
        with contextlib.suppress(FileNotFoundError):
            (directory / name).rename(aside / name)
    return aside
