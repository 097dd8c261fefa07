"""Walks through the episodes of a log: which unroll of a stream follows which, and where the rows of a batch go on.

A learner with an LSTM recomputes the state of replayed unrolls as it walks: each begins where its predecessor ended.
Source: LASER replays whole episodes with the newest parameters (arXiv:1909.11583, appendix).
"""

from collections.abc import Iterable

import numpy as np

NONE = -1  # in the place of an unroll's number


class Streams:
    """An index of a log's newest unrolls: the order of each stream, and the starts of episodes. Owned by one thread."""

    def __init__(self, ring_unrolls: int, unroll_starts: int):
        self._unroll_starts = unroll_starts
        self._numbers, self._previous, self._next = (np.full(ring_unrolls, NONE, np.int64) for _ in range(3))
        self._begins = np.zeros(ring_unrolls, bool)  # an episode begins before the last observation of the unroll
        self._ends = np.zeros(ring_unrolls, bool)  # an episode begins at the last one: the next unroll's first
        self._newest: dict[tuple[str, int], tuple[int, int]] = {}  # by actor and stream: a number, and its first step

    def add(self, number: int, actor: str, stream: int, first_step: int, starts: np.ndarray) -> int:
        """Adds an unroll, in place of the one that is ring_unrolls older.

        Args:
          starts: [T + 1] of the unroll.
        Returns: the number of the unroll before it in its stream; -1 where that is not held.
        """
        position = number % len(self._numbers)
        self._numbers[position] = number
        self._begins[position], self._ends[position] = starts[:-1].any(), starts[-1]
        previous, its_first_step = self._newest.get((actor, stream), (NONE, 0))
        if not self.holds(previous) or its_first_step + self._unroll_starts != first_step:
            previous = NONE
        else:
            self._next[self._place(previous)] = number
        self._previous[position], self._next[position] = previous, NONE
        self._newest[actor, stream] = number, first_step
        if len(self._newest) > len(self._numbers):  # some are of actors that ended long ago
            self._newest = {key: place for key, place in self._newest.items() if self.holds(place[0])}
        return previous

    def holds(self, number: int) -> bool:
        """Returns whether an unroll is among the newest."""
        return number != NONE and bool(self._numbers[self._place(number)] == number)

    def beginning(self, number: int) -> int:
        """Returns the unroll in which the episode of an unroll begins; the oldest one held where that is evicted."""
        while not self._begins[self._place(number)] and self.holds(
            previous := int(self._previous[self._place(number)])
        ):
            number = previous
        return number

    def following(self, number: int, is_first: bool) -> int:
        """Returns the unroll in which a walk goes on, -1 where its episode ends or the next unroll is not there yet.

        Args:
          is_first: the walk begins with this unroll, with the last episode that begins in it.
        """
        position = self._place(number)
        if self._ends[position] or (self._begins[position] and not is_first):
            return NONE
        return int(self._next[position])

    def _place(self, number: int) -> int:
        return number % len(self._numbers)


class Walks:
    """The walks of one table's batches. Each goes through one episode; an unroll is in a batch once."""

    def __init__(self, streams: Streams):
        self._streams = streams
        self._following: list[int] = []  # of the walks of the last batch

    def next_batch(self, sampled: Iterable[int], size: int) -> np.ndarray:
        """Returns the numbers [M] of the next batch: the walks go on, and new ones take the place of those that ended.

        A long episode is begun more often than a short one, because any of its unrolls leads to it.

        Args:
          sampled: numbers of unrolls whose episodes new walks take.
          size: the most unrolls of a batch.
        """
        streams = self._streams
        is_first = {number: False for number in self._following if streams.holds(number)}
        for number in sampled:
            if len(is_first) >= size:
                break
            if streams.holds(number):
                is_first.setdefault(streams.beginning(number), True)
        self._following = [streams.following(*walk) for walk in is_first.items()]
        return np.array(list(is_first), np.int64)
