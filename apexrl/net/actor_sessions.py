"""The replay's conversations with actors: leases, numbered inserts, acknowledgements. No sockets, no clock.

Rules:
* An actor's inserts are numbered. They are stored in order, each once. After any loss of contact the actor introduces
  itself again and resends the inserts that were not acknowledged. Acknowledgements are cumulative.
* An actor's name is its connection's alone (`identity`), and its numbers never jump. A greeting cannot begin behind the
  inserts that this life of the server has stored. An insert cannot leave a number out.
* An insert may be acknowledged when it is journalled and in the log. The acknowledgement tells how many more the actor
  may send. The limiter, or a full disk, makes actors wait by not raising that number. This bounds the unrolls on the
  way. One message acknowledges half of what an actor may send, or as much as is stored when the actor asks.
"""

import collections
import dataclasses
import logging
from typing import NamedTuple

from apexrl.errors import JournalError, WireError
from apexrl.net import wire
from apexrl.net.identity import why_not_named
from apexrl.net.insert_checks import InsertSizes, insert_arrays
from apexrl.net.leases import Leases
from apexrl.net.outbox import Outbox
from apexrl.net.protocols import agreed_protocol
from apexrl.replay.log import LogEntry
from apexrl.replay.replay import Replay

logger = logging.getLogger(__name__)

MAX_ACTORS = 4096
MAX_STREAMS_PER_ACTOR = 4096
MAX_SLOTS = 262_144
REMEMBERED_ACTORS = 65_536
JOURNAL_FAULT = "journal"


@dataclasses.dataclass
class ActorSession:
    """The state of one actor process at the server."""

    actor: str
    slots: tuple[int, ...]
    next_sequence: int  # number of the insert to arrive
    stored_sequence: int  # all before it are stored
    last_seen: float
    told: tuple[int, int] = (0, 0)  # the stored and the allowed sequence of the last acknowledgement
    lost_inserts: bool = False  # some were dropped because of the journal: it has to resend them

    @property
    def window(self) -> int:
        """Inserts that may be on the way: two unrolls of each stream."""
        return 2 * len(self.slots) + 2


class _Arrived(NamedTuple):
    """An insert that waits to be stored together with the others that came at once."""

    peer: bytes
    session: ActorSession
    insert: wire.Insert
    frames: list[bytes]  # empty if it is malformed: then it is acknowledged and not stored
    now: float


class ActorSessions:
    """Owns the sessions of the actors. `receive` messages, then `store` and `acknowledge` once for all of them."""

    def __init__(self, replay: Replay, sizes: InsertSizes, outbox: Outbox):
        self.sessions: dict[bytes, ActorSession] = {}
        self.leases = Leases(MAX_SLOTS)
        self.journal_fault = ""
        self._replay = replay
        self._sizes = sizes
        self._outbox = outbox
        self._arrived: list[_Arrived] = []
        self._to_tell: dict[bytes, None] = {}  # peers to be acknowledged, in order
        self._told_all: tuple[str, int] = ("", 0)  # the reason to wait and the ladder's size, as last told
        # The insert after the last one stored, by actor. Numbers of this life are kept after a session has ended,
        # so that a late resend is not stored twice. Those of the journal may be too low after a power cut.
        self._stored: collections.OrderedDict[str, int] = collections.OrderedDict()
        self._recovered: dict[str, int] = {}

    @property
    def are_here(self) -> bool:
        """Whether an actor is connected, or has left inserts that are not stored yet."""
        return bool(self.sessions or self._arrived)

    def waits_for(self) -> str:
        """Returns why actors have to wait, or an empty string."""
        return JOURNAL_FAULT if self.journal_fault else self._replay.why_no_insert()

    def recover(self, actor: str, sequence: int) -> None:
        """Takes note of an insert that the journal holds."""
        self._recovered[actor] = max(sequence + 1, self._recovered.get(actor, 0))

    def hello(self, peer: bytes, message: wire.Hello, now: float) -> None:
        """Welcomes an actor whose protocol and spec are right."""
        session = self.sessions.get(peer)
        known = self._stored.get(message.actor)  # by this life of the server, if it stored any
        if session is not None and session.actor == message.actor:
            known = session.stored_sequence
        refusal = _why_refuse(peer, message, known)
        if refusal:
            self._outbox.refuse("actor", peer, refusal)
            return
        if session is not None and (session.actor, len(session.slots)) != (message.actor, message.num_streams):
            self.leave(peer)
            session = None
        if session is None:
            if message.num_streams > self.leases.num_free or len(self.sessions) >= MAX_ACTORS:
                self._outbox.drop("actor", peer, "crowded", f"{MAX_ACTORS} actors, {MAX_SLOTS} environments at most")
                return
            session = ActorSession(message.actor, self.leases.lease(message.num_streams), 0, 0, now)
            self.sessions[peer] = session
            logger.info("actor %s joined with %d environments", message.actor, message.num_streams)
        if known is None:
            # All before the first insert that it still holds was stored once, even if a power cut took it.
            known = max(self._recovered.get(message.actor, 0), message.first_sequence)
        session.next_sequence = session.stored_sequence = known
        session.lost_inserts = bool(self.journal_fault)
        session.last_seen = now
        self._arrived = [arrived for arrived in self._arrived if arrived.peer != peer]
        session.told = self._standing(session)
        self._to_tell.pop(peer, None)
        where = self.leases.ladder_size, *session.told, self.waits_for(), agreed_protocol(message), message.log_name
        self._outbox.send("actor", peer, wire.Welcome(session.slots, *where))

    def receive(self, peer: bytes, message: wire.ToReplay, frames: list[bytes], now: float) -> None:
        """Takes a message of a known actor.

        Raises: WireError when an insert does not follow the spec.
        """
        session = self.sessions[peer]
        session.last_seen = now
        match message:
            case wire.Insert():
                self._insert(peer, session, message, frames, now)
            case wire.Heartbeat():
                self._to_tell[peer] = None
            case wire.Goodbye():
                self.leave(peer)
            case _:
                self._outbox.drop("actor", peer, "misplaced", f"{type(message).__name__} from an actor")

    def store(self) -> None:
        """Stores the inserts that arrived, all at once. Those that cannot be stored are not acknowledged either."""
        arrived, self._arrived = self._arrived, []
        if not arrived:
            return
        whole = [item for item in arrived if item.frames]
        priorities, valid, faults = insert_arrays([item.insert for item in whole], self._sizes)
        for i, fault in faults.items():
            self._outbox.drop("actor", whole[i].peer, "malformed", f"insert {whole[i].insert.sequence}: {fault}")
        counts = valid.sum(axis=1).tolist()
        good = [i for i in range(len(whole)) if i not in faults]
        entries = [LogEntry(whole[i].frames[0], whole[i].frames[1], counts[i], whole[i].now) for i in good]
        try:
            if entries:
                self._replay.insert(entries, priorities[good], valid[good])
        except JournalError as error:
            self.fail(str(error))
            for item in arrived:
                item.session.next_sequence = item.session.stored_sequence
                item.session.lost_inserts = True
            return
        for item in arrived:
            item.session.stored_sequence = item.insert.sequence + 1
            self._remember(item.session)
            if item.session.stored_sequence - item.session.told[0] >= item.session.window // 2:
                self._to_tell[item.peer] = None

    def acknowledge(self) -> bool:
        """Tells actors where they stand: who asked, half of whose window is stored, or all when the reason changed.

        Returns: whether one could send no more until it was acknowledged.
        """
        has_stalled = False
        state = (self.waits_for(), self.leases.ladder_size)
        if state != self._told_all:
            self._told_all = state
            self._to_tell = dict.fromkeys(self.sessions)
        for peer in self._to_tell:
            session = self.sessions.get(peer)
            if session is None:
                continue
            has_stalled |= 0 < session.told[1] <= session.stored_sequence and not state[0]
            session.told = self._standing(session)
            self._outbox.send("actor", peer, wire.Acknowledge(*session.told, state[1], state[0]))
        self._to_tell = {}
        return has_stalled

    def resume(self) -> None:
        """The journal can be written again: actors that lost inserts send them once more."""
        logger.warning("the journal can be written again")
        self.journal_fault = ""
        for peer, session in self.sessions.items():
            if session.lost_inserts:
                self._outbox.send("actor", peer, wire.Stranger())

    def leave(self, peer: bytes) -> None:
        """Forgets an actor and frees its slots."""
        session = self.sessions.pop(peer)
        logger.info("actor %s left; its %d slots are free", session.actor, len(session.slots))
        self.leases.give_back(session.slots)

    def _remember(self, session: ActorSession) -> None:
        self._stored[session.actor] = session.stored_sequence
        self._stored.move_to_end(session.actor)
        if len(self._stored) > REMEMBERED_ACTORS:
            self._stored.popitem(last=False)

    def _standing(self, session: ActorSession) -> tuple[int, int]:
        """Returns two numbers for an actor: up to where it is stored, and up to where it may send."""
        stored = session.stored_sequence
        if self.journal_fault:
            return stored, stored
        return stored, stored + session.window if not self._replay.why_no_insert() else max(session.told[1], stored)

    def _insert(self, peer: bytes, session: ActorSession, insert: wire.Insert, frames: list[bytes], now: float) -> None:
        if insert.sequence < session.next_sequence:  # a resend of a stored insert: its acknowledgement was lost
            self._outbox.dropped["duplicate"] += 1
            self._to_tell[peer] = None
            return
        if self.journal_fault:
            session.lost_inserts = True
            return
        if insert.sequence > session.next_sequence:  # something before it was lost: start over from there
            self._outbox.dropped["gap"] += 1
            self._outbox.send("actor", peer, wire.Stranger())
            return
        if insert.sequence >= session.told[1]:
            reason = f"insert {insert.sequence}: only those before {session.told[1]} are allowed"
            self._outbox.drop("actor", peer, "not allowed", reason)
            return
        reason = f"it names the actor {insert.actor}, this is {session.actor}"
        if insert.actor == session.actor:
            content, block = frames
            reason = self._sizes.why_malformed(insert, content, block, len(session.slots))
        # From here on the insert is dealt with, stored or not: its actor would only send the same again.
        session.next_sequence += 1
        self._arrived.append(_Arrived(peer, session, insert, [] if reason else frames, now))
        if reason:
            raise WireError(f"insert {insert.sequence}: {reason}")

    def fail(self, fault: str) -> None:
        """Takes no inserts any more, and tells the actors why, until `resume`."""
        if not self.journal_fault:
            logger.error("%s: inserts are refused until it can, sampling goes on", fault)
            for peer in self.sessions:
                self._outbox.drop("actor", peer, JOURNAL_FAULT, fault)
        self.journal_fault = fault


def _why_refuse(peer: bytes, message: wire.Hello, known: int | None) -> str:
    """Returns why an actor is not welcome, or an empty string; `known` is the insert that this server expects."""
    if refusal := why_not_named(message.actor, peer):
        return refusal
    if not 1 <= message.num_streams <= MAX_STREAMS_PER_ACTOR:
        return f"{message.num_streams} environments: an actor may have 1..{MAX_STREAMS_PER_ACTOR}"
    if known is not None and message.first_sequence > known:
        return f"{message.actor} cannot go on at insert {message.first_sequence}, only at {known}: make a new client"
    return ""
