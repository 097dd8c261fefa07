"""Proportional sampling over rows of transitions: one row an unroll, one column a start.

A binary tree holds the sum of each row; inside a row a running sum finds the column. Rows whose priorities changed
are marked, and their sums are brought up to date together, level by level, when somebody samples: an insert costs one
row of memory. Sums are always recomputed from their parts, never corrected by differences, so no error builds up.
"""

import numpy as np


class PriorityIndex:
    """Priorities of `num_rows` x `row_size` slots; sampling in proportion to them. One owner, not thread-safe.

    Invariant (`check_valid`): after `total()` each node of the tree is the sum of its two children, and each leaf the
    sum of its row.
    """

    def __init__(self, num_rows: int, row_size: int):
        self._values = np.zeros((num_rows, row_size))
        self._leaves = 1 << max(num_rows - 1, 1).bit_length()
        self._tree = np.zeros(2 * self._leaves)
        self._changed: set[int] = set()

    @property
    def num_slots(self) -> int:
        """Slots in all rows; a slot is row * row_size + column."""
        return self._values.size

    def set_row(self, row: int, values: np.ndarray) -> None:
        """Replaces the priorities [row_size] of one row; zeros take it out of sampling."""
        self._values[row] = values
        self._changed.add(row)

    def set_slots(self, slots: np.ndarray, values: np.ndarray) -> None:
        """Replaces the priorities of single slots; of a slot named twice the last one counts."""
        self._values.reshape(-1)[slots] = values
        self._changed.update(np.unique(slots // self._values.shape[1]).tolist())

    def get(self, slots: np.ndarray) -> np.ndarray:
        """Returns the priorities of slots."""
        return self._values.reshape(-1)[slots]

    def total(self) -> float:
        """Returns the sum of all priorities."""
        self._refresh()
        return float(self._tree[1])

    def sample(self, batch_size: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Draws slots in proportion to their priorities, one from each of batch_size equal strata.

        Returns: slots [B] int64 and their probabilities [B] float64.
        Raises: ValueError when all priorities are zero.
        """
        total = self.total()
        if total <= 0:
            raise ValueError("nothing to sample: all priorities are zero")
        mass = (np.arange(batch_size) + rng.random(batch_size)) * (total / batch_size)
        node = np.ones(batch_size, np.int64)
        while node[0] < self._leaves:
            left = 2 * node
            # Rounding may leave mass on the border of an empty right half: never go there.
            go_right = (mass >= self._tree[left]) & (self._tree[left + 1] > 0)
            mass = np.where(go_right, mass - self._tree[left], mass)
            node = left + go_right
        rows = node - self._leaves
        values = self._values[rows]  # [B, row_size]
        running = np.cumsum(values, axis=1)
        # The mass stays below the row's sum but for rounding, which must not end on a column of zero.
        mass = np.minimum(mass, np.nextafter(running[:, -1], 0))
        columns = (running <= mass[:, None]).sum(axis=1)
        slots = rows * self._values.shape[1] + columns
        return slots, values[np.arange(batch_size), columns] / total

    def check_valid(self) -> None:
        """Raises AssertionError when a sum in the tree is not the sum of its parts."""
        self._refresh()
        sums = np.zeros(self._leaves)
        sums[: len(self._values)] = self._values.sum(axis=1)
        assert np.array_equal(self._tree[self._leaves :], sums), "a leaf is not the sum of its row"
        inner = np.arange(1, self._leaves)
        assert np.array_equal(self._tree[inner], self._tree[2 * inner] + self._tree[2 * inner + 1]), "a node is wrong"

    def _refresh(self) -> None:
        """Recomputes the sums of the changed rows and of everything above them."""
        if not self._changed:
            return
        rows = np.fromiter(self._changed, np.int64, len(self._changed))
        self._changed.clear()
        self._tree[self._leaves + rows] = self._values[rows].sum(axis=1)
        node = (self._leaves + rows) >> 1
        while node[0] >= 1:
            self._tree[node] = self._tree[2 * node] + self._tree[2 * node + 1]
            node >>= 1
