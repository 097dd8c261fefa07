"""The directory of a run as its launcher uses it: lock, configuration, and the results that a later start continues."""

import contextlib
import dataclasses
import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import psutil

from apexrl.config import RunCommand
from apexrl.errors import ConfigError
from apexrl.files import locked, write_json
from apexrl.learning.run_record import CHECKPOINTS, CURVE_FILE, latest_checkpoint
from apexrl.learning.status_file import STATUS_FILE
from apexrl.networks.checkpoint import LATEST, Counters

ROOT = Path(__file__).resolve().parents[2]
CONFIG_FILE, SUMMARY_FILE, LOCK_FILE = "config.json", "summary.json", "run.lock"
RESULTS = (CHECKPOINTS, CURVE_FILE, "tensorboard", STATUS_FILE, SUMMARY_FILE)


@dataclasses.dataclass(frozen=True)
class SavedConfig:
    """What is written to config.json."""

    command: RunCommand
    revision: str
    versions: dict[str, str]


def lock_run(directory: str) -> contextlib.AbstractContextManager[None]:
    """Returns the right to write into a directory, to hold while the run goes on.

    Raises: ConfigError, when it is entered, if another run has the right, or the directory cannot be written.
    """
    return locked(Path(directory) / LOCK_FILE, "a run that goes on")


def check_new(directory: Path) -> None:
    """Raises ConfigError when the directory of a new run holds something; nothing is written into it then."""
    if directory.is_dir() and any(path.name != LOCK_FILE for path in directory.iterdir()):
        raise ConfigError(f"{directory} is not empty: give another --run-dir, or --resume {directory} to continue it")


def saved_command(directory: Path) -> tuple[RunCommand, list[str]]:
    """Returns the configuration of the run to continue, and the names that it does not give.

    Raises: ConfigError when there is no such run, or its configuration cannot be read.
    """
    path = directory / CONFIG_FILE
    if not path.is_file():
        raise ConfigError(f"{directory} has no {CONFIG_FILE}: --resume takes the directory of an earlier run")
    try:
        text = path.read_bytes()
        command = msgspec.json.decode(text, type=SavedConfig).command
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path} is not the configuration of a run: {error}") from error
    learning = dataclasses.replace(command.learning, total_updates=0, total_frames=0)
    command = dataclasses.replace(  # without the wishes of that start
        command, run_dir=str(directory), learning=learning, max_seconds=0.0, smoke=False, from_scratch=False
    )
    return command, _not_given(msgspec.json.decode(text)["command"], command)


def _not_given(given: dict[str, Any], config: Any) -> list[str]:
    missing = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in given:
            missing.append(field.name)
        elif dataclasses.is_dataclass(value):
            missing += _not_given(given[field.name], value)
    return missing


def save_config(command: RunCommand) -> None:
    """Writes the configuration of a run, and of which program and machine it is."""
    versions = {name: importlib.metadata.version(name) for name in ("torch", "ale-py", "gymnasium", "numpy", "pyzmq")}
    versions |= {"python": platform.python_version(), "machine": platform.platform(), "cores": str(psutil.cpu_count())}
    write_json(Path(command.run_dir) / CONFIG_FILE, SavedConfig(command, _revision(), versions))


def _revision() -> str:
    """Returns the git revision of the code, marked when it was changed since."""
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
    """Returns where the checkpoint is that a later start continues."""
    return directory / CHECKPOINTS / LATEST


def continued(directory: Path) -> Counters | None:
    """Returns how far the run is that goes on, None when it has neither a checkpoint nor results yet.

    Raises: ConfigError when its checkpoint is damaged, or missing beside results that a new network would replace.
    """
    for file in (directory / STATUS_FILE, directory / SUMMARY_FILE, directory / CURVE_FILE):
        if file.is_dir():
            raise ConfigError(f"{file} is a directory: remove it, a file of the run belongs there")
    checkpoint = latest_checkpoint(directory)
    return None if checkpoint is None else checkpoint.header.counters


def set_aside(directory: Path) -> Path:
    """Moves the results of a run into the first free earlier-N of its directory, which it returns."""
    number = 1
    while (aside := directory / f"earlier-{number}").exists():
        number += 1
    aside.mkdir()
    for name in RESULTS:
        with contextlib.suppress(FileNotFoundError):
            (directory / name).rename(aside / name)
    return aside
