"""The replay's conversations with learners and other readers: the log in order, batches, fetches, priorities back.

A reader that follows the log gets every unroll in order before the first batch that names it, on one connection. Its
demand bounds the messages on the way to it, so a slow one slows nobody else down. No sockets, no clock.
"""

import dataclasses
import logging
from collections import deque
from collections.abc import Collection, Sequence

import numpy as np

from apexrl.errors import WireError
from apexrl.net import wire
from apexrl.net.outbox import Outbox
from apexrl.net.protocols import agreed_protocol
from apexrl.replay.log import LogEntry
from apexrl.replay.replay import Replay
from apexrl.sets import distinct

logger = logging.getLogger(__name__)

MAX_LEARNERS = 256
MAX_UNAPPLIED_UNROLLS = 512
MAX_UNAPPLIED_BYTES = 64 * 2**20
MAX_TRANSITIONS_AT_ONCE = 2**18  # in batches
MAX_TRANSITIONS_IN_A_DRAW = 2**13  # of several batches of a learner that is alone in wanting some
MAX_FETCHED_BYTES = 2**20  # at once; further answers wait for the other peers
MAX_BATCH_BYTES = 2**23  # of the unrolls that come with a batch; their reader fetches others
KEPT_ANSWERS = 256  # of a reader's deletes, which it sends again while it hears none
BYTES_OF_ITEM = 64  # of unrolls, which take a turn as long as one more item


@dataclasses.dataclass
class TableSession:
    """The batches of one table that a learner asked for."""

    table: str
    batch_size: int
    allowed: int = 0
    sent: int = 0
    told_reason: str = ""
    prefetch: int = 0  # the most batches that it asked for ahead
    drawn: int = 0  # items of its batches, by which readers of a table take turns
    yields: bool = False  # another reader's larger batch comes first, once there is enough for it

    def ask(self, batches: int) -> bool:
        """Takes a demand, a total; returns whether it is larger than the one before."""
        before, self.allowed = self.allowed, min(batches, self.sent + wire.MAX_BATCHES_AHEAD)
        self.prefetch = max(self.prefetch, self.wanted)
        return self.allowed > before

    @property
    def wanted(self) -> int:
        """Batches that may be sent."""
        return self.allowed - self.sent

    @property
    def is_used_up(self) -> bool:
        """Whether the learner has no batch left, as far as its demands tell."""
        return 0 < self.prefetch <= self.wanted

    def has_turn(self, rivals: "Sequence[TableSession]", replay: Replay) -> bool:
        """Returns whether no rival that can be helped by waiting has to be let pass: it would never get a larger batch.

        A reader may be ahead by what the other's batch is larger than its own.
        """
        return not any(
            self.drawn > rival.drawn + max(rival.batch_size - self.batch_size, 0)
            and rival.wanted > 0
            and replay.why_no_sample(rival.table, rival.batch_size) in ("", "actors")
            for rival in rivals
        )

    def why_waiting(self, replay: Replay) -> str:
        """Returns why a batch that was asked for does not come, or an empty string."""
        if self.wanted <= 0:
            return ""
        return replay.why_no_sample(self.table, self.batch_size) or ("actors" if self.yields else "")


@dataclasses.dataclass
class LearnerSession:
    """The state of one learner at the server."""

    asked: wire.Subscribe
    tables: list[TableSession]
    next_number: int  # number of the unroll to send
    last_seen: float
    applied_number: int
    moved_seconds: float = -1e9  # when it last asked for more, or had applied more
    is_idle: bool = True  # it did neither yet, or not for long
    fetches: deque[tuple[int, int]] = dataclasses.field(default_factory=deque)  # requests and numbers to answer
    deleted: dict[int, wire.Deleted] = dataclasses.field(default_factory=dict)  # the newest answers, by request
    unapplied_bytes: int = 0
    unapplied: deque[tuple[int, int]] = dataclasses.field(default_factory=deque)  # numbers and bytes of those sent

    def demand(self, message: wire.Demand, now: float) -> None:
        """Takes note of how far the replica is, and of the batches that may be sent."""
        before = self.applied_number
        self.applied_number = max(before, min(message.applied_number, self.next_number))
        while self.unapplied and self.unapplied[0][0] < self.applied_number:
            self.unapplied_bytes -= self.unapplied.popleft()[1]
        asks = [table.ask(batches) for table, batches in zip(self.tables, message.batches, strict=False)]
        if any(asks) or self.applied_number > before:
            self.moved_seconds, self.is_idle = now, False

    def has_all(self, replay: Replay) -> bool:
        """Returns whether it was sent every unroll that it wants, so that batches may follow."""
        return not self.asked.follows_log or self.next_number == replay.log.end_number

    def is_starved(self, replay: Replay) -> bool:
        """Returns whether it cannot go on before actors do: one of its tables is used up, and has no batch now."""
        return any(table.why_waiting(replay) for table in self.tables if table.is_used_up or self.is_idle)

    def draws_from(self, tables: Collection[str], replay: Replay) -> bool:
        """Returns whether it takes batches of one of these tables, now or when it has used those that it holds."""
        own = [table for table in self.tables if table.table in tables]
        wants_now = any(table.wanted > 0 and not table.why_waiting(replay) for table in own)
        return bool(own) and not self.is_idle and (wants_now or not self.is_starved(replay))


class LearnerSessions:
    """Owns the sessions of the learners. `receive` messages, then `send` everything that may be sent now."""

    def __init__(self, replay: Replay, outbox: Outbox):
        self.sessions: dict[bytes, LearnerSession] = {}
        self.batch_sizes: list[dict[str, int]] = []  # of each learner, by table
        self._replay = replay
        self._outbox = outbox
        # Keys and priorities that came since the last `send`, by table, in order.
        self._updates: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}

    def subscribe(self, peer: bytes, message: wire.Subscribe, now: float) -> None:
        """Begins or continues a subscription; the tables asked for must exist."""
        if len(self.sessions) >= MAX_LEARNERS and peer not in self.sessions:  # there may be room later
            self._outbox.drop("learner", peer, "crowded", f"{MAX_LEARNERS} learners are connected already")
            return
        if refusal := self._why_refuse(message.wants):
            self._outbox.refuse("learner", peer, refusal)
            return
        log = self._replay.log
        continues = message.ring_unrolls == self._replay.ring_unrolls and self._replay.identity.continues(
            message.log, message.life, message.next_number
        )
        start = min(max(message.next_number if continues else 0, log.first_number), log.end_number)
        tables = [TableSession(want.table, want.batch_size) for want in message.wants]
        session = LearnerSession(message, tables, start, now, start)
        if (before := self.sessions.get(peer)) is not None:
            session.deleted = before.deleted
        else:
            logger.info("learner %s joined at unroll %d", message.learner, start)
        self.sessions[peer] = session
        self._fit_limiters()
        self._send_subscribed(peer, session, continues)

    def receive(self, peer: bytes, message: wire.ToReplay, now: float) -> None:
        """Takes a message of a known learner.

        Raises: WireError when it breaks the protocol.
        """
        session = self.sessions[peer]
        session.last_seen = now
        match message:
            case wire.Demand():
                session.demand(message, now)
            case wire.Heartbeat():
                waits_for = tuple(table.why_waiting(self._replay) for table in session.tables)
                sent = tuple(table.sent for table in session.tables)
                self._outbox.send("learner", peer, wire.Standing(session.next_number, sent, waits_for))
            case wire.UpdatePriorities():
                self._update_priorities(session, message)
            case wire.Delete():
                self._set_priorities()  # those that came before
                self._outbox.send("learner", peer, self._deleted(session, message))
            case wire.Fetch():
                if len(session.fetches) + len(message.numbers) > wire.MAX_FETCH:
                    raise WireError(f"{wire.MAX_FETCH} unrolls are being fetched already")
                session.fetches.extend((message.request, number) for number in message.numbers)
            case wire.Goodbye():
                self.leave(peer)
            case _:
                self._outbox.drop("learner", peer, "misplaced", f"{type(message).__name__} from a learner")

    def send(self) -> bool:
        """Sets the priorities that came, then sends the unrolls and batches that may be sent now.

        A learner that is alone in wanting batches gets them out of one draw. Several get them in turn, and those of
        one table as many items each, whatever the sizes of their batches are.

        Returns: whether more may be sent, after this is.
        """
        self._set_priorities()
        if not self.sessions:
            return False
        for peer, session in self.sessions.items():
            if session.asked.follows_log:
                self._send_unrolls(peer, session)
            else:
                session.next_number = self._replay.log.end_number
        num_sent = self._send_in_turn()
        for peer, session in list(self.sessions.items()):
            for i, table in enumerate(session.tables):
                reason = table.why_waiting(self._replay)
                if reason and (never := self._replay.why_never(table.table, table.batch_size)):
                    self._outbox.refuse("learner", peer, never)
                    self.leave(peer)
                    break
                if reason and reason != table.told_reason:
                    table.told_reason = reason
                    self._outbox.send("learner", peer, wire.Waiting(i, reason))
        has_more = [self._send_fetched(peer, session) for peer, session in self.sessions.items()]
        return num_sent >= MAX_TRANSITIONS_AT_ONCE or any(has_more)

    def are_stalled(self) -> bool:
        """Returns whether one waits for inserts, and none draws from the tables for whose learners actors wait."""
        full, sessions = self._replay.full_tables(), self.sessions.values()
        if not full or any(session.draws_from(full, self._replay) for session in sessions):
            return False
        return any(session.is_starved(self._replay) for session in sessions)

    def leave(self, peer: bytes) -> None:
        """Forgets a learner."""
        logger.info("learner %s left", self.sessions.pop(peer).asked.learner)
        self._fit_limiters()

    def _why_refuse(self, wants: Sequence[wire.Want]) -> str:
        tables = [want.table for want in wants]
        unknown = [table for table in tables if table not in self._replay.tables]
        if unknown:
            return f"there is no table {unknown[0]}, only {self._table_names()}"
        if len(set(tables)) < len(tables):
            return "a table is asked for twice"
        never = (self._replay.why_never(want.table, want.batch_size) for want in wants)
        return next(filter(None, never), "")

    def _fit_limiters(self) -> None:
        """Keeps the last sizes while nobody is there, so that a learner may restart without moving the band."""
        if self.sessions:
            sessions = self.sessions.values()
            self.batch_sizes = [{table.table: table.batch_size for table in session.tables} for session in sessions]
            self._replay.set_batch_sizes(*self.batch_sizes)

    def _update_priorities(self, session: LearnerSession, message: wire.UpdatePriorities) -> None:
        keys = wire.array_from(message.keys, np.int64)
        priorities = wire.array_from(message.priorities, np.float32)
        if len(keys) != len(priorities) or not np.isfinite(priorities).all() or (priorities < 0).any():
            raise WireError("priorities that are negative, not finite, or not as many as the keys")
        if message.table >= len(session.tables):
            raise WireError(f"priorities of table {message.table}, {len(session.tables)} are subscribed to")
        self._updates.setdefault(session.tables[message.table].table, []).append((keys, priorities))

    def _set_priorities(self) -> None:
        """Sets the priorities that came since the last call: many at once cost little more than few."""
        updates, self._updates = self._updates, {}
        for table, of_table in updates.items():
            keys, priorities = (np.concatenate(arrays) for arrays in zip(*of_table, strict=True))
            self._replay.tables[table].update_priorities(keys, priorities)

    def _send_fetched(self, peer: bytes, session: LearnerSession) -> bool:
        """Answers some of the fetches; returns whether there are more."""
        sent_bytes = 0
        while session.fetches and sent_bytes < MAX_FETCHED_BYTES:
            request, number = session.fetches.popleft()
            entry = self._replay.log.get(number)
            attachments = (b"", b"") if entry is None else (entry.message, entry.block)
            sent_bytes += 1024 + sum(map(len, attachments))
            self._outbox.send("learner", peer, wire.Fetched(request, number, entry is not None), *attachments)
        return bool(session.fetches)

    def _send_unrolls(self, peer: bytes, session: LearnerSession) -> None:
        log = self._replay.log
        if session.next_number < log.first_number:  # evicted before it could be sent: the learner lacks nothing by it
            self._jump(peer, session, log.first_number)
        end = min(log.end_number, session.applied_number + MAX_UNAPPLIED_UNROLLS)
        while session.next_number < end and session.unapplied_bytes < MAX_UNAPPLIED_BYTES:
            number = session.next_number
            entry = log.get(number)
            if entry is None:  # lost with a damaged journal
                present = number + 1
                while present < log.end_number and log.get(present) is None:
                    present += 1
                self._jump(peer, session, present)
                continue
            self._outbox.send("learner", peer, wire.Append(number), entry.message, entry.block)
            session.unapplied.append((number, entry.num_bytes))
            session.unapplied_bytes += entry.num_bytes
            session.next_number += 1

    def _jump(self, peer: bytes, session: LearnerSession, number: int) -> None:
        """Goes on at a later number: those before it do not exist (any more)."""
        if session.applied_number == session.next_number:
            session.applied_number = number
        session.next_number = number
        self._send_subscribed(peer, session, continues=True)

    def _send_in_turn(self) -> int:
        """Sends the batches that are wanted, as far as the limiters agree; returns the number of items in them."""
        num_sent, before = 0, -1
        while before < num_sent < MAX_TRANSITIONS_AT_ONCE:
            before, wanting = num_sent, self._wanting()
            most = MAX_TRANSITIONS_IN_A_DRAW if sum(map(len, wanting.values())) == 1 else 1
            for peer, session in self.sessions.items():
                for i, table in enumerate(session.tables):
                    if session.has_all(self._replay) and table.has_turn(wanting.get(table.table, ()), self._replay):
                        num_sent += self._send_batches(peer, session, i, most)
        self._settle_turns()
        return num_sent

    def _wanting(self) -> dict[str, list[TableSession]]:
        """Returns by table the sessions that want batches of it now and have all unrolls."""
        found: dict[str, list[TableSession]] = {}
        for session in self.sessions.values():
            if session.has_all(self._replay):
                for table in session.tables:
                    if table.wanted > 0:
                        found.setdefault(table.table, []).append(table)
        return found

    def _settle_turns(self) -> None:
        """Counts from the foremost reader of each table; one that wants nothing now has no claim later."""
        tables = [table for session in self.sessions.values() for table in session.tables]
        foremost: dict[str, int] = {}
        for table in tables:
            foremost[table.table] = max(table.drawn, foremost.get(table.table, 0))
            table.yields = False
        wanting = self._wanting()
        claims = {id(table) for rivals in wanting.values() for table in rivals}
        for table in tables:
            table.drawn = table.drawn - foremost[table.table] if id(table) in claims else 0
        for rivals in wanting.values():
            for table in rivals:
                table.yields = not table.has_turn(rivals, self._replay)

    def _send_batches(self, peer: bytes, session: LearnerSession, i: int, most: int) -> int:
        """Sends batches that the learner wants, as far as the limiter agrees: of `most` items together, or one.

        Returns: the number of items in them, and as many more as their unrolls take time.
        """
        table = session.tables[i]
        wanted = min(table.wanted, max(most // table.batch_size, 1))
        if wanted <= 0:
            return 0
        drawn: dict[int, LogEntry] | None = {} if session.asked.with_unrolls else None
        samples = self._replay.samples(table.table, table.batch_size, wanted, drawn)
        num_bytes = 0
        for sample in samples:
            attachments = [] if drawn is None else _attached(drawn, self._replay.numbers_of(table.table, sample.keys))
            probabilities = sample.probabilities.tobytes() if session.asked.with_probabilities else b""
            keys, weights = sample.keys.tobytes(), sample.weights.tobytes()
            message = wire.Batch(
                i, table.sent, session.next_number, keys, weights, sample.largest_weight, probabilities
            )
            self._outbox.send("learner", peer, message, *attachments)
            num_bytes += sum(map(len, attachments))
            table.sent += 1
            table.drawn += table.batch_size
            table.told_reason = ""
        return len(samples) * table.batch_size + num_bytes // BYTES_OF_ITEM

    def _deleted(self, session: LearnerSession, message: wire.Delete) -> wire.Deleted:
        """Deletes what a message names, and returns the answer; one that was sent again deletes nothing more."""
        request, table, answers = message.request, message.table, session.deleted
        if table not in self._replay.tables:
            return wire.Deleted(request, 0, f"there is no table {table}, only {self._table_names()}")
        if request not in answers:
            keys = None if message.everything else wire.array_from(message.keys, np.int64)
            answers[request] = wire.Deleted(request, self._replay.delete(table, keys))
            if len(answers) > KEPT_ANSWERS:
                del answers[next(iter(answers))]
        return answers[request]

    def _table_names(self) -> str:
        return ", ".join(self._replay.tables)

    def _send_subscribed(self, peer: bytes, session: LearnerSession, continues: bool) -> None:
        replay, asked = self._replay, session.asked
        message = wire.Subscribed(
            asked.request, replay.identity.log, replay.identity.life, continues, replay.spec, replay.ring_unrolls,
            session.next_number, tuple(table.sent for table in session.tables),
            tuple(replay.tables[table.table].granularity for table in session.tables),
            agreed_protocol(asked), asked.log_name, replay.identity.ancestors,
        )  # fmt: skip
        self._outbox.send("learner", peer, message)


def _attached(drawn: dict[int, LogEntry], numbers: np.ndarray) -> list[bytes]:
    """Returns the attachments of a batch whose keys name these unrolls."""
    attachments, num_bytes = [], 0
    for number in distinct(numbers).tolist():
        entry = drawn.get(number)
        if entry is None or num_bytes + entry.num_bytes > MAX_BATCH_BYTES:
            attachments += [b"", b""]
        else:
            attachments += [entry.message, entry.block]
            num_bytes += entry.num_bytes
    return attachments
