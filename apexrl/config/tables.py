"""The tables of the replay, as --tables names them, and their parts where several servers share the experience."""

import dataclasses
import re
from typing import Any, Literal, NamedTuple, cast, get_args

from apexrl.config.sections import ReplayConfig
from apexrl.errors import ConfigError

TableKind = Literal["priority", "uniform", "elite", "fifo", "lifo"]
NAME = re.compile(r"([A-Za-z0-9][A-Za-z0-9_-]{0,63}/)?\w[\w.@-]*")  # that of a log is one of a directory, too
DISTINCT = ("uniform", "elite")  # kinds that draw no unroll twice in a batch
QUEUES = ("fifo", "lifo")  # kinds that hand out each unroll once
FORM = "NAME=KIND:SAMPLES_PER_INSERT:MIN_SIZE:CAPACITY:MOST_DRAWS"


class TableSpec(NamedTuple):
    """A table as an algorithm or --tables asks for it; numbers that are None follow from those of the replay."""

    name: str
    kind: TableKind
    samples_per_insert: float | None = None
    min_size_to_sample: int | None = None
    capacity: int | None = None
    most_draws: int | None = None

    def __str__(self) -> str:
        """The text that --tables takes, and `table_spec` reads."""
        numbers = ("" if number is None else str(number).removesuffix(".0") for number in self[2:])
        return f"{self.name}={':'.join([self.kind, *numbers]).rstrip(':')}"


class TableConfig(NamedTuple):
    """One table of the replay; its numbers count transitions, or unrolls if the table holds those."""

    kind: TableKind
    samples_per_insert: float
    min_size_to_sample: int
    capacity: int = 0  # unrolls: uniform keeps the newest, elite the worthiest; 0: all that the log holds
    most_draws: int = 0  # after so many draws an item leaves; 0: it stays


def table_spec(text: str) -> TableSpec:
    """Returns a table by its text.

    Raises: ConfigError when it has not the form of FORM.
    """
    name, _, rest = text.partition("=")
    kind, *given = rest.split(":")
    try:
        numbers: list[Any] = [read(n) if n else None for read, n in zip((float, int, int, int), given, strict=False)]
    except ValueError:
        kind = ""
    if kind not in get_args(TableKind) or not NAME.fullmatch(name) or len(given) > 4:
        raise ConfigError(
            f"--tables {text}: give {FORM}, with a name of letters, digits and _ . @ -, behind LOG/ where a server has "
            "several logs, and the kind priority, uniform, elite, fifo or lifo; numbers may be left out"
        )
    return TableSpec(name, cast(TableKind, kind), *numbers)


def tables_of(config: ReplayConfig, unroll_starts: int, has_unroll_priorities: bool = False) -> dict[str, TableConfig]:
    """Returns the tables by name. A queue gives each unroll once, from the first on, unless it says otherwise.

    Raises: ConfigError when a table makes no sense, or two have one name.
    """
    tables: dict[str, TableConfig] = {}
    for spec in map(table_spec, config.tables):
        name, kind, samples_per_insert, min_size, capacity, most = spec
        if min_size is None:
            min_size = 1 if kind in QUEUES else config.min_size_to_sample
            if kind in DISTINCT or (kind == "priority" and has_unroll_priorities):
                min_size = max(min_size // unroll_starts, 1)
        if samples_per_insert is None:
            samples_per_insert = 1.0 if kind in QUEUES else config.samples_per_insert
        if "/" in name:
            raise ConfigError(f"--tables {spec}: the log of a run has no name: leave it out")
        if name in tables:
            raise ConfigError(f"--tables {spec}: there is a table {name} before: give each name once")
        if not (0 <= samples_per_insert < float("inf") and 1 <= min_size <= config.capacity):
            raise ConfigError(f"--tables {spec}: samples an insert from 0, a size from 1 to --capacity are needed")
        if capacity is not None and (kind not in DISTINCT or capacity < 1):
            raise ConfigError(f"--tables {spec}: a uniform or elite table alone has a capacity, 1 unroll or more")
        if kind in QUEUES and samples_per_insert > 1:
            raise ConfigError(f"--tables {spec}: a {kind} gives each unroll once, so at most 1 sample an insert")
        if most is not None and (kind in QUEUES or most < samples_per_insert or most < 1):
            raise ConfigError(
                f"--tables {spec}: an item may leave after 1 draw or more, not below the samples an insert, and "
                f"leaves a {' or '.join(QUEUES)} with the first"
            )
        if kind == "elite" and not capacity:
            raise ConfigError(f"--tables {spec}: an elite table needs a capacity, as in elite=elite:0:100:2000")
        tables[name] = TableConfig(kind, samples_per_insert, min_size, capacity or 0, most or 0)
    if not tables:
        raise ConfigError("--tables: at least one is needed")
    return tables


def logs_of(config: ReplayConfig) -> dict[str, ReplayConfig]:
    """Returns the numbers of each log of a server, by the name that its tables have in front; one alone may have none.

    Raises: ConfigError when a table makes no sense, or some name a log and others do not.
    """
    tables: dict[str, list[str]] = {}
    for spec in map(table_spec, config.tables):
        log, _, name = spec.name.rpartition("/")
        tables.setdefault(log, []).append(str(spec._replace(name=name)))
    if "" in tables and len(tables) > 1:
        raise ConfigError(
            f"--tables {tables[''][0]}: others name the log {max(tables)}: give each table that of its log, as in "
            f"{max(tables)}/{tables[''][0]}, or none"
        )
    logs = {log: dataclasses.replace(config, tables=tuple(tables.get(log, ()))) for log in tables or ("",)}
    for own in logs.values():
        tables_of(own, 1)
    return logs


def part_of(config: ReplayConfig, num_shards: int) -> ReplayConfig:
    """Returns the numbers of one of several replay servers that share the experience equally."""
    if num_shards == 1:
        return config

    def shared(number: int | None) -> int | None:
        return None if number is None else -(-number // num_shards)

    tables = []
    for spec in map(table_spec, config.tables):
        size, capacity = shared(spec.min_size_to_sample), shared(spec.capacity)
        tables.append(str(spec._replace(min_size_to_sample=size, capacity=capacity)))
    capacity, min_size = (-(-n // num_shards) for n in (config.capacity, config.min_size_to_sample))
    max_gb = config.max_gb / num_shards
    return dataclasses.replace(
        config, capacity=capacity, max_gb=max_gb, min_size_to_sample=min_size, tables=tuple(tables)
    )
