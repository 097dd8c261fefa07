"""The replay service's outgoing messages, and its counts of dropped messages by reason."""

import collections
import logging
from typing import NamedTuple

from apexrl.lines import printable
from apexrl.net import wire
from apexrl.net.identity import mark_of

logger = logging.getLogger(__name__)

MAX_REASON_CHARACTERS = 1900  # besides the kind, in a text of a message


class Outgoing(NamedTuple):
    """One message to a peer. Its `role` chooses the socket."""

    role: str  # "actor" or "learner"
    peer: bytes
    frames: tuple[bytes, ...]


class Outbox:
    """Collects messages until the server sends them, and counts dropped ones by kind and reason."""

    def __init__(self) -> None:
        self.messages: list[Outgoing] = []
        self.dropped: collections.Counter[str] = collections.Counter()

    def send(self, role: str, peer: bytes, message: wire.FromReplay, *attachments: bytes) -> None:
        """Queues one message."""
        self.messages.append(Outgoing(role, peer, (wire.encode(message), *attachments)))

    def refuse(self, role: str, peer: bytes, reason: str) -> None:
        """Counts a refused peer, and queues the reason for it."""
        reason = _line_of(reason)
        self._count("refused", f"{role} {mark_of(peer)}: {reason}")
        self.send(role, peer, wire.Refused(reason))

    def drop(self, role: str, peer: bytes, kind: str, reason: str) -> None:
        """Counts a dropped message, and queues the reason for its sender."""
        reason = _line_of(reason)
        self._count(kind, f"{role} {mark_of(peer)}: {reason}")
        self.send(role, peer, wire.Dropped(f"{kind}: {reason}"))

    def drain(self) -> list[Outgoing]:
        """Returns the queued messages and empties the queue."""
        messages, self.messages = self.messages, []
        return messages

    def _count(self, kind: str, detail: str) -> None:
        self.dropped[kind] += 1
        count = self.dropped[kind]
        if count & (count - 1) == 0:  # the 1st, 2nd, 4th, 8th ...: a flood cannot fill the log file
            logger.warning("dropped (%s, %d so far): %.500s", kind, count, detail)


def _line_of(reason: str) -> str:
    """Returns a reason as one line that fits a message; it may hold words of the peer."""
    return printable(" ".join(reason.split()))[:MAX_REASON_CHARACTERS]
