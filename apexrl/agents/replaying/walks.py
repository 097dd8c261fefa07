"""Walks through the episodes of a log: where the rows of a batch go on.

A learner with an LSTM recomputes the state of replayed unrolls as it walks: each begins where its predecessor ended.
Source: LASER replays whole episodes with the newest parameters (arXiv:1909.11583, appendix).
"""

from collections.abc import Iterable

import numpy as np

from apexrl.streams import StreamOrder


class Walks:
    """The walks of one table's batches. Each goes through one episode; an unroll is in a batch once."""

    def __init__(self, order: StreamOrder):
        self._order = order
        self._following: list[int] = []  # of the walks of the last batch

    def next_batch(self, sampled: Iterable[int], size: int) -> np.ndarray:
        """Returns the numbers [M] of the next batch: the walks go on, and new ones take the place of those that ended.

        A long episode is begun more often than a short one, because any of its unrolls leads to it.

        Args:
          sampled: numbers of unrolls whose episodes new walks take.
          size: the most unrolls of a batch.
        """
        order = self._order
        is_first = {number: False for number in self._following if order.holds(number)}
        for number in sampled:
            if len(is_first) >= size:
                break
            if order.holds(number):
                is_first.setdefault(order.beginning(number), True)
        self._following = [order.following(*walk) for walk in is_first.items()]
        return np.array(list(is_first), np.int64)
