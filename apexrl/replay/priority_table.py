"""The table that hands out transitions or unrolls by priority."""

import numpy as np

from apexrl.replay.limiter import Limiter
from apexrl.replay.priority_index import PriorityIndex
from apexrl.replay.table import TableState, resume, state_of
from apexrl.sets import distinct
from apexrl.types import Granularity, Sample


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

    def delete(self, keys: np.ndarray | None) -> int:
        if keys is None:
            keys = np.arange(self._first_number * self._unroll_items, self._end_number * self._unroll_items)
        numbers = keys // self._unroll_items
        held = distinct(keys[(numbers >= self._first_number) & (numbers < self._end_number)])
        rows, columns = held // self._unroll_items % self._ring_unrolls, held % self._unroll_items
        count = int((self._index.get(rows, columns) > 0).sum())
        self._index.set(rows, columns, np.zeros(len(held)))
        return count

    def state(self) -> TableState:
        rows = np.arange(self._first_number, self._end_number) % self._ring_unrolls
        powers = self._index.get_rows(rows).astype(np.float32)
        return state_of(self.limiter, priority_exponent=self._priority_exponent, priorities=powers.tobytes())

    def restore(self, state: TableState, first_number: int, end_number: int) -> None:
        """Takes the state; priorities of another exponent are converted.

        Raises: ValueError when the state does not fit the numbers.
        """
        powers = np.frombuffer(state.priorities, np.float32).astype(np.float64).reshape(-1, self._unroll_items)
        if len(powers) < end_number - first_number:
            raise ValueError(f"priorities of {len(powers)} unrolls, not {end_number - first_number}")
        if not (powers >= 0).all() or not np.isfinite(powers).all():
            raise ValueError("priorities that are no numbers from 0 on")
        if state.priority_exponent != self._priority_exponent:
            old = state.priority_exponent
            powers = self._powers(powers ** (1 / old) if old > 0 else (powers > 0).astype(np.float64))
        held = np.arange(max(first_number, self._first_number), min(end_number, self._end_number))
        rows = held % self._ring_unrolls
        powers = powers[held - first_number]
        # An item that cannot be drawn stays so: a missing unroll, a start that is a reset.
        self._index.set_rows(rows, np.where(self._index.get_rows(rows) > 0, powers, 0))
        since = np.arange(max(end_number, self._first_number), self._end_number) % self._ring_unrolls
        resume(self.limiter, state, int(self._items[since].sum()))

    def begin_anew(self) -> None:
        self.limiter.resume(0, 0, self.limiter.inserted)

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
