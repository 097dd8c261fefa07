"""The sampler of one log: it chooses rows, has them gathered, and makes draws of the samples of all tables."""

import collections
from collections.abc import Callable, Sequence

from apexrl.agents.contract import RowStrategy, Want
from apexrl.learning.experience.decoder import Decoder
from apexrl.learning.experience.draw import Draw, Gathered, SampledKeys
from apexrl.net.log_client import LogBatch


class Sampler:
    """Keeps a table's samples until each wanted table has given one. Owned by the following thread."""

    def __init__(self, wants: Sequence[Want], shard: int, batch_used: Callable[[str], None]):
        """Takes what a learner wants.

        Args:
          batch_used: is told of each table whose sample comes to nothing: another one may come.
        """
        self.metrics: dict[str, float] = {}  # of the newest rows that were chosen of each table
        self._shard = shard
        self._batch_used = batch_used
        self._samples = {want.table: collections.deque[SampledKeys | Gathered]() for want in wants}

    def forget(self) -> None:
        """Drops the samples that wait for others: they are of an older log."""
        for table, samples in self._samples.items():
            while samples:
                samples.popleft()
                self._batch_used(table)

    def add(self, event: LogBatch, decoder: Decoder, rows: RowStrategy | None, num_updates: int) -> Draw | None:
        """Gathers a table's sample; returns a draw when it was the last one that was missing."""
        table, keys, weights = event.table, event.sample.keys, event.sample.weights
        if rows is not None:
            keys, weights, metrics = rows.choose(table, keys, weights, num_updates)
            self.metrics = self.metrics | {f"{table}/{name}": value for name, value in metrics.items()}
        if event.journal_share:
            self.metrics = self.metrics | {f"{table}/journal_share": event.journal_share}
        store = decoder.store
        sample = store.sample(table, keys, weights)
        if sample is None:
            self._batch_used(table)
            return None
        self._samples[table].append(sample._replace(versions=decoder.versions(table, sample.keys)))
        if not all(self._samples.values()):
            return None
        samples = {table: samples.popleft() for table, samples in self._samples.items()}
        largest = event.sample.largest_weight if len(samples) == 1 else 1.0
        return Draw(store.generation, samples, self._shard, largest)
