"""Counts of the draws of a table's items, for tables whose items leave after some draws."""

import msgspec
import numpy as np

from apexrl.replay.table import TableState


class DrawCounter:
    """Counts the draws of items that are still there. The key of an item is unroll number * items + i."""

    def __init__(self, most: int, items: int):
        """Makes a counter for items that leave after `most` draws, so many of each unroll."""
        self._most = most
        self._items = items
        self._times: dict[int, int] = {}

    def count(self, keys: np.ndarray) -> np.ndarray:
        """Takes the keys [B] of a batch; returns those that have to leave now."""
        spent = []
        for key, times in zip(*(found.tolist() for found in np.unique(keys, return_counts=True)), strict=True):
            total = self._times.pop(key, 0) + times
            if total < self._most:
                self._times[key] = total
            else:
                spent.append(key)
        return np.array(spent, np.int64)

    def evict(self, number: int) -> None:
        """Forgets the items of an unroll that the log lets go."""
        for key in range(number * self._items, (number + 1) * self._items):
            self._times.pop(key, None)

    def added_to(self, state: TableState) -> TableState:
        """Returns the state of the table with the counts."""
        keys, times = np.array(list(self._times), np.int64), np.array(list(self._times.values()), np.int64)
        return msgspec.structs.replace(state, counted_keys=keys.tobytes(), counts=times.tobytes())

    def restore(self, state: TableState, end_number: int) -> None:
        """Takes the counts of a state, but for items from an unroll on whose number was given to another one.

        Raises: ValueError when they do not fit each other.
        """
        keys, times = np.frombuffer(state.counted_keys, np.int64), np.frombuffer(state.counts, np.int64)
        self._times = {
            key: count
            for key, count in zip(keys.tolist(), times.tolist(), strict=True)
            if key < end_number * self._items
        }
