"""A table is one way to sample the log.

It has a limiter of its own, and follows the log: it is told of each insert and of each eviction. `priority_table.py`
and `unroll_tables.py` hold the kinds of tables, `kinds.py` makes one.
"""

from typing import Any

import msgspec

from apexrl.replay.limiter import Limiter
from apexrl.types import Count, Finite


class TableState(msgspec.Struct, frozen=True):
    """The state of a table that survives a restart of the server, besides the log."""

    inserted: Count
    sampled: Count
    next_number: Count = 0  # fifo: number of the unroll to hand out
    priority_exponent: float = 1.0  # that was applied to the priorities
    priorities: bytes = b""  # float32: priority [unrolls, P], after the exponent; elite [unrolls]
    numbers: bytes = b""  # int64: unrolls that an elite table keeps, and that left one of another kind
    forgiven: Finite = 0.0  # samples
    samples_per_insert: Finite = -1.0  # that paced it, with min_size; -1: an older server did not write it
    min_size: int = 0
    counted_keys: bytes = b""  # int64: items that were drawn and leave after some draws
    counts: bytes = b""  # int64: how often


def state_of(limiter: Limiter, **own: Any) -> TableState:
    """Returns the state of a table with this limiter; `own` are the fields of its kind."""
    return TableState(
        limiter.inserted, limiter.sampled, forgiven=limiter.forgiven,
        samples_per_insert=limiter.samples_per_insert, min_size=limiter.min_size, **own,
    )  # fmt: skip


def resume(limiter: Limiter, state: TableState, inserted_since: int) -> None:
    """Continues a limiter from a state, at whose pace so many items came after it."""
    own = limiter.samples_per_insert, limiter.min_size
    if is_paced_anew := has_other_pace(limiter, state):
        limiter.samples_per_insert, limiter.min_size = state.samples_per_insert, state.min_size
    limiter.resume(state.inserted, state.sampled, inserted_since, state.forgiven)
    limiter.samples_per_insert, limiter.min_size = own
    if is_paced_anew:
        limiter.forgive()


def has_other_pace(limiter: Limiter, state: TableState) -> bool:
    """Returns whether a limiter has another pace than the one that is known of a state."""
    paced_by = state.samples_per_insert, state.min_size
    return state.samples_per_insert >= 0 and paced_by != (limiter.samples_per_insert, limiter.min_size)
