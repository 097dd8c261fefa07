"""The replay of this process, as a replica follows it: `LogClient` without a connection."""

from collections.abc import Sequence

import numpy as np

from apexrl.agents.contract import Want
from apexrl.errors import ConfigError
from apexrl.learning.experience.own_log import OwnLog
from apexrl.net.log_client import LogAppend
from apexrl.net.wire import Insert
from apexrl.replay.log import LogEntry
from apexrl.replay.replay import Replay
from apexrl.types import UnrollHeader

ACTOR = "lockstep"


class LocalLog(OwnLog):
    """Gives the unrolls that are inserted. Batches come only when they are drawn."""

    def __init__(self, replay: Replay, wants: Sequence[Want], prefetch_batches: int):
        """Takes an empty replay.

        Args:
          prefetch_batches: batches of each table that may wait for those of others.
        """
        super().__init__({want.table: want.batch_size for want in wants}, prefetch_batches, "")
        self._replay = replay
        self.wants = wants
        replay.set_batch_sizes(self._batch_sizes)
        self._begin(replay.identity.log, replay.spec, replay.ring_unrolls, replay.tables)

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
            self._draw(lacking)
            return True
        while self._replay.why_no_insert():
            ahead = [want for want in self.wants if self._lacks(want.table)]
            ahead = [want for want in ahead if not self._why_not(want)]
            if not ahead:
                waiting = [(want.table, reason) for want in self.wants if (reason := self._why_not(want))]
                reasons = ", ".join(f"{table} waits for {reason}" for table, reason in waiting)
                raise ConfigError(
                    f"actors wait for the learner, and the learner for actors ({reasons}): "
                    "give --tables other samples an insert or minimum sizes"
                )
            self._draw(ahead)
        return False

    def _why_not(self, want: Want) -> str:
        return self._replay.why_no_sample(want.table, want.batch_size)

    def _draw(self, wants: Sequence[Want]) -> None:
        for want in wants:
            self._give(want.table, self._replay.sample(want.table, want.batch_size))
