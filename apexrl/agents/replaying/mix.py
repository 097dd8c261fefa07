"""Mixes of experience: which share of a batch comes from which table. Loads no torch."""

import math
from fractions import Fraction
from typing import Any, Literal, NamedTuple, cast, get_args

from apexrl.config.tables import TableSpec
from apexrl.errors import ConfigError

SelectionRule = Literal["attentive", "elite-1", "elite-2", "elite-3", "elite-4"]
FeatureDistance = Literal["l2", "cosine"]
Distance = Literal["kl", FeatureDistance]
PartKind = Literal["queue", "uniform", "elite-insertion", SelectionRule]
SELECTING = get_args(SelectionRule)
KINDS = ("queue", "uniform", "elite-insertion", *SELECTING)
LEAST = {"candidates": 1, "anneal-updates": 0}
DISTANCES_OF = {kind: get_args(FeatureDistance if kind == "attentive" else Distance) for kind in SELECTING}


class Selection(NamedTuple):
    """The part of the unrolls of a table that a learner keeps; `replaying/selection.py` has the rules."""

    rule: SelectionRule
    num_kept: int
    distance: Distance
    anneal_updates: int = 0  # the candidates become fewer, down to num_kept; 0: their number stays
    queue: str = ""  # attentive: the table whose newest batch candidates are compared with


class Part(NamedTuple):
    """One part of a mix, served by a table of its own."""

    name: str  # of the table: KIND or KIND@CAPACITY
    kind: PartKind
    capacity: int  # unrolls; 0: as many as the log holds
    share: Fraction  # of each batch
    distance: Distance | None = None  # of its selection, as the next two; None: the flag of that name decides
    candidates: int | None = None
    anneal_updates: int | None = None

    @property
    def is_online(self) -> bool:
        """Whether the part hands out new unrolls, each once; the others replay."""
        return self.kind == "queue"

    @property
    def rule(self) -> SelectionRule | None:
        """The rule by which the learner keeps some of more candidates; None where it takes what comes."""
        return cast(SelectionRule, self.kind) if self.kind in SELECTING else None

    @property
    def overwrites_worst(self) -> bool:
        """Whether its table overwrites the unrolls to which the learner gives the smallest priorities."""
        return self.kind == "elite-insertion"


def parts_of(mix: tuple[str, ...]) -> tuple[Part, ...]:
    """Returns the parts of a mix, as --mix gives them.

    Raises: ConfigError when one is not KIND=SHARE or KIND@CAPACITY=SHARE, with options that its kind has, or the shares
      do not add up to 1.
    """
    parts = []
    for text in mix:
        given, _, share_text = text.rpartition("=")
        name, *options = given.split(":")
        kind, at, capacity_text = name.partition("@")
        try:
            share, capacity = Fraction(share_text), int(capacity_text) if at else 0
        except (ValueError, ZeroDivisionError):
            share, capacity = Fraction(0), 0
        if kind not in KINDS or share <= 0 or bool(at) != (capacity > 0) or (at and kind == "queue"):
            raise ConfigError(
                f"--mix {text}: give KIND=SHARE or KIND@CAPACITY=SHARE, as in queue=1/8 uniform@10000=7/8; "
                f"kinds are {', '.join(KINDS)}; a capacity counts unrolls, and a queue has none"
            )
        if kind == "elite-insertion" and not capacity:
            raise ConfigError(f"--mix {text}: it overwrites when it is full: say when, as in elite-insertion@2000=1/2")
        parts.append(Part(name, cast(PartKind, kind), capacity, share, **_selection_of(text, kind, options)))
    total = sum(part.share for part in parts)
    if total != 1 or len({part.name for part in parts}) != len(parts):
        raise ConfigError(f"--mix {' '.join(mix)}: the shares add up to {total}; give each part once, 1 in all")
    return tuple(parts)


def _selection_of(text: str, kind: str, options: list[str]) -> dict[str, Any]:
    """Returns the settings of a part's selection that its options give, by field."""
    found: dict[str, str | int] = {}
    for option in options:
        name, _, value = option.partition("=")
        field = name.replace("-", "_")
        if name == "distance" and value in DISTANCES_OF.get(kind, ()) and field not in found:
            found[field] = value
        elif kind in SELECTING and value.isdecimal() and int(value) >= LEAST.get(name, math.inf) and field not in found:
            found[field] = int(value)
        else:
            raise ConfigError(
                f"--mix {text}: elite-1 to elite-4 and attentive take :distance=NAME, :candidates=N and "
                f":anneal-updates=N, each once, as in elite-1@2000:distance=l2:candidates=8=1/4; "
                f"{option!r} is none of them, or one too many"
            )
    return found


def batch_sizes(parts: tuple[Part, ...], batch_size: int) -> dict[str, int]:
    """Returns the unrolls of each part in a batch of so many.

    Raises: ConfigError when they are not whole numbers; the message names batch sizes that work.
    """
    unit = math.lcm(*(part.share.denominator for part in parts))
    if batch_size % unit:
        below = max(batch_size // unit, 1) * unit
        raise ConfigError(
            f"--batch-size {batch_size} cannot be divided as --mix asks: {below} and {below + unit} can, "
            f"or any other multiple of {unit}"
        )
    return {part.name: int(part.share * batch_size) for part in parts}


def tables_for(parts: tuple[Part, ...]) -> tuple[TableSpec, ...]:
    """Returns the tables that serve the parts.

    Actors keep pace with the queue where there is one, else with each table.
    """
    pace = 0.0 if any(part.is_online for part in parts) else None
    return tuple(
        TableSpec(part.name, "fifo")
        if part.is_online
        else TableSpec(part.name, "elite" if part.overwrites_worst else "uniform", pace, capacity=part.capacity or None)
        for part in parts
    )
