"""A learner's side of the log: unrolls in order, batches that name them, priorities back. Belongs to one thread."""

import dataclasses
import logging
import math
import sys
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import zmq
from numpy.typing import ArrayLike

from apexrl.errors import WireError
from apexrl.net import wire
from apexrl.net.arguments import check_named, checked_sizes, checked_update
from apexrl.net.calls import Closing
from apexrl.net.connection import HEARTBEAT_SECONDS, RESEND_SECONDS, Connection
from apexrl.net.keyring import Keyring
from apexrl.net.protocols import PROTOCOL, PROTOCOLS
from apexrl.types import Granularity, Sample, StreamSpec

logger = logging.getLogger(__name__)

APPLIED_PERIOD_UNROLLS = 64  # a learner that catches up says how far it is after so many
MAX_SILENCE_SECONDS = 12.0  # of ours: a server forgets a learner from which it hears nothing for 15 s
MAX_UPDATE_DELAY_SECONDS = 0.2  # of priorities that wait for the next demand


@dataclasses.dataclass(frozen=True)
class LogStart:
    """The log (re)starts here: hold unrolls of `spec` in a ring of `ring_unrolls`, from `next_number` on."""

    log: str
    spec: StreamSpec
    ring_unrolls: int
    next_number: int
    continues: bool  # False: a replica from before belongs to another log
    granularity: dict[str, Granularity]  # by wanted table: the items that its keys name
    ancestors: tuple[str, ...] = ()  # logs whose unrolls this one has, with their numbers


@dataclasses.dataclass(frozen=True)
class LogAppend:
    """The next unroll of the log."""

    number: int
    insert: wire.Insert
    block: bytes
    log_number: int | None = None  # in the run's log, where that is another one; below 0: it is none of that log


class EncodedUnroll(NamedTuple):
    """An unroll as it was inserted."""

    message: bytes
    block: bytes


@dataclasses.dataclass(frozen=True)
class LogBatch:
    """A batch of one table."""

    table: str
    sample: Sample
    unrolls: tuple[EncodedUnroll, ...] = ()  # that its keys name, by ascending number, where they were asked for
    journal_share: float = 0.0  # of its keys, that come from a journal beside the log


@dataclasses.dataclass(frozen=True)
class LogFetched:
    """One unroll that was fetched by number; None when the log does not hold it."""

    request: int
    number: int
    unroll: EncodedUnroll | None


LogEvent = LogStart | LogAppend | LogBatch | LogFetched | wire.Deleted | wire.Statistics


class LogClient(Closing):
    """Follows the log and receives batches; a reader without a replica leaves the log out.

    After a loss of contact it subscribes again from where it is, and asks only for the unrolls that it lacks.
    """

    def __init__(
        self,
        endpoint: str,
        learner: str,
        batch_sizes: Mapping[str, int],
        prefetch_batches: int,
        follows_log: bool = True,
        keyring: Keyring | None = None,
        context: zmq.Context | None = None,
        with_probabilities: bool = False,
        with_unrolls: bool = False,
        log: str = "",
    ):
        """Connects and waits for nobody.

        Args:
          learner: a name for people to read.
          batch_sizes: by table, for those that batches are wanted from.
          prefetch_batches: batches of each table that may be on the way or not yet taken, 1 to 64.
          with_probabilities: whether samples have the probabilities of their keys.
          with_unrolls: whether batches have the unrolls of their keys; those that are empty have to be fetched.
          log: the name of the log, where the server has several.
        Raises: ValueError when so many batches ahead, batches of such a size, or such names are not served.
        """
        if not (isinstance(prefetch_batches, int | np.integer) and 0 < prefetch_batches <= wire.MAX_BATCHES_AHEAD):
            raise ValueError(
                f"prefetch_batches {prefetch_batches!r}: a server sends 1 to {wire.MAX_BATCHES_AHEAD} ahead"
            )
        self.waits_for = "replay_connection"
        self._learner = learner
        self._tables = list(batch_sizes)
        self._wants = checked_sizes(batch_sizes)
        self._prefetch_batches = int(prefetch_batches)
        self._follows_log = follows_log
        self._with_probabilities, self._with_unrolls = with_probabilities, with_unrolls
        self._log_name: wire.LogName = log or msgspec.UNSET
        self._log = ""
        self._life = 0
        self._ring_unrolls = 0
        self._next_number = 0
        self._request = 0
        self._asked_seconds, self._patience_seconds = -1e9, 0.0
        self._returned_seconds = -1e9
        self._subscribed = False
        self._unanswered = 0  # heartbeats of this subscription
        self._doubts = 0  # answers to come until the server is known to know us still, after a silence of ours
        self._next_batch = [0] * len(self._tables)  # index of the batch to come, by table
        self._untaken = [0] * len(self._tables)  # batches received and not yet used
        self._unasked = [0] * len(self._tables)  # batches used since the last demand
        self._updates = _Updates()
        try:
            wire.decode_to_replay([wire.encode(self._subscription())])
        except WireError as error:
            raise ValueError(f"no replay server takes this reader: {error}") from error
        self.connection = Connection(endpoint, keyring, context, log)

    def poll(self, timeout_milliseconds: int) -> LogEvent | None:
        """Returns the next event of the log in order, or None when there is none in time.

        Raises: PeerRefused when the server refuses us, WireError when its message cannot be read.
        """
        self._keep_alive()
        patience = self._updates.patience_milliseconds
        if not patience:
            self.send_updates()
        received = self.connection.receive(min(timeout_milliseconds, patience))
        if received is None and patience < timeout_milliseconds:
            self.send_updates()
            received = self.connection.receive(timeout_milliseconds - patience)
        if received is None:
            return None
        message, attachments = received
        match message:
            case wire.Subscribed() if message.request == self._request:
                return self._start(message)
            case wire.Append() if self._subscribed and message.number == self._next_number:
                self._next_number += 1
                if self._next_number % APPLIED_PERIOD_UNROLLS == 0:
                    self._demand()
                return LogAppend(message.number, wire.decode_insert(attachments[0]), attachments[1])
            case wire.Batch() if self._subscribed and self._is_next(message):
                self._has_seen(message.next_number)
                self._next_batch[message.table] += 1
                self._untaken[message.table] += 1
                self.waits_for = ""
                return self._batch(message, attachments)
            case wire.Standing() if self._subscribed and self._is_whole(message):
                self._has_seen(message.next_number)
                self.waits_for = " ".join(filter(None, dict.fromkeys(message.waits_for)))
                self._was_answered()
            case wire.Append() | wire.Batch() | wire.Standing() | wire.Stranger() if self._subscribed:
                # Something is missing, or the server does not know us: subscribe again from where we are.
                self._return_after_loss()
            case wire.Waiting() | wire.Dropped() if not self._subscribed:
                self.waits_for = message.reason.partition(":")[0]  # of a crowd, that it is crowded
                self._patience_seconds = HEARTBEAT_SECONDS
            case wire.Fetched():
                unroll = EncodedUnroll(*attachments) if message.is_held else None
                return LogFetched(message.request, message.number, unroll)
            case wire.Statistics() | wire.Deleted():
                return message
        return None

    def batch_used(self, table: str | None = None) -> None:
        """A received batch (of the only table, if none is named) was used: the server may send another.

        The server hears of it when half of those that it may send ahead were used: it draws them together.
        """
        self._return_after_silence()
        position = self._position(table)
        self._untaken[position] -= 1
        self._unasked[position] += 1
        if self._unasked[position] >= self._prefetch_batches // 2:
            self._demand()

    def update_priorities(self, keys: ArrayLike, priorities: ArrayLike, table: str | None = None) -> None:
        """Sends new priorities [B] of sampled keys [B]; a lost message is not sent again.

        While batches are at hand they wait for the next demand, before which nothing is drawn by them: a message wakes
        the server, which costs it more than its work. They wait for MAX_UPDATE_DELAY_SECONDS at most.

        Raises: ValueError when keys are no whole numbers from 0, when priorities are negative or not finite, or when
          there are not as many of both; KeyError when the table was not named at the start. Nothing is sent then.
        """
        position = self._position(table)
        names, values = checked_update(keys, priorities)
        self._return_after_silence()
        for first in range(0, len(names), wire.MAX_BATCH):
            part = slice(first, first + wire.MAX_BATCH)
            if not self._updates.have_room(position, len(names[part])):
                self.send_updates()
                self._updates.drain()  # where nobody answers, the newest are kept
            self._updates.add(position, names[part], values[part])
        if not any(self._untaken):
            self.send_updates()

    def close(self) -> None:
        """Says goodbye."""
        if self.connection.is_usable:
            self._doubts = 0  # there will be no answer, and a server that knows us takes them
            self.send_updates()
        self.connection.close()

    @property
    def _is_known(self) -> bool:
        """Whether the server knows us, as far as we know."""
        return self._subscribed and not self._doubts

    def _position(self, table: str | None) -> int:
        if table is None:
            return 0
        check_named(table, self._tables)
        return self._tables.index(table)

    def _start(self, message: wire.Subscribed) -> LogStart:
        if not len(message.next_batches) == len(message.granularity) == len(self._tables):
            raise WireError(f"{len(message.next_batches)} tables, {len(self._tables)} were asked for")
        self._log, self._life, self._ring_unrolls = message.log, message.life, message.ring_unrolls
        self._next_number = message.next_number
        self._next_batch = list(message.next_batches)
        self._subscribed, self._unanswered, self._doubts = True, 0, 0
        if not message.continues:
            self._updates.drain()  # their keys are of another log
        self._demand()
        granularity = dict(zip(self._tables, message.granularity, strict=True))
        return LogStart(
            message.log, message.spec, message.ring_unrolls, message.next_number, message.continues, granularity,
            message.ancestors,
        )  # fmt: skip

    def _is_next(self, message: wire.Batch) -> bool:
        """True when neither a batch nor an unroll was lost before this batch, and it was demanded."""
        table = message.table
        is_known = table < len(self._tables) and message.index == self._next_batch[table]
        is_demanded = is_known and self._untaken[table] < self._prefetch_batches
        return is_demanded and (not self._follows_log or message.next_number == self._next_number)

    def _is_whole(self, message: wire.Standing) -> bool:
        """True when nothing was lost on the way here."""
        has_all = not self._follows_log or message.next_number == self._next_number
        return has_all and list(message.next_batches) == self._next_batch

    def _has_seen(self, next_number: int) -> None:
        """Takes note of the numbers that keys name by now, where no unrolls come that would show it."""
        if not self._follows_log:
            self._next_number = next_number

    def _return_after_silence(self) -> None:
        """Asks the server whether it still knows us, where we were silent for so long that it may have forgotten us.

        All that it sent before lies unread in front of its answer, and stays valid. Priorities and demands wait for the
        answer: it would drop those of a stranger.
        """
        self.connection.check_usable()
        if self._subscribed and time.monotonic() - self.connection.last_sent > MAX_SILENCE_SECONDS:
            self._beat()
            self._doubts = self._unanswered

    def _beat(self) -> None:
        self._unanswered += 1
        self.connection.send(wire.Heartbeat())

    def _was_answered(self) -> None:
        """Takes note of a `Standing`; of several heartbeats only the answer to the last one ends a doubt."""
        self._unanswered = max(self._unanswered - 1, 0)
        if self._doubts:
            self._doubts -= 1
            if not self._doubts:
                self._demand()

    def _return_after_loss(self) -> None:
        """Subscribes again, at once unless it did so within the last second: else a server could keep us at it."""
        now = time.monotonic()
        self._subscribed, self.waits_for = False, "replay_connection"
        if now - self._returned_seconds > HEARTBEAT_SECONDS:
            self._returned_seconds = now
            self._subscribe()
        else:
            self._patience_seconds = HEARTBEAT_SECONDS

    def _keep_alive(self) -> None:
        self._return_after_silence()
        if self.connection.is_silent:
            self.waits_for = "replay_connection"
        if not self.connection.should_ask():
            return
        if self._subscribed:
            self._demand()
            self._beat()
        elif time.monotonic() - self._asked_seconds >= self._patience_seconds:
            self._subscribe()

    def _subscribe(self) -> None:
        """Asks for the log from where we are. The answer may come late, behind older messages."""
        self._asked_seconds, self._patience_seconds = time.monotonic(), RESEND_SECONDS
        self._request += 1  # answers to an older subscription are void
        self.connection.send(self._subscription())

    def _subscription(self) -> wire.Subscribe:
        return wire.Subscribe(
            PROTOCOLS[0], self._learner, self._request, self._wants, self._follows_log,
            self._log, self._life, self._ring_unrolls, self._next_number, self._with_probabilities, self._with_unrolls,
            PROTOCOL, self._log_name,
        )  # fmt: skip

    def _batch(self, message: wire.Batch, attachments: Sequence[bytes]) -> LogBatch | None:
        table, size = self._tables[message.table], self._wants[message.table].batch_size
        try:
            sample = message.sample()
            if len(sample.keys) != size:  # memory for batches is made once, for this size
                raise WireError(f"{len(sample.keys)} keys of table {table}, {size} were asked for")
            if self._with_probabilities and len(sample.probabilities) != size:
                raise WireError(f"a batch of table {table} without probabilities, which were asked for")
            return LogBatch(table, sample, tuple(map(EncodedUnroll, attachments[::2], attachments[1::2])))
        except WireError as error:
            logger.warning("a batch is dropped: %s", error)
            self.batch_used(table)
            return None

    def send_updates(self) -> None:
        """Sends the new priorities that wait for the next demand."""
        if not self._is_known:  # the next answer says whether their keys still name the same items
            return
        for message in self._updates.drain():
            self.connection.send(message)

    def _demand(self) -> None:
        if not self._is_known:  # the server counts batches from 0 once it has heard us
            return
        self.send_updates()  # the batches that are demanded are drawn by them
        self._unasked = [0] * len(self._tables)
        batches = (n + self._prefetch_batches - u for n, u in zip(self._next_batch, self._untaken, strict=True))
        self.connection.send(wire.Demand(self._next_number, tuple(max(number, 0) for number in batches)))


class _Updates:
    """New priorities that wait to be sent with others of their table."""

    def __init__(self) -> None:
        self._by_table: dict[int, list[tuple[bytes, bytes]]] = {}
        self._since = 0.0

    @property
    def patience_milliseconds(self) -> int:
        """Milliseconds for which they may still wait; very many when there are none."""
        if not self._by_table:
            return sys.maxsize
        return max(0, math.ceil(1e3 * (self._since + MAX_UPDATE_DELAY_SECONDS - time.monotonic())))

    def have_room(self, table: int, count: int) -> bool:
        """True when so many more keys of a table fit into one message."""
        return sum(len(keys) for keys, _ in self._by_table.get(table, ())) + 8 * count <= 8 * wire.MAX_BATCH

    def add(self, table: int, keys: np.ndarray, priorities: np.ndarray) -> None:
        """Adds priorities [B] float32 of keys [B] int64; their memory may be used again."""
        if not self._by_table:
            self._since = time.monotonic()
        self._by_table.setdefault(table, []).append((keys.tobytes(), priorities.tobytes()))

    def drain(self) -> list[wire.UpdatePriorities]:
        """Returns the messages to be sent, one a table, and forgets them."""
        by_table, self._by_table = self._by_table, {}
        return [
            wire.UpdatePriorities(table, *(b"".join(arrays) for arrays in zip(*updates, strict=True)))
            for table, updates in by_table.items()
        ]
