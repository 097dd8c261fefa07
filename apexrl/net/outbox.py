"""What the replay service has to say: messages to send, and what it dropped and why."""

import collections
import logging
from typing import NamedTuple

from apexrl.net import wire
from apexrl.net.identity import mark_of

logger = logging.getLogger(__name__)


class Outgoing(NamedTuple):
    """One message to a peer; `role` names the socket."""

    role: str  # "actor" or "learner"
    peer: bytes
    frames: tuple[bytes, ...]


class Outbox:
    """Collects messages until the server takes them; counts what was dropped."""

    def __init__(self) -> None:
        self.messages: list[Outgoing] = []
        self.dropped: collections.Counter[str] = collections.Counter()

    def send(self, role: str, peer: bytes, message: wire.FromReplay, *attachments: bytes) -> None:
        """Queues one message."""
        self.messages.append(Outgoing(role, peer, (wire.encode(message), *attachments)))

    def refuse(self, role: str, peer: bytes, reason: str) -> None:
        """Counts a peer that is not served, and tells it why."""
        self._count("refused", f"{role} {mark_of(peer)}: {reason}")
        self.send(role, peer, wire.Refused(reason[:2000]))

    def drop(self, role: str, peer: bytes, kind: str, reason: str) -> None:
        """Counts a message that was dropped, and tells its sender why."""
        self._count(kind, f"{role} {mark_of(peer)}: {reason}")
        self.send(role, peer, wire.Dropped(f"{kind}: {reason}"[:2000]))

    def take(self) -> list[Outgoing]:
        """Returns what is to be sent, and forgets it."""
        messages, self.messages = self.messages, []
        return messages

    def _count(self, kind: str, detail: str) -> None:
        self.dropped[kind] += 1
        count = self.dropped[kind]
        if count & (count - 1) == 0:  # the 1st, 2nd, 4th, 8th ...: a flood cannot fill the log file
            logger.warning("dropped (%s, %d so far): %.500s", kind, count, detail)
