"""A log that is open: its replay, the sizes of its inserts, and the conversations about it. No sockets, no clock."""

import logging
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from apexrl.errors import JournalError
from apexrl.net.actor_sessions import ActorSessions
from apexrl.net.insert_checks import InsertSizes
from apexrl.net.learner_sessions import LearnerSessions
from apexrl.net.outbox import Outbox
from apexrl.replay.replay import Replay

logger = logging.getLogger(__name__)


class Advanced(NamedTuple):
    """The findings of one `advance`."""

    has_more: bool = False  # there is more to be sent, after this is
    has_stalled: bool = False  # an actor could send no more until it was acknowledged


class OpenLog:
    """Owns the replay of one log and the sessions of its peers, from the log's start or recovery on."""

    def __init__(self, replay: Replay, outbox: Outbox):
        self.replay = replay
        self.spec = replay.spec
        self.sizes = InsertSizes(replay.spec)
        self.actors = ActorSessions(replay, self.sizes, outbox)
        self.learners = LearnerSessions(replay, outbox)

    @property
    def is_empty(self) -> bool:
        """Whether no unroll was ever stored."""
        return self.replay.log.end_number == 0

    def close(self) -> None:
        """Syncs the journal; snapshots are the owner's."""
        if self.replay.journal is not None:
            self.replay.journal.close()

    def advance(self) -> Advanced:
        """Stores the inserts that came, and sends all that may go now: acknowledgements, unrolls, batches."""
        self.actors.store()
        has_stalled = self._acknowledge()
        has_more = self.learners.send()
        has_stalled |= self._acknowledge()  # these samples may let actors go on
        return Advanced(has_more, has_stalled)

    def give_up_silent_peers(self, now: float, timeout_seconds: float) -> None:
        """Frees all that peers held that said nothing for so long; learners that ask for nothing become idle."""
        for peer, actor in list(self.actors.sessions.items()):
            if now - actor.last_seen > timeout_seconds:
                logger.warning("actor %s was silent for %.0f s", actor.actor, timeout_seconds)
                self.actors.leave(peer)
        for peer, learner in list(self.learners.sessions.items()):
            learner.is_idle = now - learner.moved_seconds > timeout_seconds
            if now - learner.last_seen > timeout_seconds:
                logger.warning("learner %s was silent for %.0f s", learner.asked.learner, timeout_seconds)
                self.learners.leave(peer)

    async def try_journal(self, in_thread: Callable[..., Awaitable[Any]]) -> None:
        """Tries a failed journal again, and lets actors go on where it can be written. It waits for the disk elsewhere.

        Args:
          in_thread: runs a function in another thread.
        """
        journal = self.replay.journal
        if not self.actors.journal_fault or journal is None:
            return
        try:
            while (rewrite := journal.rewrite(self.replay.log)) is not None:
                await in_thread(rewrite.write)
                journal.rewritten(rewrite)
            if await in_thread(journal.is_writable):
                self.actors.resume()
        except (JournalError, OSError) as error:  # the latter from a disk that does not even tell the size of a file
            self.actors.fail(str(error))

    def journal_failed(self, fault: str) -> None:
        """Takes no more inserts until the journal is written again: the disk failed behind an append."""
        if self.replay.journal is not None:
            self.replay.journal.distrust()
        self.actors.fail(fault)

    def _acknowledge(self) -> bool:
        self.replay.note_stall(self.learners.are_stalled())
        return self.actors.acknowledge()
