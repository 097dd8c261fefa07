"""The rows of a mix: walks through episodes, and the most relevant of several candidates."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from apexrl.agents.contract import Chosen, ResultsByTable, Want
from apexrl.agents.replaying.mix import Selection
from apexrl.agents.replaying.selection import Selector
from apexrl.streams import StreamOrder


class ReplayRows:
    """Implements `contract.RowStrategy` for tables of unrolls, whose weights are all the same."""

    def __init__(self, wants: Sequence[Want], selections: Mapping[str, Selection], order: StreamOrder):
        """Takes the wants of all tables, and the selections of some."""
        self._order = order
        self._walks = {want.table: Walks(order) for want in wants if want.is_replaced}
        self._selector = Selector(selections, order.ring_unrolls)
        self._selected = frozenset(selections)

    def choose(self, table: str, keys: np.ndarray, weights: np.ndarray, num_updates: int) -> Chosen:
        """Returns the rows to learn from."""
        if table in self._walks:
            walked = self._walks[table].next_batch(keys.tolist(), len(keys))
            return Chosen(walked, weights[: len(walked)])
        held = self._order.held(keys)
        if table not in self._selected or not held.any():
            return Chosen(keys, weights)
        keys, weights = keys[held], weights[held]
        kept = self._selector.keep(table, keys, num_updates)
        return Chosen(keys[kept.positions], weights[kept.positions], kept.metrics)

    def learn(self, results: ResultsByTable) -> None:
        """Takes what an update has found of its rows."""
        if self._selected:
            self._selector.add(results)


class Walks:
    """The walks of one table's batches. Each goes through one episode; an unroll is in a batch once.

    A learner with an LSTM recomputes the state of replayed unrolls as it walks: each begins where its predecessor
    ended. Source: LASER replays whole episodes with the newest parameters (arXiv:1909.11583, appendix).
    """

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
