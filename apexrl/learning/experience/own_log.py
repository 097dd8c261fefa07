"""A log that this process samples itself, as a replica follows it: the common part of those that are no `LogClient`."""

import collections
from collections.abc import Mapping

import numpy as np

from apexrl.net.log_client import LogBatch, LogEvent, LogStart
from apexrl.replay.kinds import Table
from apexrl.types import Sample, StreamSpec


class OwnLog:
    """Has the methods of a `LogClient` that a replica calls. Belongs to one thread.

    It owns the events that the replica has not taken yet, and counts the batches that the replica has.
    """

    def __init__(self, batch_sizes: Mapping[str, int], prefetch_batches: int, waits_for: str):
        """Begins without a log.

        Args:
          batch_sizes: by table, for those that batches are wanted from.
          prefetch_batches: batches of each table that may wait for their use.
        """
        self.waits_for = waits_for
        self._batch_sizes = batch_sizes
        self._prefetch_batches = prefetch_batches
        self._unused = dict.fromkeys(batch_sizes, 0)  # batches that were given and not used yet
        self._events: collections.deque[LogEvent] = collections.deque()
        self._tables: Mapping[str, Table] = {}

    def poll(self, timeout_milliseconds: int) -> LogEvent | None:
        """Returns the next event in order, None when there is none; never waits."""
        return self._events.popleft() if self._events else None

    def batch_used(self, table: str) -> None:
        """A batch was used, or nothing of it could be: another one may follow."""
        self._unused[table] -= 1

    def update_priorities(self, keys: np.ndarray, priorities: np.ndarray, table: str) -> None:
        """Sets the priorities [B] of sampled keys [B]."""
        self._tables[table].update_priorities(keys, priorities)

    def close(self) -> None:
        """Does nothing where there is no connection and no file."""

    def _begin(
        self, log: str, spec: StreamSpec, ring_unrolls: int, tables: Mapping[str, Table],
        ancestors: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        """Starts a log, from its number 0 on."""
        self._tables = tables
        granularity = {name: tables[name].granularity for name in self._batch_sizes}
        self._events.append(LogStart(log, spec, ring_unrolls, 0, False, granularity, ancestors))

    def _lacks(self, table: str) -> bool:
        """Returns whether another batch of a table may wait for its use."""
        return self._unused[table] < self._prefetch_batches

    def _give(self, table: str, sample: Sample) -> None:
        self._unused[table] += 1
        self._events.append(LogBatch(table, sample))
