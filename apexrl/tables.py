"""The tables of the replay, as --tables names them, and their parts where several servers share the experience."""

import dataclasses
import re
from typing import Literal, NamedTuple, cast, get_args

from apexrl.config import ReplayConfig
from apexrl.errors import ConfigError

TableKind = Literal["priority", "uniform", "elite", "fifo"]
NAME = re.compile(r"\w[\w.@-]*")
DISTINCT = ("uniform", "elite")  # kinds that draw no unroll twice in a batch


class TableConfig(NamedTuple):
    """One table of the replay; its numbers count transitions, or unrolls if the table holds those."""

    kind: TableKind
    samples_per_insert: float
    min_size_to_sample: int
    capacity: int = 0  # unrolls: uniform keeps the newest, elite the worthiest; 0: all that the log holds


def tables_of(config: ReplayConfig, unroll_starts: int, has_unroll_priorities: bool = False) -> dict[str, TableConfig]:
    """Returns the tables by name. A fifo gives each unroll once, from the first on, unless it says otherwise.

    Raises: ConfigError when one is not NAME=KIND:SAMPLES_PER_INSERT:MIN_SIZE:CAPACITY, or two have one name.
    """
    tables: dict[str, TableConfig] = {}
    for text in config.tables:
        name, _, rest = text.partition("=")
        kind, *numbers = rest.split(":")
        samples_per_insert, min_size = config.samples_per_insert, config.min_size_to_sample
        if kind in DISTINCT or (kind == "priority" and has_unroll_priorities):
            min_size = max(min_size // unroll_starts, 1)
        elif kind == "fifo":
            samples_per_insert, min_size = 1.0, 1
        given = dict(zip(("samples", "size", "capacity"), numbers, strict=False))
        try:
            samples_per_insert = float(given.get("samples") or samples_per_insert)
            min_size = int(given.get("size") or min_size)
            capacity = int(given.get("capacity") or 0)
        except ValueError:
            kind = ""
        if kind not in get_args(TableKind) or not NAME.fullmatch(name) or len(numbers) > 3 or name in tables:
            raise ConfigError(
                f"--tables {text}: give NAME=KIND:SAMPLES_PER_INSERT:MIN_SIZE:CAPACITY, each name once, of letters, "
                "digits and _ . @ -, with the kind priority, uniform, elite or fifo; numbers may be left out"
            )
        if not (0 <= samples_per_insert < float("inf") and 1 <= min_size <= config.capacity):
            raise ConfigError(f"--tables {text}: samples an insert from 0, a size from 1 to --capacity are needed")
        if capacity < 0 or (given.get("capacity") and (kind not in DISTINCT or not capacity)):
            raise ConfigError(f"--tables {text}: a uniform or elite table alone has a capacity, 1 unroll or more")
        if kind == "fifo" and samples_per_insert > 1:
            raise ConfigError(f"--tables {text}: a fifo gives each unroll once, so at most 1 sample an insert")
        if kind == "elite" and not capacity:
            raise ConfigError(f"--tables {text}: an elite table needs a capacity, as in elite=elite:0:100:2000")
        tables[name] = TableConfig(cast(TableKind, kind), samples_per_insert, min_size, capacity)
    if not tables:
        raise ConfigError("--tables: at least one is needed")
    return tables


def part_of(config: ReplayConfig, num_shards: int) -> ReplayConfig:
    """Returns the numbers of one of several replay servers that share the experience equally."""
    if num_shards == 1:
        return config
    tables = []
    for text in config.tables:
        kind, *numbers = text.split(":")
        parts = [_shared(n, num_shards) if i else n for i, n in enumerate(numbers)]
        tables.append(":".join([kind, *parts]))
    capacity, min_size = (-(-n // num_shards) for n in (config.capacity, config.min_size_to_sample))
    return dataclasses.replace(config, capacity=capacity, min_size_to_sample=min_size, tables=tuple(tables))


def _shared(number: str, num_shards: int) -> str:
    """Returns a shard's part of a number; what is none stays, and `tables_of` says so."""
    try:
        return str(-(-int(number) // num_shards))
    except ValueError:
        return number
