"""The decoder of one log: its unrolls go into the unroll store, and what else is known of them is kept here."""

import numpy as np

from apexrl.learning.experience.run_moments import RunMoments
from apexrl.learning.experience.unroll_store import UnrollStore
from apexrl.net.log_client import LogAppend
from apexrl.net.wire import UnrollHeader
from apexrl.streams import StreamOrder
from apexrl.unroll import UnrollCodec


class Decoder:
    """Decodes the unrolls of one log, each once, and knows their order and who acted. Owned by the following thread."""

    def __init__(self, store: UnrollStore, moments: RunMoments | None = None):
        """Begins a log, of which the store holds nothing yet; its unrolls are added to the moments, if any."""
        self.store = store
        self._moments = moments
        self._returns = np.zeros(store.ring_unrolls)  # [ring]: discounted sums of rewards where next unrolls begin
        self.order = StreamOrder(store.ring_unrolls, store.spec.unroll_starts)
        self._codec = UnrollCodec(store.spec)
        self._versions = np.full(store.ring_unrolls, -1, np.int64)  # [ring]: params_version of each unroll

    def add(self, append: LogAppend, header: UnrollHeader, is_new: bool = True) -> None:
        """Decodes an unroll into the store.

        Args:
          is_new: no start of the learner has taken it before.
        Raises: WireError when it is not what its spec says; the store holds no such unroll then.
        """
        number, actor = append.number, append.insert.actor
        self._versions[number % self.store.ring_unrolls] = header.params_version
        slot = self.store.begin(number)
        unroll = self._codec.decode(append.block, slot.frames)
        previous = self.order.add(number, actor, header.stream, header.first_step, unroll.starts)
        if self._moments is not None:
            before = self._returns[previous % len(self._returns)] if previous >= 0 else 0.0
            after = self._moments.add(unroll, self.store.spec.unroll_starts, before, is_new)
            self._returns[number % len(self._returns)] = after
        self.store.commit(slot, unroll, previous)

    def versions(self, table: str, keys: np.ndarray) -> np.ndarray:
        """Returns [M] int64: the versions that made the unrolls of a table's keys."""
        return self._versions[self.store.numbers(table, keys) % self.store.ring_unrolls]
