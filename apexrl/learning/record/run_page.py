"""The flags of a run and a page about it, for TensorBoard."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from apexrl.agents.families import FAMILIES
from apexrl.config.commands import LearnerCommand, RunCommand
from apexrl.config.flags import default_command, with_preset
from apexrl.config.sections import DEFAULT_AGENT
from apexrl.errors import ConfigError
from apexrl.files import read_json
from apexrl.lines import printable
from apexrl.runs import CONFIG_FILE, Section, flat, is_telling

# Sections and flags that begin so: they change nothing about the learning.
LEFT_OUT = (
    *("wires", "tensorboard", "run_dir", "name", "max_seconds", "port_base", "callback", "ends_at", "learner_host"),
)
# Told always: HParams has an empty cell where a run does not tell a flag, and leaves it out of its pictures.
NAMING = ("env", "agent", "preset", "seed", "learning-rate")
ALL = "All flags"


class _Config(msgspec.Struct):
    command: Section
    revision: str = "unknown"
    versions: dict[str, str] = {}

    def __post_init__(self) -> None:
        """Raises ValidationError when the values that name a run are of other types than theirs."""
        msgspec.convert(self.command, _Named)


class _Named(msgspec.Struct):
    """The values of a configuration that name a run."""

    agent: str = DEFAULT_AGENT
    preset: str = "auto"
    env: Section = {}


def flags_of(directory: Path) -> dict[str, bool | float | str]:
    """Returns the flags of a run by its directory; none where no launcher has written them."""
    config = config_of(directory)
    return {} if config is None else _flags(config.command)


def telling_flags(command: Mapping[str, Any]) -> tuple[str, dict[str, bool | float | str]]:
    """Returns the flags by which a run differs from others, by its configuration, and what they are.

    Of an algorithm whose module is not imported, and of a preset that it does not have, these are all.
    """
    flags, named = _flags(command), msgspec.convert(command, _Named)
    agent = named.agent.rpartition(":")[2]
    if agent not in FAMILIES:
        return ALL, flags
    try:
        usual = _flags(dataclasses.asdict(with_preset(default_command(RunCommand, agent), named.preset)))
    except ConfigError:
        return ALL, flags
    return "Flags that differ from the preset", {n: value for n, value in flags.items() if value != usual.get(n)}


def about(command: LearnerCommand) -> tuple[dict[str, bool | float | str], str]:
    """Returns the flags by which the run of a learner differs from others, and its page in Markdown, with all flags.

    A learner that was started by hand knows its own flags only.
    """
    config = config_of(Path(command.run_dir)) or _Config(dataclasses.asdict(command))
    what, telling = telling_flags(config.command)
    flags = _flags(config.command)
    tables: dict[str, Mapping[str, Any]] = {
        what: telling,
        ALL: flags,
        "Revision and machine": {"revision": config.revision, "directory": command.run_dir} | config.versions,
    }
    compared = {n: value for n, value in flags.items() if n in NAMING or (n in telling and is_telling(n))}
    return compared, "\n\n".join(f"### {title}\n{table(rows)}" for title, rows in tables.items())


def config_of(directory: Path) -> _Config | None:
    """Returns the configuration of a run as its file holds it, None where there is none."""
    try:
        return read_json(directory / CONFIG_FILE, _Config)
    except ConfigError:
        return None


def _flags(values: Mapping[str, Any]) -> dict[str, bool | float | str]:
    """Returns the flags of a configuration with its sections."""
    told = {name: value for name, value in values.items() if not name.startswith(LEFT_OUT)}
    return {name.replace("_", "-"): _shown(value) for name, value in flat(told).items()}


def _shown(value: Any) -> bool | float | str:
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    return value if isinstance(value, bool | int | float) else str(value)


def table(rows: Mapping[str, Any]) -> str:
    """Returns a table in Markdown, each value in its cell."""
    cells = ([printable(" ".join(str(cell).split())).replace("|", " ") for cell in row] for row in rows.items())
    lines = [f"| {name} | {value} |" for name, value in cells]
    return "\n".join(["| name | value |", "| --- | --- |", *lines])
