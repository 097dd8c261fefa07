"""The rows of a mix: walks through episodes, and the most relevant of several candidates."""

from collections.abc import Mapping, Sequence

import numpy as np

from apexrl.agents.contract import Chosen, ResultsByTable, Want
from apexrl.agents.replaying.mix import Selection
from apexrl.agents.replaying.selection import Selector
from apexrl.agents.replaying.walks import Walks
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
