"""Command lines from the configuration's dataclasses, and back."""

import dataclasses
import math
import shutil
import sys
from typing import Any, TypeVar

import tyro

from apexrl.config import PRESETS, tables_of
from apexrl.errors import ConfigError

T = TypeVar("T")


def with_defaults(command: T, defaults: dict[str, Any]) -> T:
    """Returns the command with the fields of these names, at any depth, replaced."""
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(command):  # type: ignore[arg-type]
        value = getattr(command, field.name)
        if dataclasses.is_dataclass(value):
            changes[field.name] = with_defaults(value, defaults)
        elif field.name in defaults:
            changes[field.name] = defaults[field.name]
    return dataclasses.replace(command, **changes)  # type: ignore[type-var]


def parse(command: type[T], arguments: list[str] | None = None) -> T:
    """Returns the command that the arguments describe, on top of its preset; ends the program when they are wrong.

    The preset auto is the paper's where there is an NVIDIA GPU, else that for two cores.

    Raises: ConfigError when a number is outside its range, or two contradict each other.
    """
    preset = parse_onto(command(), arguments).preset  # type: ignore[attr-defined]
    if preset == "auto":
        preset = "paper" if shutil.which("nvidia-smi") else "two-cores"
    parsed = parse_onto(with_defaults(command(), PRESETS[preset]), arguments)
    check_together(parsed)
    return dataclasses.replace(parsed, preset=preset)  # type: ignore[type-var]


def parse_onto(default: T, arguments: list[str] | None = None) -> T:
    """Returns the default with what the arguments change; ends the program with a message when they are malformed.

    Raises: ConfigError when a number is outside its range.
    """
    command = tyro.cli(
        type(default),
        args=sys.argv[1:] if arguments is None else arguments,
        default=default,
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
    )
    check_ranges(command)
    return command


MAY_BE_ZERO = {
    *("samples_per_insert", "priority_exponent", "importance_exponent", "gamma", "noop_max", "seed", "max_restarts"),
    *("epsilon_exponent", "evaluation_epsilon", "evaluation_period_seconds", "total_updates", "total_frames"),
    *("max_seconds", "journal_flush_seconds", "memory_gb"),
}
AT_MOST_ONE = {"gamma", "epsilon_base", "evaluation_epsilon", "priority_exponent", "importance_exponent"}


def check_ranges(config: Any) -> None:
    """Raises ConfigError when a number is not finite, or negative, or zero where that means nothing."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        flag = "--" + field.name.replace("_", "-")
        if dataclasses.is_dataclass(value):
            check_ranges(value)
            continue
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, bool) or not isinstance(number, int | float) or field.name == "worker_index":
                continue
            if not math.isfinite(number) or number < 0 or (number == 0 and field.name not in MAY_BE_ZERO):
                bound = "at least" if field.name in MAY_BE_ZERO else "more than"
                raise ConfigError(f"{flag} {number} makes no sense: it has to be {bound} 0")
            if field.name in AT_MOST_ONE and number > 1:
                raise ConfigError(f"{flag} {number} makes no sense: it has to be at most 1")


def check_together(command: Any) -> None:
    """Raises ConfigError when numbers contradict each other; only a command on top of its preset can tell."""
    replay = getattr(command, "replay", None)
    if replay is not None and replay.min_size_to_sample > replay.capacity:
        raise ConfigError(f"--min-size-to-sample {replay.min_size_to_sample} is more than --capacity {replay.capacity}")
    tables = tables_of(replay, 1) if replay is not None else {}
    learning = getattr(command, "learning", None)
    if tables and learning is not None and (learning.table not in tables or tables[learning.table].kind != "priority"):
        raise ConfigError(f"--table {learning.table}: it has to be one of --tables, of the kind priority")


def to_flags(command: Any) -> list[str]:
    """Returns arguments from which `parse` makes this command, whose preset is not auto; defaults are left out."""
    return ["--preset", command.preset, *_flags(command, with_defaults(type(command)(), PRESETS[command.preset]))]


def _flags(config: Any, default: Any) -> list[str]:
    flags: list[str] = []
    for field in dataclasses.fields(config):
        value, usual = getattr(config, field.name), getattr(default, field.name)
        name = "--" + field.name.replace("_", "-")
        if dataclasses.is_dataclass(value):
            flags += _flags(value, usual)
        elif value == usual or field.name == "preset":
            continue
        elif isinstance(value, bool):
            flags.append(name if value else name.replace("--", "--no-", 1))
        elif isinstance(value, tuple):
            flags += [name, *map(str, value)]
        else:
            flags += [name, str(value)]
    return flags
