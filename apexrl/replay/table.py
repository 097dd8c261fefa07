"""Tables sample the log: transitions or unrolls by priority, or whole unrolls, uniformly or first-in first-out.

Every table has a limiter of its own, and follows the log: it is told of each insert and of each eviction.
"""

from typing import Protocol

import msgspec
import numpy as np

from apexrl.replay.limiter import Limiter
from apexrl.replay.priority_index import PriorityIndex
from apexrl.tables import TableConfig
from apexrl.types import Granularity, Sample, StreamSpec


class TableState(msgspec.Struct, frozen=True):
    """The state of a table that survives a restart of the server, besides the log."""

    inserted: int
    sampled: int
    next_number: int = 0  # fifo: number of the unroll to hand out
    priority_exponent: float = 1.0  # that was applied to the priorities
    priorities: bytes = b""  # priority table: float32 [unrolls, P], after the exponent


class Table(Protocol):
    """One way to sample the log."""

    limiter: Limiter
    granularity: Granularity

    def insert(self, first_number: int, priorities: np.ndarray, valid: np.ndarray) -> None:
        """Takes note of new unrolls: priorities [M, P] before the exponent, valid [M, K] where a transition starts."""

    def skip(self, end_number: int) -> None:
        """The numbers up to end_number - 1 that were not inserted do not exist; only while a log is restored."""

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

    def state(self) -> TableState:
        """Returns the state that survives a restart."""

    def restore(self, state: TableState, first_number: int, end_number: int) -> None:
        """Takes the state of when the log held first_number .. end_number - 1; later unrolls are inserted already.

        Raises: ValueError when the state does not fit.
        """


def make_table(config: TableConfig, ring_unrolls: int, spec: StreamSpec, exponents: tuple[float, float],
               seed: int | np.random.SeedSequence) -> Table:  # fmt: skip
    """Returns an empty table; exponents are of the priority and of the importance weights."""
    limiter = Limiter(config.samples_per_insert, config.min_size_to_sample, 1.0, is_queue=config.kind == "fifo")
    rng = np.random.default_rng(seed)
    if config.kind == "priority":
        granularity: Granularity = "unrolls" if spec.has_unroll_priorities else "transitions"
        return PriorityTable(granularity, (ring_unrolls, spec.num_priorities), exponents, limiter, rng)
    return FifoTable(limiter, rng) if config.kind == "fifo" else UniformTable(limiter, rng, config.capacity)


def drawable(valid: np.ndarray, priorities: np.ndarray) -> np.ndarray:
    """Returns [M, P] bool: where a priority is of something that exists, a transition or an unroll that has some."""
    return valid if valid.shape == priorities.shape else np.any(valid, axis=1, keepdims=True)


def importance_weights(probabilities: np.ndarray, exponent: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns [..., B] float32 probability ** -exponent, divided by the largest of each batch, and those [...].

    Source: arXiv:1511.05952, section 3.4, whose factor (number of items) ** -exponent the division takes away; the
    largest weight is taken over the batch, as in dqn_zoo.
    """
    weights = probabilities**-exponent
    largest = weights.max(axis=-1)
    return (weights / largest[..., None]).astype(np.float32), largest


def one_by_one(table: Table, batch_size: int, most: int) -> list[Sample]:
    """Draws up to `most` batches, each by itself."""
    samples: list[Sample] = []
    while len(samples) < most and table.can_sample(batch_size):
        samples.append(table.sample(batch_size))
    return samples


class PriorityTable:
    """Items in proportion to priority ** exponent. One owner; mirrors the log's first and end number.

    An unroll has P items: its K transitions, or itself. The key of an item is unroll_number * P + offset, and no key
    is used twice. The row of an item in the index is that of its unroll in the ring. So a key older than the ring is
    recognised by comparison, and a late priority never lands on the newer item that took its place. The limiter counts
    items that exist: valid transitions, or unrolls that have one.
    """

    def __init__(self, granularity: Granularity, index_shape: tuple[int, int], exponents: tuple[float, float],
                 limiter: Limiter, rng: np.random.Generator):  # fmt: skip
        """Makes an empty table.

        Args:
          index_shape: unrolls in the ring, and items of an unroll.
          exponents: that of the priority, and that of the importance weights.
        """
        self.granularity: Granularity = granularity
        self.limiter = limiter
        self.num_stale = 0
        self._index = PriorityIndex(*index_shape)
        self._ring_unrolls, self._unroll_items = index_shape
        self._priority_exponent, self._importance_exponent = exponents
        self._rng = rng
        self._first_number = 0
        self._end_number = 0
        self._items = np.zeros(self._ring_unrolls, np.int64)  # that exist, by row

    def insert(self, first_number: int, priorities: np.ndarray, valid: np.ndarray) -> None:
        rows = (first_number + np.arange(len(priorities))) % self._ring_unrolls
        exists = drawable(valid, priorities)
        self._index.set_rows(rows, np.where(exists, self._powers(priorities), 0.0))
        self._items[rows] = exists.sum(axis=1)
        self.limiter.inserted += int(self._items[rows].sum())
        self._first_number = first_number if self._first_number == self._end_number else self._first_number
        self._end_number = first_number + len(priorities)

    def skip(self, end_number: int) -> None:
        self._first_number = end_number if self._first_number == self._end_number else self._first_number
        self._end_number = end_number

    def evict(self, number: int) -> None:
        row = np.array([number % self._ring_unrolls])
        self._index.set_rows(row, np.zeros((1, self._unroll_items)))
        self._items[row] = 0
        self._first_number = number + 1

    def can_sample(self, batch_size: int) -> bool:
        return self._index.total() > 0

    def sample(self, batch_size: int) -> Sample:
        return self.samples(batch_size, 1)[0]

    def samples(self, batch_size: int, most: int) -> list[Sample]:
        rows, columns, probabilities = self._index.sample(most, batch_size, self._rng)
        numbers = self._first_number + (rows - self._first_number) % self._ring_unrolls
        keys = numbers * self._unroll_items + columns
        self.limiter.sampled += keys.size
        weights, largest = importance_weights(probabilities, self._importance_exponent)
        return list(map(Sample, keys, probabilities, weights, largest.tolist()))

    def update_priorities(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """Sets the priorities of the keys still held, in order; the others are ignored and counted in `num_stale`.

        An item of priority 0 cannot be drawn and stays so.
        """
        numbers = keys // self._unroll_items
        held = (numbers >= self._first_number) & (numbers < self._end_number)
        self.num_stale += int(len(keys) - held.sum())
        rows, columns = numbers[held] % self._ring_unrolls, keys[held] % self._unroll_items
        exists = self._index.get(rows, columns) > 0
        rows, columns, priorities = rows[exists], columns[exists], priorities[held][exists]
        self._index.set(rows, columns, self._powers(priorities))
        if (gone := priorities == 0).any():  # whatever a key's later priorities are
            self._index.set(rows[gone], columns[gone], np.zeros(gone.sum()))

    def state(self) -> TableState:
        rows = np.arange(self._first_number, self._end_number) % self._ring_unrolls
        powers = self._index.get_rows(rows).astype(np.float32)
        return TableState(self.limiter.inserted, self.limiter.sampled, 0, self._priority_exponent, powers.tobytes())

    def restore(self, state: TableState, first_number: int, end_number: int) -> None:
        """Takes the state; priorities of another exponent are converted.

        Raises: ValueError when the state does not fit the numbers.
        """
        powers = np.frombuffer(state.priorities, np.float32).astype(np.float64).reshape(-1, self._unroll_items)
        if len(powers) < end_number - first_number:
            raise ValueError(f"priorities of {len(powers)} unrolls, not {end_number - first_number}")
        if state.priority_exponent != self._priority_exponent:
            old = state.priority_exponent
            powers = self._powers(powers ** (1 / old) if old > 0 else (powers > 0).astype(np.float64))
        held = np.arange(max(first_number, self._first_number), min(end_number, self._end_number))
        rows = held % self._ring_unrolls
        powers = powers[held - first_number]
        # An item that cannot be drawn stays so: a missing unroll, a start that is a reset.
        self._index.set_rows(rows, np.where(self._index.get_rows(rows) > 0, powers, 0))
        since = np.arange(max(end_number, self._first_number), self._end_number) % self._ring_unrolls
        self.limiter.resume(state.inserted, state.sampled, int(self._items[since].sum()))

    def priority_quantiles(self, quantiles: tuple[float, ...], num_draws: int = 1024) -> np.ndarray:
        """Returns quantiles of the priorities (before the exponent) of items drawn uniformly."""
        if self._end_number == self._first_number:
            return np.zeros(len(quantiles))
        rng = np.random.default_rng(0)
        rows = rng.integers(self._first_number, self._end_number, num_draws) % self._ring_unrolls
        powers = self._index.get(rows, rng.integers(0, self._unroll_items, num_draws))
        powers = powers[powers > 0]
        if not len(powers) or self._priority_exponent == 0:
            return np.zeros(len(quantiles))
        return np.quantile(powers, quantiles) ** (1 / self._priority_exponent)

    def check_valid(self) -> None:
        """Raises AssertionError when the sums are wrong, or a place outside the numbers held can be drawn."""
        self._index.check_valid()
        held = np.zeros(self._ring_unrolls, bool)
        held[np.arange(self._first_number, self._end_number) % self._ring_unrolls] = True
        assert not self._index.get_rows(np.flatnonzero(~held)).any(), "an unroll that is not held can be sampled"

    def _powers(self, priorities: np.ndarray) -> np.ndarray:
        """Returns priority ** exponent, but 0 for 0 whatever the exponent: it cannot be drawn."""
        return np.where(priorities > 0, priorities.astype(np.float64) ** self._priority_exponent, 0.0)


class _UnrollTable:
    """The common part of tables of unrolls without priorities: the numbers that can be drawn, which are the keys.

    The rank of an unroll is the count of those held before it.
    """

    granularity: Granularity = "unrolls"

    def __init__(self, limiter: Limiter, rng: np.random.Generator):
        self.limiter = limiter
        self._rng = rng
        self._first_number = 0
        self._end_number = 0
        self._missing = np.zeros(0, np.int64)  # numbers held that a damaged journal lost, ascending

    def insert(self, first_number: int, priorities: np.ndarray, valid: np.ndarray) -> None:
        self._first_number = first_number if self._first_number == self._end_number else self._first_number
        self._end_number = first_number + len(priorities)
        self.limiter.inserted += len(priorities)

    def skip(self, end_number: int) -> None:
        if self._first_number == self._end_number:
            self._first_number = end_number
        lost = np.arange(max(self._end_number, self._first_number), end_number)
        self._missing = np.concatenate([self._missing, lost])
        self._end_number = end_number

    def evict(self, number: int) -> None:
        self._missing = self._missing[self._num_missing_before(number + 1) :]
        self._first_number = number + 1

    def can_sample(self, batch_size: int) -> bool:
        return self._size_from(self._oldest()) >= batch_size

    def update_priorities(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """Does nothing: this table has no priorities."""

    def state(self) -> TableState:
        return TableState(self.limiter.inserted, self.limiter.sampled)

    def restore(self, state: TableState, first_number: int, end_number: int) -> None:
        self.limiter.resume(state.inserted, state.sampled, self._size_from(max(end_number, self._first_number)))

    def _oldest(self) -> int:
        """Returns the number from which on unrolls can be drawn."""
        return self._first_number

    def _size_from(self, number: int) -> int:
        """Returns how many unrolls are held from a number on."""
        return max(self._end_number - number - len(self._missing) + self._num_missing_before(number), 0)

    def _numbers_from(self, number: int, ranks: np.ndarray) -> np.ndarray:
        """Returns the numbers [B] of the unrolls at ranks [B] among those from a number on."""
        missing = self._missing[self._num_missing_before(number) :]
        held_before = missing - number - np.arange(len(missing))
        return number + ranks + np.searchsorted(held_before, ranks, side="right")

    def _num_missing_before(self, number: int) -> int:
        return int(np.searchsorted(self._missing, number))


class UniformTable(_UnrollTable):
    """Whole unrolls, each as likely as any other, none twice in a batch. The limiter counts unrolls."""

    def __init__(self, limiter: Limiter, rng: np.random.Generator, capacity: int = 0):
        """Makes an empty table of the newest `capacity` unrolls, or with 0 of all that the log holds."""
        super().__init__(limiter, rng)
        self._capacity = capacity

    def sample(self, batch_size: int) -> Sample:
        oldest = self._oldest()
        size = self._size_from(oldest)
        # In random order: a learner that looks at the first of them only sees a fair draw, too.
        keys = self._numbers_from(oldest, self._rng.choice(size, batch_size, replace=False))
        self.limiter.sampled += batch_size
        return Sample(keys, np.full(batch_size, 1 / size), np.ones(batch_size, np.float32))

    def samples(self, batch_size: int, most: int) -> list[Sample]:
        return one_by_one(self, batch_size, most)

    def _oldest(self) -> int:
        return max(self._first_number, self._end_number - self._capacity) if self._capacity else self._first_number


class FifoTable(_UnrollTable):
    """Whole unrolls in the order of the log, each once. One that is evicted before it was drawn counts as missed."""

    def __init__(self, limiter: Limiter, rng: np.random.Generator):
        super().__init__(limiter, rng)
        self.num_missed = 0
        self._next_number = 0

    def evict(self, number: int) -> None:
        is_missing = self._num_missing_before(number + 1) > 0
        self.num_missed += self._next_number <= number and not is_missing
        super().evict(number)

    def keep_newest(self, count: int) -> None:
        """Forgets unrolls that were not handed out yet, but for the newest so many."""
        if (num_forgotten := self._size_from(self._oldest()) - count) > 0:
            self._next_number = int(self._numbers_from(self._oldest(), np.array([num_forgotten]))[0])
            self.num_missed += num_forgotten

    def sample(self, batch_size: int) -> Sample:
        keys = self._numbers_from(self._oldest(), np.arange(batch_size))
        self._next_number = int(keys[-1]) + 1
        self.limiter.sampled += batch_size
        return Sample(keys, np.ones(batch_size), np.ones(batch_size, np.float32))

    def samples(self, batch_size: int, most: int) -> list[Sample]:
        return one_by_one(self, batch_size, most)

    def state(self) -> TableState:
        return TableState(self.limiter.inserted, self.limiter.sampled, self._next_number)

    def restore(self, state: TableState, first_number: int, end_number: int) -> None:
        super().restore(state, first_number, end_number)
        self._next_number = min(state.next_number, end_number)

    def _oldest(self) -> int:
        return max(self._next_number, self._first_number)
