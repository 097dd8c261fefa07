"""The replay's conversations with actors: leases, numbered inserts, acknowledgements. No sockets, no clock.

Rules:
* An actor's inserts are numbered. They are stored in order, each once; after any loss of contact the actor introduces
  itself again and resends what was not acknowledged. Acknowledgements are cumulative.
* An actor's name is its connection's alone (`identity`), and its numbers never jump: a greeting cannot begin behind
  what this life of the server has stored, an insert cannot leave one out.
* An insert is acknowledged when it is journalled and in the log. How many more an actor may send is told with it; the
  limiter, or a disk that is full, makes actors wait by not raising that number, so what is on the way is bounded.
"""

import collections
import dataclasses
import logging
from typing import NamedTuple

import numpy as np
import zstandard

from apexrl.errors import JournalError, WireError
from apexrl.net import wire
from apexrl.net.identity import why_not_named
from apexrl.net.leases import Leases
from apexrl.net.outbox import Outbox
from apexrl.replay.log import Record
from apexrl.replay.replay import Replay

logger = logging.getLogger(__name__)

MAX_ACTORS = 4096
MAX_STREAMS_PER_ACTOR = 4096
MAX_SLOTS = 65_536
REMEMBERED_ACTORS = 65_536
MAX_MESSAGE_OVERHEAD_BYTES = 1024
EPISODE_BYTES = 40
MAX_BLOCK_OVERHEAD_BYTES = 1024  # what does not compress grows a little
JOURNAL_FAULT = "journal"


@dataclasses.dataclass
class ActorSession:
    """What the server knows of one actor process."""

    actor: str
    slots: tuple[int, ...]
    next_sequence: int  # of the insert to arrive
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
    """Owns what is known of the actors. `receive` messages, then `store` and `acknowledge` once for all of them."""

    def __init__(self, outbox: Outbox):
        self.sessions: dict[bytes, ActorSession] = {}
        self.leases = Leases(MAX_SLOTS)
        self.journal_fault = ""
        self._outbox = outbox
        self._arrived: list[_Arrived] = []
        self._to_tell: dict[bytes, None] = {}  # peers to be acknowledged, in order
        self._told_all: tuple[str, int] = ("", 0)  # what keeps actors waiting and the ladder's size, as last told
        # The insert after the last one stored, by actor. What this life stored is kept after a session has ended, so
        # that a late resend is not stored twice. What the journal held may lack the newest: a power cut took them.
        self._stored: collections.OrderedDict[str, int] = collections.OrderedDict()
        self._recovered: dict[str, int] = {}

    def waits_for(self, replay: Replay) -> str:
        """Returns why actors have to wait, or an empty string."""
        return JOURNAL_FAULT if self.journal_fault else replay.why_no_insert()

    def recover(self, actor: str, sequence: int) -> None:
        """Takes note of an insert that the journal holds."""
        self._recovered[actor] = max(sequence + 1, self._recovered.get(actor, 0))

    def hello(self, peer: bytes, message: wire.Hello, replay: Replay, now: float) -> None:
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
            session = ActorSession(message.actor, self.leases.take(message.num_streams), 0, 0, now)
            self.sessions[peer] = session
            logger.info("actor %s joined with %d environments", message.actor, message.num_streams)
        if known is None:
            # What lies before the first insert that it still holds was stored once, even if a power cut took it.
            known = max(self._recovered.get(message.actor, 0), message.first_sequence)
        session.next_sequence = session.stored_sequence = known
        session.lost_inserts = bool(self.journal_fault)
        session.last_seen = now
        self._arrived = [arrived for arrived in self._arrived if arrived.peer != peer]
        session.told = self._standing(session, replay)
        self._to_tell.pop(peer, None)
        welcome = wire.Welcome(session.slots, self.leases.ladder_size, *session.told, self.waits_for(replay))
        self._outbox.send("actor", peer, welcome)

    def receive(self, peer: bytes, message: wire.ToReplay, frames: list[bytes], replay: Replay, now: float) -> None:
        """Takes a message of a known actor.

        Raises: WireError when an insert is not what the spec says.
        """
        session = self.sessions[peer]
        session.last_seen = now
        match message:
            case wire.Insert():
                self._insert(peer, session, message, frames, replay, now)
            case wire.Heartbeat():
                self._to_tell[peer] = None
            case wire.Goodbye():
                self.leave(peer)
            case _:
                self._outbox.drop("actor", peer, "misplaced", f"{type(message).__name__} from an actor")

    def store(self, replay: Replay) -> None:
        """Stores the inserts that arrived, all at once; what cannot be stored is neither kept nor acknowledged."""
        arrived, self._arrived = self._arrived, []
        if not arrived:
            return
        whole = [item for item in arrived if item.frames]
        priorities = np.frombuffer(b"".join(item.insert.priorities for item in whole), np.float32)
        priorities = priorities.reshape(len(whole), replay.spec.unroll_starts)
        good = np.all(np.isfinite(priorities) & (priorities >= 0), axis=1)
        for i in np.flatnonzero(~good):
            reason = f"insert {whole[i].insert.sequence}: a priority is negative or not finite"
            self._outbox.drop("actor", whole[i].peer, "malformed", reason)
        counts = (priorities > 0).sum(axis=1).tolist()
        records = [
            Record(item.frames[0], item.frames[1], count, item.now)
            for item, count, is_good in zip(whole, counts, good, strict=True)
            if is_good
        ]
        try:
            if records:
                replay.insert(records, priorities[good])
        except JournalError as error:
            self.fail(str(error))
            for item in arrived:
                item.session.next_sequence = item.session.stored_sequence
                item.session.lost_inserts = True
            return
        for item in arrived:
            item.session.stored_sequence = item.insert.sequence + 1
            self._remember(item.session)
            self._to_tell[item.peer] = None

    def acknowledge(self, replay: Replay) -> None:
        """Tells actors where they stand: those whose inserts came, or all when what keeps them waiting has changed."""
        state = (self.waits_for(replay), self.leases.ladder_size)
        if state != self._told_all:
            self._told_all = state
            self._to_tell = dict.fromkeys(self.sessions)
        for peer in self._to_tell:
            session = self.sessions.get(peer)
            if session is None:
                continue
            session.told = self._standing(session, replay)
            self._outbox.send("actor", peer, wire.Acknowledge(*session.told, state[1], state[0]))
        self._to_tell = {}

    def resume(self) -> None:
        """The journal can be written again: who lost inserts sends them once more."""
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

    def _standing(self, session: ActorSession, replay: Replay) -> tuple[int, int]:
        """Returns what an actor is to be told: up to where it is stored, and up to where it may send."""
        stored = session.stored_sequence
        if self.journal_fault:
            return stored, stored
        return stored, stored + session.window if not replay.why_no_insert() else max(session.told[1], stored)

    def _insert(self, peer: bytes, session: ActorSession, insert: wire.Insert, frames: list[bytes], replay: Replay,
                now: float) -> None:  # fmt: skip
        if insert.sequence < session.next_sequence:  # a resend of what is stored: its acknowledgement was lost
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
        reason = why_malformed(insert, frames, session, replay)
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


def why_malformed(insert: wire.Insert, frames: list[bytes], session: ActorSession, replay: Replay) -> str:
    """Returns what is wrong with an insert, or an empty string; looks at sizes only, and decompresses nothing."""
    spec = replay.spec
    message, block = frames
    if len(message) > MAX_MESSAGE_OVERHEAD_BYTES + 4 * spec.unroll_starts + EPISODE_BYTES * (spec.unroll_steps + 1):
        return f"a message of {len(message)} bytes for {spec.unroll_steps} steps"
    if insert.actor != session.actor:
        return f"it names the actor {insert.actor}, this is {session.actor}"
    if insert.stream >= len(session.slots):
        return f"stream {insert.stream} of {len(session.slots)}"
    if len(insert.priorities) != 4 * spec.unroll_starts:
        return f"{len(insert.priorities)} bytes of priorities for {spec.unroll_starts} starts"
    if len(block) > spec.unroll_bytes + MAX_BLOCK_OVERHEAD_BYTES + spec.unroll_bytes // 128:
        return f"a block of {len(block)} bytes for an unroll of {spec.unroll_bytes}"
    try:
        size = zstandard.frame_content_size(block)
    except zstandard.ZstdError:
        size = -1
    return "" if size == spec.unroll_bytes else f"a block that holds {size} bytes, not {spec.unroll_bytes}"
