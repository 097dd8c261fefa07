"""A table is one way to sample the log.

It has a limiter of its own, and follows the log: it is told of each insert and of each eviction. `priority_table.py`
and `unroll_tables.py` hold the kinds of tables, `kinds.py` makes one.
"""

from typing import Any, Protocol

import msgspec
import numpy as np

from apexrl.replay.limiter import Limiter
from apexrl.types import Count, Finite, Granularity, Sample


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


class Table(Protocol):
    """One way to sample the log."""

    limiter: Limiter
    granularity: Granularity

    def insert(self, first_number: int, priorities: np.ndarray, valid: np.ndarray) -> None:
        """Takes note of new unrolls: priorities [M, P] before the exponent, valid [M, K] where a transition starts."""

    def skip(self, end_number: int) -> None:
        """The numbers up to end_number - 1 that were not inserted do not exist."""

    def evict(self, number: int) -> None:
        """Takes the oldest unroll out of sampling."""

    def can_sample(self, batch_size: int) -> bool:
        """False when nothing is there to be drawn, whatever the limiter says."""

    def sample(self, batch_size: int) -> Sample:
        """Draws a batch; call only when `can_sample`."""

    def samples(self, batch_size: int, most: int) -> list[Sample]:
        """Draws up to `most` batches, as many as `sample` could draw one after the other."""

    def update_priorities(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """Sets the priorities of keys still held, in order; the others are ignored."""

    def delete(self, keys: np.ndarray | None) -> int:
        """Takes items out of sampling for ever, with None all. Returns how many could be drawn before."""

    def state(self) -> TableState:
        """Returns the state that survives a restart."""

    def restore(self, state: TableState, first_number: int, end_number: int) -> None:
        """Takes the state of when the log held first_number .. end_number - 1; later unrolls are inserted already.

        Raises: ValueError when the state does not fit.
        """

    def begin_anew(self) -> None:
        """Goes on without a state: all that is inserted was sampled as often as it was due."""
