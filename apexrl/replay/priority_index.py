"""Proportional sampling over rows of transitions: one row an unroll, one column a start.

A draw goes down three levels: groups of 64 rows, rows, columns. It finds its group in the running sum of all groups. A
line, which is a group's row sums or a row's columns, keeps the running sums of its eights. So a draw finds its eight
by bisection, and its place among the eight numbers of one cache line. Each step is one operation of numpy for all draws
of all batches.

An insert or an update writes the priorities and marks its rows. The next draw recomputes the sums of all marked rows at
once. Sums are always recomputed from their parts, never corrected by differences, so no error builds up.
"""

import numpy as np

EIGHT = 8
GROUP_ROWS = 64
MAX_LINES = 1024  # that are summed up together: they fit in the cache, and BLAS does not ask other threads to help
_ONES = np.ones(EIGHT)


def row_bytes(row_size: int) -> int:
    """Returns the bytes that a row of an index takes: its columns, their sums, and its mark."""
    return 8 * _num_columns(row_size) * (EIGHT + 1) // EIGHT + 1


def _num_columns(row_size: int) -> int:
    return -(-row_size // EIGHT) * EIGHT


class PriorityIndex:
    """Keeps priorities of `num_rows` x `row_size` transitions; samples in proportion to them. Not thread-safe.

    Invariant (`check_valid`): after `total()` each sum is the sum of its parts.
    """

    def __init__(self, num_rows: int, row_size: int):
        """Starts with all priorities zero: nothing can be sampled yet."""
        num_groups = -(-num_rows // GROUP_ROWS)
        self._rows = _Lines(num_rows, _num_columns(row_size))
        self._groups = _Lines(num_groups, GROUP_ROWS)
        self._row_size = row_size
        self._group_sums = np.zeros(num_groups)
        self._is_changed = np.zeros(num_rows, bool)
        self._has_changes = False

    def set_rows(self, rows: np.ndarray, values: np.ndarray) -> None:
        """Replaces the priorities of whole rows [M] with values [M, row_size]; a priority of 0 is never sampled."""
        self._rows.values[rows, : self._row_size] = values
        self._mark(rows)

    def set(self, rows: np.ndarray, columns: np.ndarray, values: np.ndarray) -> None:
        """Replaces single priorities [B]; when a place occurs twice, its last value counts."""
        self._rows.values[rows, columns] = values
        self._mark(rows)

    def get(self, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """Returns the priorities [B] of single places."""
        return self._rows.values[rows, columns]

    def get_rows(self, rows: np.ndarray) -> np.ndarray:
        """Returns a copy of the priorities [M, row_size] of whole rows."""
        return self._rows.values[rows, : self._row_size]

    def total(self) -> float:
        """Returns the sum of all priorities."""
        self._refresh()
        return float(self._group_sums.sum())

    def sample(
        self, num_batches: int, batch_size: int, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Draws places in proportion to their priorities, for each batch one from each of batch_size equal strata.

        Returns: rows [N, B] int64, columns [N, B] int64, and their probabilities [N, B] float64.
        Raises: ValueError when all priorities are zero.
        """
        self._refresh()
        running = np.cumsum(self._group_sums)
        total = running[-1]
        if total <= 0:
            raise ValueError("nothing to sample: all priorities are zero")
        mass = (np.arange(batch_size) + rng.random((num_batches, batch_size))) * (total / batch_size)
        mass = np.minimum(mass.ravel(), np.nextafter(total, 0))
        groups = np.searchsorted(running, mass, side="right")
        mass -= running[groups] - self._group_sums[groups]
        columns, mass, _ = self._groups.find(groups, mass)
        rows = groups * GROUP_ROWS + columns
        columns, _, values = self._rows.find(rows, mass)
        shape = num_batches, batch_size
        return rows.reshape(shape), columns.reshape(shape), (values / total).reshape(shape)

    def check_valid(self) -> None:
        """Raises AssertionError when a sum is not the sum of its parts."""
        self._refresh()
        sums = np.zeros(self._groups.values.size)
        sums[: len(self._rows.values)] = self._rows.values.sum(axis=1)
        assert np.allclose(self._groups.values.ravel(), sums, rtol=1e-12, atol=0), "the sum of a row is wrong"
        sums = self._groups.values.sum(axis=1)
        assert np.allclose(self._group_sums, sums, rtol=1e-12, atol=0), "the sum of a group is wrong"
        self._rows.check_valid()
        self._groups.check_valid()
        assert not self._rows.values[:, self._row_size :].any(), "something lies beyond the last column"

    def _mark(self, rows: np.ndarray) -> None:
        self._is_changed[rows] = True
        self._has_changes = True

    def _refresh(self) -> None:
        """Recomputes the sums of the changed rows and of their groups."""
        if not self._has_changes:
            return
        rows = np.flatnonzero(self._is_changed)
        self._is_changed[rows] = False
        self._has_changes = False
        self._groups.values.reshape(-1)[rows] = self._rows.refresh(rows)
        groups = rows // GROUP_ROWS
        groups = groups[np.flatnonzero(np.diff(groups, prepend=-1))]
        self._group_sums[groups] = self._groups.refresh(groups)


class _Lines:
    """Lines of numbers of at least 0, each with the running sums of its eights. The width is a multiple of 8."""

    def __init__(self, num_lines: int, width: int):
        self.values = np.zeros((num_lines, width))
        self._eights = width // EIGHT
        self._padded = 1 << (self._eights - 1).bit_length()  # for the bisection; behind the last sum all is infinite
        self._running = np.full((num_lines, self._padded), np.inf)
        self._running[:, : self._eights] = 0.0

    def refresh(self, lines: np.ndarray) -> np.ndarray:
        """Recomputes the sums of some lines [M]; returns the sums [M] of the whole lines."""
        for first in range(0, len(lines), MAX_LINES):
            some = lines[first : first + MAX_LINES]
            eights = np.take(self.values, some, axis=0).reshape(-1, EIGHT) @ _ONES
            self._running[some, : self._eights] = _running(eights.reshape(len(some), self._eights).T).T
        return self._running[lines, self._eights - 1]

    def find(self, lines: np.ndarray, mass: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Finds the column that each mass [B] falls into, in the given lines [B].

        Returns: columns [B], never one of value 0, the rest of the mass inside them [B], and their values [B].
        """
        running, first = self._running.reshape(-1), lines * self._padded
        mass = _inside(mass, running[first + (self._eights - 1)])
        part = _bisect(running, first, 1, self._padded, mass)
        mass = mass - np.where(part > 0, running[first + part - 1], 0.0)
        eights = np.take(self.values.reshape(-1, EIGHT), lines * self._eights + part, axis=0)
        sums = _running(eights.T)
        mass, running, first = _inside(mass, sums[-1]), sums.reshape(-1), np.arange(len(lines))
        inside = _bisect(running, first, len(lines), EIGHT, mass)
        values = eights.reshape(-1)[first * EIGHT + inside]
        return part * EIGHT + inside, mass - (running[inside * len(lines) + first] - values), values

    def check_valid(self) -> None:
        """Raises AssertionError when a running sum is not the sum of its parts."""
        sums = np.cumsum(self.values.reshape(len(self.values), -1, EIGHT).sum(axis=2), axis=1)
        assert np.allclose(self._running[:, : self._eights], sums, rtol=1e-12, atol=0), "a running sum is wrong"


def _running(parts: np.ndarray) -> np.ndarray:
    """Returns the running sums [W, B] over the first axis; numpy's own cumsum takes several times as long."""
    sums = np.array(parts, order="C")
    for i in range(1, len(sums)):
        sums[i] += sums[i - 1]
    return sums


def _bisect(running: np.ndarray, first: np.ndarray, stride: int, width: int, mass: np.ndarray) -> np.ndarray:
    """Returns [B] how many of the first `width` - 1 running sums of each draw do not exceed its mass.

    Args:
      running: flat; the sums of a draw begin at first [B] and are `stride` apart.
      width: a power of two.
    """
    found = np.zeros_like(first)
    step = width // 2
    while step:
        found += (running[first + (found + (step - 1)) * stride] <= mass) * step
        step //= 2
    return found


def _inside(mass: np.ndarray, sums: np.ndarray) -> np.ndarray:
    """Returns the mass [B] in [0, sum), where rounding may have moved it out: it must not fall into a part of 0."""
    return np.minimum(np.maximum(mass, 0), np.nextafter(sums, 0))
