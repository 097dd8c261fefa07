"""The replay of this process, as a replica follows it: `LogClient` without a connection."""

import collections
from collections.abc import Sequence

import numpy as np

from apexrl.agents.contract import Want
from apexrl.errors import ConfigError
from apexrl.net.log_client import LogAppend, LogBatch, LogEvent, LogStart
from apexrl.net.wire import Insert
from apexrl.replay.log import LogEntry
from apexrl.replay.replay import Replay
from apexrl.types import UnrollHeader

ACTOR = "lockstep"


class LocalLog:
    """Owns the events that the replica has not taken yet. Batches come only when they are drawn."""

    def __init__(self, replay: Replay, wants: Sequence[Want], prefetch_batches: int):
        """Takes an empty replay.

        Args:
          prefetch_batches: batches of each table that may wait for those of others.
        """
        self.waits_for = ""
        self._replay = replay
        self.wants = wants
        self._prefetch_batches = prefetch_batches
        self._unused = {want.table: 0 for want in wants}  # batches that the replica has
        replay.set_batch_sizes({want.table: want.batch_size for want in wants})
        granularity = {want.table: replay.tables[want.table].granularity for want in wants}
        start = LogStart(replay.identity.log, replay.spec, replay.ring_unrolls, 0, False, granularity)
        self._events: collections.deque[LogEvent] = collections.deque([start])

    def insert(self, headers: Sequence[UnrollHeader], blocks: Sequence[bytes], now: float) -> None:
        """Stores unrolls, whatever the limiters say."""
        entries = [
            LogEntry(b"", block, int(header.valid.sum()), now) for header, block in zip(headers, blocks, strict=True)
        ]
        priorities = np.stack([header.priorities for header in headers])
        valid = np.stack([header.valid for header in headers])
        first = self._replay.insert(entries, priorities, valid)
        for number, (header, block) in enumerate(zip(headers, blocks, strict=True), first):
            self._events.append(LogAppend(number, Insert.of(header, number, ACTOR), block))

    def draw(self) -> bool:
        """Gives a batch of each wanted table that the replica lacks one of; returns False when a table has none now.

        Where a limiter stops the actors meanwhile, its table gives batches ahead, as many as a learner would fetch.

        Raises: ConfigError when actors have to wait even so: nobody would ever go on.
        """
        lacking = [want for want in self.wants if not self._unused[want.table]]
        if not any(map(self._why_not, lacking)):
            self._give(lacking)
            return True
        while self._replay.why_no_insert():
            ahead = [want for want in self.wants if self._unused[want.table] < self._prefetch_batches]
            ahead = [want for want in ahead if not self._why_not(want)]
            if not ahead:
                waiting = [(want.table, reason) for want in self.wants if (reason := self._why_not(want))]
                reasons = ", ".join(f"{table} waits for {reason}" for table, reason in waiting)
                raise ConfigError(
                    f"actors wait for the learner, and the learner for actors ({reasons}): "
                    "give --tables other samples an insert or minimum sizes"
                )
            self._give(ahead)
        return False

    def poll(self, timeout_milliseconds: int) -> LogEvent | None:
        """Returns the next event in order, None when there is none; never waits."""
        return self._events.popleft() if self._events else None

    def batch_used(self, table: str) -> None:
        """A batch was used, or nothing of it could be."""
        self._unused[table] -= 1

    def update_priorities(self, keys: np.ndarray, priorities: np.ndarray, table: str) -> None:
        """Sets new priorities [B] of sampled keys [B]."""
        self._replay.tables[table].update_priorities(keys, priorities)

    def close(self) -> None:
        """Does nothing: there is no connection."""

    def _why_not(self, want: Want) -> str:
        return self._replay.why_no_sample(want.table, want.batch_size)

    def _give(self, wants: Sequence[Want]) -> None:
        for want in wants:
            self._unused[want.table] += 1
            self._events.append(LogBatch(want.table, self._replay.sample(want.table, want.batch_size)))
