"""Proportional sampling over rows of transitions: one row an unroll, one column a start.

The index keeps the sum of each row and of each group of 64 rows. A sample finds its group in the running sum of all
groups, then its row, then its column. Row and column take two steps through eights each. An insert writes one row of
memory and marks it as changed; the next sample recomputes the sums of all changed rows at once. Sums are always
recomputed from their parts, never corrected by differences, so no error builds up.
"""

import numpy as np

EIGHT = 8
GROUP_ROWS = 64
_ONES = np.ones(EIGHT)


class PriorityIndex:
    """Keeps priorities of `num_rows` x `row_size` transitions; samples in proportion to them. Not thread-safe.

    Invariant (`check_valid`): after `total()` each sum is the sum of its parts.
    """

    def __init__(self, num_rows: int, row_size: int):
        """Starts with all priorities zero: nothing can be sampled yet."""
        num_groups = -(-num_rows // GROUP_ROWS)
        self._values = np.zeros((num_rows, -(-row_size // EIGHT) * EIGHT))
        self._row_size = row_size
        self._row_sums = np.zeros((num_groups, GROUP_ROWS))
        self._group_sums = np.zeros(num_groups)
        self._changed: set[int] = set()

    def set_rows(self, rows: np.ndarray, values: np.ndarray) -> None:
        """Replaces the priorities of whole rows [M] with values [M, row_size]; a priority of 0 is never sampled."""
        self._values[rows, : self._row_size] = values
        self._changed.update(rows.tolist())

    def set(self, rows: np.ndarray, columns: np.ndarray, values: np.ndarray) -> None:
        """Replaces single priorities [B]; when a place occurs twice, its last value counts."""
        self._values[rows, columns] = values
        self._changed.update(rows.tolist())

    def get(self, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """Returns the priorities [B] of single places."""
        return self._values[rows, columns]

    def get_rows(self, rows: np.ndarray) -> np.ndarray:
        """Returns a copy of the priorities [M, row_size] of whole rows."""
        return self._values[rows, : self._row_size]

    def total(self) -> float:
        """Returns the sum of all priorities."""
        self._refresh()
        return float(self._group_sums.sum())

    def sample(self, batch_size: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Draws places in proportion to their priorities, one from each of batch_size equal strata.

        Returns: rows [B] int64, columns [B] int64, and their probabilities [B] float64.
        Raises: ValueError when all priorities are zero.
        """
        self._refresh()
        running = np.cumsum(self._group_sums)
        total = running[-1]
        if total <= 0:
            raise ValueError("nothing to sample: all priorities are zero")
        mass = (np.arange(batch_size) + rng.random(batch_size)) * (total / batch_size)
        mass = np.minimum(mass, np.nextafter(total, 0))
        groups = np.searchsorted(running, mass, side="right")
        mass -= running[groups] - self._group_sums[groups]
        row_columns, mass = _descend(self._row_sums, groups, mass)
        rows = groups * GROUP_ROWS + row_columns
        columns, _ = _descend(self._values, rows, mass)
        return rows, columns, self._values[rows, columns] / total

    def check_valid(self) -> None:
        """Raises AssertionError when a sum is not the sum of its parts."""
        self._refresh()
        sums = np.zeros(self._row_sums.size)
        sums[: len(self._values)] = self._values.sum(axis=1)
        assert np.array_equal(self._row_sums.ravel(), sums), "the sum of a row is wrong"
        assert np.array_equal(self._group_sums, self._row_sums.sum(axis=1)), "the sum of a group is wrong"
        assert not self._values[:, self._row_size :].any(), "something lies beyond the last column"

    def _refresh(self) -> None:
        """Recomputes the sums of the changed rows and of their groups."""
        if not self._changed:
            return
        rows = np.fromiter(self._changed, np.int64, len(self._changed))
        self._changed.clear()
        self._row_sums.reshape(-1)[rows] = self._values[rows].sum(axis=1)
        groups = rows // GROUP_ROWS
        self._group_sums[groups] = self._row_sums[groups].sum(axis=1)


def _descend(values: np.ndarray, index: np.ndarray, mass: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Finds the column that each mass [B] falls into, in the lines values[index] ([B, W], W a multiple of 8).

    Returns: columns [B], never one of value 0, and the rest of the mass inside them [B].
    """
    width = values.shape[1]
    lines = np.take(values, index, axis=0)
    eighths = (lines.reshape(-1, EIGHT) @ _ONES).reshape(len(index), width // EIGHT)
    part, mass = _find(eighths, mass)
    inside, mass = _find(lines.reshape(-1, EIGHT)[np.arange(len(index)) * (width // EIGHT) + part], mass)
    return part * EIGHT + inside, mass


def _find(parts: np.ndarray, mass: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the first part of each line [B, W] whose running sum exceeds the mass, and the rest of the mass."""
    running = np.cumsum(parts, axis=1)
    # The mass lies in [0, sum), but rounding may move it out. It must not fall into a part of 0 or behind the last one.
    mass = np.minimum(np.maximum(mass, 0), np.nextafter(running[:, -1], 0))
    found = (running <= mass[:, None]).sum(axis=1)
    lines = np.arange(len(parts))
    return found, mass - (running[lines, found] - parts[lines, found])
