"""Keys that a reader handed out, to tell those of an earlier log, which name other items by now."""

from collections import deque

import numpy as np

from apexrl.sets import are_in, distinct

REMEMBERED_KEYS = 2**20  # the newest ones that were handed out


class HandedKeys:
    """The keys of one granularity. One that the new log hands out again is its own from then on."""

    def __init__(self) -> None:
        self._newest: deque[np.ndarray] = deque()
        self._num_keys = 0
        self._old = np.empty(0, np.int64)  # sorted

    def add(self, keys: np.ndarray) -> None:
        """Takes note of keys [B] that are handed out."""
        self._newest.append(keys)
        self._num_keys += len(keys)
        while self._num_keys > REMEMBERED_KEYS and len(self._newest) > 1:
            self._num_keys -= len(self._newest.popleft())
        if (again := keys[are_in(keys, self._old)]).size:
            self._old = np.delete(self._old, np.searchsorted(self._old, again))

    def begin_anew(self) -> None:
        """Another log begins: all keys that were handed out are old."""
        if self._newest:
            self._old = distinct(np.concatenate(self._newest))

    def are_old(self, keys: np.ndarray) -> np.ndarray:
        """Returns [N] bool: which of these keys [N] are of an earlier log."""
        return are_in(keys, self._old)
