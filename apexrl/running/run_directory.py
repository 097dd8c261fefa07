"""The directory of a run, as its launcher uses it: the lock, the configuration, and results to continue from."""

import contextlib
import dataclasses
import importlib.metadata
import logging
import platform
import shlex
import subprocess
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from apexrl import __version__
from apexrl.config.commands import ActorCommand, RunCommand
from apexrl.config.fields import check_ranges, with_values
from apexrl.config.flags import actor_command, default_command
from apexrl.config.sections import EnvConfig, LearningConfig, whole_number
from apexrl.config.words import program, sister
from apexrl.control_groups import num_cores
from apexrl.errors import ConfigError
from apexrl.files import TEMPORARY, is_held, locked, read_json, write_json
from apexrl.learning.record.status_file import LAST_EVALUATION, STATUS_FILE, read_status
from apexrl.networks.config import own_network
from apexrl.networks.headers import (
    CHECKPOINTS,
    NUMBERED,
    CheckpointHeader,
    Counters,
    copy_checkpoint,
    latest_path,
    load_header,
    numbered_checkpoints,
)
from apexrl.own_modules import NOBODY, Trust
from apexrl.replay.fork import fork_log
from apexrl.running.torch_look import Ask, Question, here
from apexrl.runs import CONFIG_FILE, CURVE_FILE, SUMMARY_FILE, VIDEOS, Section, evaluation_of, read_found
from apexrl.types import EnvironmentSpec, LogPosition

logger = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[2]
JOURNAL, LOCK_FILE, OWNER = "journal", "run.lock", "a run that goes on"
RESULTS = (CHECKPOINTS, CURVE_FILE, "tensorboard", STATUS_FILE, SUMMARY_FILE, VIDEOS, "wandb.id", "mlflow.id")
OF_ONE_START: Mapping[str, Any] = {
    "max_seconds": 0.0, "smoke": False, "from_scratch": False, "trust": False, "callback": (), "stop_at_return": None,
    "port_base": 0,
}  # fmt: skip
"""The defaults of flags that hold for one start of a run."""


class _Saved(msgspec.Struct):
    """The part of config.json that is read again, before it is known which algorithm's configuration it holds."""

    command: Section


def lock_run(
    directory: str, *, is_shared: bool = False, patience_seconds: float = 0.0
) -> contextlib.AbstractContextManager[None]:
    """Returns the lock of a run's directory as a context manager. Hold it while the run goes on, or share it to read.

    Raises: ConfigError on entry, when another run holds the lock or the directory cannot be written.
    """
    return locked(Path(directory) / LOCK_FILE, OWNER, is_shared=is_shared, patience_seconds=patience_seconds)


def check_new(directory: Path) -> None:
    """Raises ConfigError when the directory of a new run is not empty. Writes nothing.

    A start that was killed at once leaves a lock, and at most the temporary file of its configuration.
    """
    if directory.is_dir() and any(
        path.name not in (LOCK_FILE, CONFIG_FILE + TEMPORARY) for path in directory.iterdir()
    ):
        raise ConfigError(f"{directory} is not empty: give another --run-dir, or {_other_use(directory)}")


def _other_use(directory: Path) -> str:
    """Returns what else a person may do about a directory that is not empty."""
    path = directory / CONFIG_FILE
    if not path.is_file():
        return "empty it: there is no run in it to continue"
    with contextlib.suppress(ConfigError):
        if saved_values(path).get("reproducible"):
            return "empty it: a reproducible run begins anew, and continues none"
    return f"--resume {directory} to continue it"


def trust_of(arguments: Sequence[str]) -> Trust:
    """Returns the modules that files may name in a run with these arguments."""
    typed = program()
    typed = f"{typed.removesuffix(' resume')} train" if typed.endswith(" resume") else typed
    return Trust.of(arguments, f"{typed} {shlex.join([*arguments, '--trust'])}")


def saved_command(
    directory: Path, at: int = 0, trust: Trust = NOBODY, is_resumed: bool = False
) -> tuple[RunCommand, list[str]]:
    """Returns the configuration of the run to continue, and the names of fields that its file does not have.

    Totals that it has reached are left out. But a run that was killed while its last network was evaluated has not
    ended: it keeps them where it is resumed, and ends when that network is evaluated.

    Args:
      at: the update from which it goes on; 0: the latest.
      is_resumed: by the same network in the same directory.
    Raises: ConfigError when there is no such run, when it is a reproducible one, or its configuration cannot be read.
    """
    path = directory / CONFIG_FILE
    if not path.is_file():
        raise ConfigError(f"{directory} has no {CONFIG_FILE}: --resume and --fork take the directory of a run")
    command, not_given = read_config(path, trust)
    if command.reproducible:
        raise ConfigError(
            f"{directory} is a reproducible run, which cannot be continued: a new one with its flags repeats it from "
            "the start, and goes on when it is not stopped"
        )
    awaits = is_resumed and _awaits_evaluation(directory)
    totals = {} if awaits else _reached_totals(command.learning, directory, at)
    return with_values(command, {**OF_ONE_START, **totals, "run_dir": str(directory)}), not_given


def update_of(text: str) -> int:
    """Returns the update that --at names; 0 without one, or with one that the parser will refuse."""
    try:
        return whole_number(text)
    except ValueError:
        return 0


def _awaits_evaluation(directory: Path) -> bool:
    """Returns whether a run was killed while it waited for the evaluation of its last network."""
    status, summary, latest = read_status(directory), directory / SUMMARY_FILE, latest_path(directory)
    with contextlib.suppress(OSError, ConfigError):
        has_ended = summary.is_file() and summary.stat().st_mtime >= latest.stat().st_mtime
        if status is not None and status.waits_for == LAST_EVALUATION and not has_ended:
            return evaluation_of(directory, load_header(latest).counters.updates) is None
    return False


def _reached_totals(learning: LearningConfig, directory: Path, at: int) -> dict[str, int]:
    """Returns zeros for the totals that a run has reached, by its checkpoint of an update."""
    kept = latest_path(directory).with_name(NUMBERED.format(at))
    try:
        header = load_header(kept if at and kept.is_file() else latest_path(directory))
    except (OSError, ConfigError):  # `continued` tells a damaged one, and a new network counts the log's frames
        with contextlib.suppress(ConfigError):
            if read_found(directory).frames >= learning.total_frames:
                return {"total_frames": 0}
        return {}
    frames = header.spec.frames_per_step * sum(log.transitions for log in header.counters.logs)
    reached = {"total_frames": frames, "total_updates": header.counters.updates}
    return {name: 0 for name, count in reached.items() if count >= getattr(learning, name)}


def read_config(path: Path, trust: Trust = NOBODY) -> tuple[RunCommand, list[str]]:
    """Returns the command that a file holds, and the names that it does not give; these have their defaults.

    Raises: ConfigError when the file cannot be read, was written by a version before --agent, or names modules that
      nobody trusts.
    """
    given = saved_values(path)
    try:
        if not isinstance(given.get("agent"), str):
            raise ConfigError(
                f"{path} was written by an earlier version, whose experience this one cannot read: begin a new run"
            )
        trust.check(path, agent=given["agent"])  # the defaults are those of its family
        not_given: list[str] = []
        command = _restored(given, default_command(RunCommand, given["agent"]), not_given)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is not the configuration of a run: {error}") from error
    try:
        check_ranges(command)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    trust.check(path, network=command.network.network)
    _trusted(command.env, path, trust)
    return command, not_given


def _trusted(env: EnvConfig, source: Path, trust: Trust) -> EnvConfig:
    """Returns the environment that a file tells. Raises ConfigError when it names modules that nobody trusts."""
    trust.check(source, env=env.env, wrapper=env.wrapper)
    return env


def played(directory: Path, header: CheckpointHeader, trust: Trust) -> ActorCommand:
    """Returns the command that plays a checkpoint in its run's environment; without a run, in the one that it names.

    Raises: ConfigError when the run's configuration, or the settings of the environment, cannot be read, or name
      modules that nobody trusts.
    """
    trust.check(directory, agent=header.agent, network=(network := own_network(header.network)))
    if (directory / CONFIG_FILE).is_file():
        return actor_command(read_config(directory / CONFIG_FILE, trust)[0])
    spec = header.spec
    env = _trusted(EnvConfig.of_variant(spec.env, spec.variant, spec.stacked_frames), directory, trust)
    return dataclasses.replace(default_command(ActorCommand, header.agent), env=env, network=network)


def saved_values(path: Path) -> dict[str, Any]:
    """Returns the values of a command's fields as a file gives them, unchecked; sections are dictionaries.

    Raises: ConfigError when the file cannot be read.
    """
    return read_json(path, _Saved, "is not the configuration of a run").command


def environment_of(journal: Path, held: EnvironmentSpec, trust: Trust = NOBODY) -> EnvConfig:
    """Returns the environment of a journal: as the run that it lies in has configured it, else as its spec tells.

    Raises: ConfigError when the configuration of that run cannot be read, or names modules that nobody trusts.
    """
    if (path := config_beside(journal)) is None:
        return _trusted(EnvConfig.of_variant(held.env, held.variant, held.stacked_frames), journal, trust)
    return _trusted(saved_environment(path), path, trust)


def config_beside(journal: Path) -> Path | None:
    """Returns the configuration of the run whose directory a journal lies in; beside others it is anybody's."""
    folder = journal.resolve()
    folder = folder.parent if folder.name.startswith("shard-") else folder
    path = folder.parent / CONFIG_FILE
    return path if folder.name == JOURNAL and path.is_file() else None


def saved_environment(path: Path) -> EnvConfig:
    """Returns the environment that the configuration of a run names, and imports nothing.

    Raises: ConfigError when the file cannot be read.
    """
    given = saved_values(path).get("env")
    try:
        return _restored(msgspec.convert(given, dict[str, Any]), EnvConfig(), [])
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is not the configuration of a run: {error}") from error


def host_of(directory: Path, trust: Trust = NOBODY) -> RunCommand:
    """Returns the configuration of the run that a guest follows.

    Raises: ConfigError when there is no such run, or it has no replay server.
    """
    path = directory / CONFIG_FILE
    if not path.is_file():
        raise ConfigError(f"{directory} has no {CONFIG_FILE}: --guest takes the directory of a run")
    run, _ = read_config(path, trust)
    if run.reproducible or not run.has_actors:
        raise ConfigError(f"{directory} has no replay server: --guest needs a run with actors")
    return run


def check_has_server(directory: Path, run: RunCommand) -> None:
    """Raises ConfigError when the run that a guest is to follow has ended, and its replay server with it."""
    if is_held(directory / LOCK_FILE):
        return
    journals = [str(journal) for journal in journals_of(run) if journal.is_dir()]
    other = f", or learn from its experience: --from-journal {shlex.quote(journals[0])}" if journals else ""
    again = f"`{sister('resume')} {shlex.quote(str(directory))}`"
    raise ConfigError(f"{directory} has ended, and --guest follows a run that goes on: begin with {again}{other}")


def following(guest: RunCommand, run: RunCommand) -> RunCommand:
    """Returns the configuration of a guest that goes on, with the replay servers of its run as they are now."""
    return with_values(guest, {name: getattr(run.wires, name) for name in ("actor_port", "batch_port")})


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
    versions |= {"python": platform.python_version(), "machine": platform.platform(), "cores": str(num_cores())}
    saved = {"command": command, "revision": _revision(), "versions": versions}
    write_json(Path(command.run_dir) / CONFIG_FILE, saved)


def _revision() -> str:
    """Returns the git revision of the code, marked when the code has changed since; the version of an installed one."""
    if not (ROOT / ".git").exists():
        return f"version {__version__}"
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


def continued(directory: Path, ask: Ask = here) -> Counters | None:
    """Returns the counters of the run to continue, None when it has neither a checkpoint nor results yet.

    Raises: ConfigError when its checkpoint is damaged, or is missing while there are results to replace.
    """
    for file in (directory / STATUS_FILE, directory / SUMMARY_FILE, directory / CURVE_FILE):
        if file.is_dir():
            raise ConfigError(f"{file} is a directory: remove it, a file of the run belongs there")
    header = ask(Question(directory=str(directory))).header
    return None if header is None else header.counters


def as_fork(command: RunCommand) -> RunCommand:
    """Returns the configuration of a new run that is forked from the one with this configuration."""
    kept = "off" if command.replay.journal_dir == "off" else "auto"
    return with_values(command, {"run_dir": "", "at": 0, "journal_dir": kept, "record_dir": ""})


def fork_run(source: RunCommand, checkpoint: Path | None, command: RunCommand) -> None:
    """Fills the directory of a fork with the experience of another run, and with its checkpoint unless from scratch.

    Args:
      source: the configuration of the other run, whose lock the caller holds.
      checkpoint: the other run's; with --at the experience ends where it was made.
      command: the configuration of the fork.
    Raises: ConfigError when the experience cannot be taken.
    """
    header = load_header(checkpoint) if checkpoint is not None else None
    logs = list(header.counters.logs) if header is not None else []
    for shard, (journal, target) in enumerate(zip(journals_of(source), journals_of(command), strict=False)):
        log = logs[shard] if logs else LogPosition()
        if journal.is_dir():
            old_name, name = fork_log(journal, target, log if command.at else None)
            if logs and log.log == old_name:
                logs[shard] = msgspec.structs.replace(log, log=name)
        else:
            logger.warning("%s keeps no experience: the fork begins without", journal)
    if checkpoint is not None and header is not None and not command.from_scratch:
        counters = msgspec.structs.replace(header.counters, logs=tuple(logs))
        header = msgspec.structs.replace(header, counters=counters, run="")  # the learner names the new run
        copy_checkpoint(checkpoint, latest_path(Path(command.run_dir)), header)


def journals_of(command: RunCommand) -> list[Path]:
    """Returns the directories of a run's journals, one a shard; none where it keeps none."""
    if not command.has_actors or command.replay.journal_dir == "off":
        return []
    kept = command.replay.journal_dir
    directory = Path(command.run_dir) / JOURNAL if kept == "auto" else Path(kept)
    shards = command.wires.shards
    return [directory] if shards == 1 else [directory / f"shard-{shard}" for shard in range(shards)]


def checkpoint_of(directory: Path, at: int, ask: Ask = here) -> Path:
    """Returns a run's checkpoint of an update, the latest for 0.

    Raises: ConfigError when there is none; it names those that there are.
    """
    latest = ask(Question(directory=str(directory))).header
    if latest is None:
        raise ConfigError(f"{directory} has no checkpoint yet: --from-scratch forks its experience alone")
    if at in (0, latest.counters.updates):
        return latest_path(directory)
    kept = {load_header(path).counters.updates: path for path in numbered_checkpoints(directory)}
    if at not in kept:
        updates = ", ".join(map(str, sorted({*kept, latest.counters.updates})))
        raise ConfigError(
            f"--at {at}: {directory} has checkpoints of updates {updates} (--keep-checkpoints keeps more)"
        )
    return kept[at]


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
