"""The replay's conversations with actors and learners, message in, messages out. No sockets, no clock, no torch.

Rules that the whole system rests on:
* An actor's inserts are numbered. They are stored in order, each once; after any loss of contact the actor introduces
  itself again and resends what was not acknowledged. Acknowledgements are cumulative.
* An insert is stored and acknowledged at once. How many more an actor may send is told with the acknowledgement; the
  limiter makes actors wait by not raising that number, so what can exceed the band is bounded.
* A learner gets every unroll in order before the first batch that names it, on one connection.
"""

import collections
import dataclasses
import heapq
import logging
from typing import NamedTuple

import numpy as np

from apexrl.config import ReplayConfig
from apexrl.errors import WireError
from apexrl.net import wire
from apexrl.replay.log import Record
from apexrl.replay.replay import Replay
from apexrl.types import StreamSpec

logger = logging.getLogger(__name__)

PEER_TIMEOUT_SECONDS = 15.0
MAX_STREAMS_PER_ACTOR = 4096
MAX_UNAPPLIED_UNROLLS = 512
MAX_BATCHES_AHEAD = 64
MAX_BLOCK_OVERHEAD_BYTES = 1024  # what does not compress grows a little
REMEMBERED_ACTORS = 65536


@dataclasses.dataclass
class ActorSession:
    """What the server knows of one actor process."""

    actor: str
    slots: tuple[int, ...]
    next_sequence: int  # of the insert to come: all before it are stored
    last_seen: float
    told: tuple[int, int] = (0, 0)  # the stored and the allowed sequence of the last acknowledgement

    @property
    def window(self) -> int:
        """Inserts that may be on the way: two unrolls of each stream."""
        return 2 * len(self.slots) + 2


@dataclasses.dataclass
class LearnerSession:
    """What the server knows of one learner."""

    learner: str
    request: int
    batch_size: int
    next_number: int  # of the unroll to send
    last_seen: float
    applied_number: int
    batches_allowed: int = 0
    batches_sent: int = 0
    told_reason: str = ""


class Outgoing(NamedTuple):
    """One message to a peer; `role` names the socket."""

    role: str  # "actor" or "learner"
    peer: bytes
    frames: tuple[bytes, ...]


class ReplayService:
    """Owns the replay and the sessions. Feed it messages and the time, call `advance`, send what `outbox` holds."""

    def __init__(self, config: ReplayConfig, server: str, seed: int):
        """Starts empty; the first actor's spec decides what the log holds."""
        self.server = server
        self.replay: Replay | None = None
        self.outbox: list[Outgoing] = []
        self.dropped: collections.Counter[str] = collections.Counter()
        self.actors: dict[bytes, ActorSession] = {}
        self.learners: dict[bytes, LearnerSession] = {}
        self._config = config
        self._seed = seed
        self._batch_size = 1
        self._free_slots: list[int] = []
        self._num_slots = 0
        # Next sequence by actor, kept after a session has ended, so that a late resend is not stored twice.
        self._next_sequence: collections.OrderedDict[str, int] = collections.OrderedDict()

    def receive(self, role: str, peer: bytes, frames: list[bytes], now: float) -> None:
        """Takes one message; what is malformed or out of place is dropped and counted."""
        try:
            message = wire.decode_to_replay(frames)
            match message, role:
                case wire.Hello(), "actor":
                    self._hello(peer, message, now)
                case wire.Subscribe(), "learner":
                    self._subscribe(peer, message, now)
                case _, "actor" if peer in self.actors:
                    self._from_actor(peer, message, frames, now)
                case _, "learner" if peer in self.learners:
                    self._from_learner(peer, message, now)
                case wire.Goodbye(), _:
                    pass
                case _:
                    self._send(role, peer, wire.Stranger())
        except WireError as error:
            self._drop("malformed", f"{role} {peer.hex()}: {error}")

    def advance(self) -> None:
        """Sends what may be sent now: acknowledgements, unrolls, batches."""
        if self.replay is None:
            return
        for peer, actor in self.actors.items():
            if self._standing(actor) != actor.told:
                self._acknowledge(peer, actor)
        for peer, learner in self.learners.items():
            self._send_unrolls(peer, learner)
        while any([self._send_batch(peer, learner) for peer, learner in self.learners.items()]):
            pass
        for peer, learner in self.learners.items():
            reason = self.replay.why_no_sample(learner.batch_size)
            if learner.batches_sent < learner.batches_allowed and reason != learner.told_reason:
                learner.told_reason = reason
                self._send("learner", peer, wire.Waiting(reason))

    def expire(self, now: float) -> None:
        """Gives up peers that were silent for too long, and frees what they held."""
        for role, sessions in (("actor", self.actors), ("learner", self.learners)):
            for peer in [p for p, s in sessions.items() if now - s.last_seen > PEER_TIMEOUT_SECONDS]:
                logger.warning("%s %s was silent for %.0f s: given up", role, peer.hex(), PEER_TIMEOUT_SECONDS)
                self._leave(role, peer)

    def statistics(self, now: float) -> dict[str, float]:
        """Returns the server's figures; totals count from the start of this process."""
        figures = {f"dropped_{reason}": float(count) for reason, count in self.dropped.items()}
        figures |= {"actors": len(self.actors), "learners": len(self.learners), "slots": self._num_slots}
        if self.replay is None:
            return figures
        replay = self.replay
        low, middle, high = replay.table.priority_quantiles((0.1, 0.5, 0.9))
        oldest = replay.log[replay.log.first_number].arrived_seconds if len(replay.log) else now
        return figures | {
            "size": replay.log.num_transitions,
            "fill": replay.log.num_transitions / replay.config.capacity,
            "age_seconds": now - oldest,
            "log_bytes": replay.log.num_bytes,
            "bytes_per_transition": replay.log.num_bytes / max(replay.log.num_transitions, 1),
            "transitions_inserted": replay.limiter.inserted,
            "transitions_sampled": replay.limiter.sampled,
            "samples_per_insert": replay.limiter.samples_per_insert_so_far(),
            "stale_priorities": replay.table.num_stale,
            "unrolls_not_applied": sum(replay.log.end_number - s.applied_number for s in self.learners.values()),
            "priority_quantile_10": low,
            "priority_quantile_50": middle,
            "priority_quantile_90": high,
        }

    # Actors.

    def _hello(self, peer: bytes, message: wire.Hello, now: float) -> None:
        refusal = self._why_refuse(message.protocol, message.spec)
        if not refusal and not 1 <= message.num_streams <= MAX_STREAMS_PER_ACTOR:
            refusal = f"an actor may have 1..{MAX_STREAMS_PER_ACTOR} environments, not {message.num_streams}"
        if refusal:
            self._send("actor", peer, wire.Refused(refusal))
            return
        if self.replay is None:
            self.replay = Replay(self._config, message.spec, self._batch_size, self._seed)
            logger.info("the log holds %s, %d transitions at most", message.spec.env, self._config.capacity)
        session = self.actors.get(peer)
        if session is None or len(session.slots) != message.num_streams:
            if session is not None:
                self._leave("actor", peer)
            next_sequence = self._next_sequence.get(message.actor, message.first_sequence)
            session = ActorSession(message.actor, self._lease(message.num_streams), next_sequence, now)
            self.actors[peer] = session
            logger.info("actor %s joined with %d environments", message.actor, message.num_streams)
        session.last_seen = now
        session.told = self._standing(session)
        self._send("actor", peer, wire.Welcome(self.server, session.slots, self._num_slots, *session.told))

    def _standing(self, session: ActorSession) -> tuple[int, int]:
        """Returns what an actor is to be told: up to where it is stored, and up to where it may send."""
        assert self.replay is not None
        stored = session.next_sequence
        may_go_on = not self.replay.why_no_insert()
        return stored, stored + session.window if may_go_on else max(session.told[1], stored)

    def _acknowledge(self, peer: bytes, session: ActorSession) -> None:
        assert self.replay is not None
        session.told = self._standing(session)
        message = wire.Acknowledge(*session.told, self._num_slots, self.replay.why_no_insert())
        self._send("actor", peer, message)

    def _from_actor(self, peer: bytes, message: wire.ToReplay, frames: list[bytes], now: float) -> None:
        session = self.actors[peer]
        session.last_seen = now
        match message:
            case wire.Insert():
                self._insert(peer, session, message, frames, now)
            case wire.Heartbeat():
                self._acknowledge(peer, session)
            case wire.Goodbye():
                self._leave("actor", peer)
            case _:
                self._drop("misplaced", f"{type(message).__name__} from an actor")

    def _insert(
        self, peer: bytes, session: ActorSession, message: wire.Insert, frames: list[bytes], now: float
    ) -> None:
        assert self.replay is not None
        if message.sequence < session.next_sequence:  # a resend of what is stored: its acknowledgement was lost
            self.dropped["duplicate"] += 1
            session.told = (-1, session.told[1])  # tell it again
            return
        if message.sequence > session.next_sequence:  # something before it was lost: start over from there
            self._drop("gap", f"{session.actor}: insert {message.sequence}, expected {session.next_sequence}")
            self._send("actor", peer, wire.Stranger())
            return
        if message.sequence >= session.told[1]:
            self._drop("not allowed", f"{session.actor}: insert {message.sequence}, up to {session.told[1]} is allowed")
            return
        # From here on the insert is dealt with, stored or not: its actor would only send the same again.
        session.next_sequence += 1
        self._next_sequence[session.actor] = session.next_sequence
        spec = self.replay.spec
        priorities = wire.array_from(message.priorities, np.float32)
        if len(priorities) != spec.unroll_starts:
            raise WireError(f"{len(priorities)} priorities in an unroll of {spec.unroll_starts} starts")
        if not (np.isfinite(priorities).all() and (priorities >= 0).all()):
            raise WireError("a priority is negative or not finite")
        if len(frames[1]) > spec.unroll_bytes + MAX_BLOCK_OVERHEAD_BYTES + spec.unroll_bytes // 128:
            raise WireError(f"a block of {len(frames[1])} bytes for an unroll of {spec.unroll_bytes}")
        record = Record(frames[0], frames[1], int((priorities > 0).sum()), now)
        self.replay.insert(record, priorities)
        self._next_sequence.move_to_end(session.actor)
        if len(self._next_sequence) > REMEMBERED_ACTORS:
            self._next_sequence.popitem(last=False)

    def _lease(self, num_streams: int) -> tuple[int, ...]:
        """Gives the lowest free slots, so that the ladder stays dense when actors come and go."""
        while len(self._free_slots) < num_streams:
            heapq.heappush(self._free_slots, self._num_slots)
            self._num_slots += 1
        return tuple(heapq.heappop(self._free_slots) for _ in range(num_streams))

    # Learners.

    def _subscribe(self, peer: bytes, message: wire.Subscribe, now: float) -> None:
        refusal = self._why_refuse(message.protocol, None)
        if not refusal and not 1 <= message.batch_size <= 65536:
            refusal = f"a batch size of {message.batch_size} is outside 1..65536"
        if refusal:
            self._send("learner", peer, wire.Refused(refusal))
            return
        self._batch_size = message.batch_size
        if self.replay is None:
            self._send("learner", peer, wire.Waiting("actors"))
            return
        self.replay.set_batch_size(message.batch_size)
        wanted = message.next_number if message.server == self.server else 0
        start = min(max(wanted, self.replay.log.first_number), self.replay.log.end_number)
        if peer not in self.learners:
            logger.info("learner %s joined at unroll %d", message.learner, start)
        self.learners[peer] = LearnerSession(
            message.learner, message.request, message.batch_size, start, now, applied_number=start
        )
        self._send_subscribed(peer, self.learners[peer])

    def _from_learner(self, peer: bytes, message: wire.ToReplay, now: float) -> None:
        assert self.replay is not None
        session = self.learners[peer]
        session.last_seen = now
        match message:
            case wire.Demand():
                session.applied_number = max(session.applied_number, message.applied_number)
                session.batches_allowed = min(message.batches, session.batches_sent + MAX_BATCHES_AHEAD)
            case wire.Heartbeat():
                waits_for = self.replay.why_no_sample(session.batch_size)
                self._send("learner", peer, wire.Standing(session.next_number, session.batches_sent, waits_for))
            case wire.UpdatePriorities():
                keys = wire.array_from(message.keys, np.int64)
                priorities = wire.array_from(message.priorities, np.float32)
                if len(keys) != len(priorities) or not np.isfinite(priorities).all() or (priorities < 0).any():
                    raise WireError("priorities that are negative, not finite, or not as many as the keys")
                self.replay.table.update_priorities(keys, priorities)
            case wire.Goodbye():
                self._leave("learner", peer)
            case _:
                self._drop("misplaced", f"{type(message).__name__} from a learner")

    def _send_unrolls(self, peer: bytes, session: LearnerSession) -> None:
        assert self.replay is not None
        log = self.replay.log
        if session.next_number < log.first_number:  # evicted before it could be sent: the learner lacks nothing by it
            session.next_number = session.applied_number = log.first_number
            self._send_subscribed(peer, session)
        end = min(log.end_number, session.applied_number + MAX_UNAPPLIED_UNROLLS)
        while session.next_number < end:
            record = log[session.next_number]
            self._send("learner", peer, wire.Append(session.next_number), record.message, record.block)
            session.next_number += 1

    def _send_batch(self, peer: bytes, session: LearnerSession) -> bool:
        """Sends one batch if the learner wants it, has been sent the whole log, and the limiter agrees."""
        replay = self.replay
        assert replay is not None
        if session.batches_sent >= session.batches_allowed or session.next_number < replay.log.end_number:
            return False
        if replay.why_no_sample(session.batch_size):
            return False
        sample = replay.sample(session.batch_size)
        message = wire.Batch(session.batches_sent, *(np.ascontiguousarray(array).tobytes() for array in sample))
        self._send("learner", peer, message)
        session.batches_sent += 1
        session.told_reason = ""
        return True

    def _send_subscribed(self, peer: bytes, session: LearnerSession) -> None:
        assert self.replay is not None
        spec, ring_unrolls = self.replay.spec, self.replay.ring_unrolls
        message = wire.Subscribed(
            session.request, self.server, spec, ring_unrolls, session.next_number, session.batches_sent
        )
        self._send("learner", peer, message)

    # Both.

    def _why_refuse(self, protocol: int, spec: StreamSpec | None) -> str:
        if protocol != wire.PROTOCOL:
            return f"this server speaks protocol {wire.PROTOCOL}, you speak {protocol}: run the same version everywhere"
        if spec is None:
            return ""
        if self.replay is not None and spec != self.replay.spec:
            return f"the log holds {self.replay.spec}, you bring {spec}: use the same --env and --n-steps everywhere"
        if not (spec.unroll_starts >= 1 and spec.n_steps >= 1 and spec.stacked_frames >= 1 and spec.num_actions >= 1):
            return f"counts below 1 in {spec}"
        if spec.frame_dtype not in ("uint8", "float32") or min(spec.frame_shape, default=1) < 1:
            return f"frames of {spec.frame_dtype} {spec.frame_shape} are not supported"
        if spec.unroll_bytes > wire.MAX_MESSAGE_BYTES // 2:
            return f"an unroll of {spec.unroll_bytes} bytes is larger than a message may be: lower --unroll-starts"
        return ""

    def _leave(self, role: str, peer: bytes) -> None:
        if role == "learner":
            logger.info("learner %s left", self.learners.pop(peer).learner)
            return
        session = self.actors.pop(peer)
        logger.info("actor %s left; its %d slots are free", session.actor, len(session.slots))
        for slot in session.slots:
            heapq.heappush(self._free_slots, slot)
        held = {slot for other in self.actors.values() for slot in other.slots}
        self._num_slots = max(held, default=-1) + 1
        self._free_slots = [slot for slot in self._free_slots if slot < self._num_slots]
        heapq.heapify(self._free_slots)

    def _drop(self, reason: str, detail: str) -> None:
        self.dropped[reason] += 1
        count = self.dropped[reason]
        if count & (count - 1) == 0:  # the 1st, 2nd, 4th, 8th ...: a flood cannot fill the log file
            logger.warning("dropped a message (%s, %d so far): %s", reason, count, detail)

    def _send(self, role: str, peer: bytes, message: wire.FromReplay, *attachments: bytes) -> None:
        self.outbox.append(Outgoing(role, peer, (wire.encode(message), *attachments)))
