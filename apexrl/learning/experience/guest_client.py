"""A guest on the log of a running run: it follows the log, and samples it by tables of its own.

The run's replay server sends a guest the unrolls and nothing else, and waits for it as little as for any reader: the
guest's samples an insert bound the guest alone.
"""

import logging
import time
from collections.abc import Callable, Mapping
from hashlib import blake2b

import msgspec

from apexrl.config.sections import ReplayConfig
from apexrl.errors import ConfigError, WireError
from apexrl.learning.experience.own_log import OwnLog
from apexrl.learning.experience.recutter import Recutter
from apexrl.learning.waiter import ABSENT
from apexrl.net.log_client import LogAppend, LogClient, LogEvent, LogStart
from apexrl.replay.journal import FORMAT, LogIdentity
from apexrl.replay.log import LogEntry
from apexrl.replay.replay import Replay
from apexrl.replay.unroll_tables import FifoTable
from apexrl.streams import why_not_cut
from apexrl.types import StreamSpec

logger = logging.getLogger(__name__)

BACKLOG_BATCHES = 4  # of a queue: a guest that is slower than the actors learns from new unrolls all the same


class GuestClient(OwnLog):
    """Follows a server's log and samples it here.

    Where the learner wants other unrolls than the run's, they are cut anew, as a log of another name. Each says its
    number by the run's unroll that completes it, so that a guest that is started again knows which it has counted.
    """

    def __init__(
        self,
        client: LogClient,
        wanted: Callable[[StreamSpec], StreamSpec],
        config: ReplayConfig,
        batch_sizes: Mapping[str, int],
        prefetch_batches: int,
        seed: int,
    ):
        """Takes a client that follows the log and wants no batches.

        Args:
          wanted: from the spec of the log to that of the unrolls that the learner needs.
          config: with the tables of the guest.
        """
        super().__init__(batch_sizes, prefetch_batches, ABSENT)
        self._client = client
        self._wanted = wanted
        self._config = config
        self._seed = seed
        self._replay: Replay | None = None
        self._recutter: Recutter | None = None

    def poll(self, timeout_milliseconds: int) -> LogEvent | None:
        """Returns the next unroll of the log, else a batch; None when there is neither in time.

        Raises: ConfigError when the log's streams cannot become what the learner wants; WireError when a message cannot
          be read; PeerError when the server refuses us.
        """
        if not self._events and not self._follow(0) and not self._sample():
            self._follow(timeout_milliseconds)
        return super().poll(0)

    def close(self) -> None:
        """Says goodbye to the server."""
        self._client.close()

    def _follow(self, timeout_milliseconds: int) -> bool:
        """Takes what comes from the server; returns whether something came."""
        event = self._client.poll(timeout_milliseconds)
        if self._replay is None or self._client.waits_for == ABSENT:
            self.waits_for = self._client.waits_for
        match event:
            case LogStart():
                self._start(event)
            case LogAppend():
                self._append(event)
        return event is not None

    def _start(self, start: LogStart) -> None:
        if self._replay is not None and start.continues:
            return
        wanted = self._wanted(start.spec)
        if reason := why_not_cut(start.spec, wanted):
            raise ConfigError(f"the run's experience does not fit: {reason}")
        self._recutter = Recutter(start.spec, wanted)
        log, *ancestors = map(self._name_of, (start.log, *start.ancestors))
        self._replay = Replay(self._config, LogIdentity(FORMAT, log, (0,), wanted), self._seed)
        self._replay.set_batch_sizes(self._batch_sizes)
        self._begin(log, wanted, self._replay.ring_unrolls, self._replay.tables, tuple(ancestors))

    def _name_of(self, log: str) -> str:
        """Returns our name of a log of the run: where it is cut anew, another one."""
        assert self._recutter is not None
        if not self._recutter.is_needed:
            return log
        return blake2b(log.encode() + msgspec.json.encode(self._recutter.wanted), digest_size=8).hexdigest()

    def _append(self, append: LogAppend) -> None:
        assert self._replay is not None and self._recutter is not None
        if not self._recutter.is_needed:
            self._replay.skip_to(append.number)
        try:
            for part, (insert, block, priorities, valid) in enumerate(self._recutter.of(append.insert, append.block)):
                entry = LogEntry(b"", b"", int(valid.sum()), time.monotonic())  # the unroll store has the content
                number = self._replay.insert([entry], priorities[None], valid[None])
                self._events.append(LogAppend(number, insert, block, self._recutter.number(append.number, part)))
        except WireError as error:  # one actor's fault must not end the guest
            logger.warning("unroll %d of %s is not used: %s", append.number, append.insert.actor, error)

    def _sample(self) -> bool:
        """Draws a batch of a table that lacks one; returns whether there is one."""
        if self._replay is None:
            return False
        for name, size in self._batch_sizes.items():
            if not self._lacks(name):
                continue
            table = self._tables[name]
            if isinstance(table, FifoTable):
                table.keep_newest(BACKLOG_BATCHES * size)
            why = self._replay.why_no_sample(name, size)
            if self._client.waits_for != ABSENT:  # its absence counts, also where there is enough here
                self.waits_for = why
            if not why:
                self._give(name, self._replay.sample(name, size))
                return True
        return False
