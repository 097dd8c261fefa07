"""Clients of the replay server: `InsertClient` of an actor, `LogClient` of a learner. Each belongs to one thread.

Both introduce themselves again whenever the server does not know them or has been silent, so a server or a link may
come back at any time. Every wait has a deadline and keeps a count of what it waited for.
"""

import collections
import dataclasses
import logging
import time
from collections.abc import Callable

import numpy as np
import zmq

from apexrl.errors import PeerError, WireError
from apexrl.net import wire
from apexrl.net.sockets import make_socket
from apexrl.types import Sample, StreamSpec, UnrollHeader

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 1.0
RESEND_SECONDS = 5.0  # without a sign of life this long, introduce ourselves again
POLL_MILLISECONDS = 100
APPLIED_PERIOD_UNROLLS = 64  # how often a learner that catches up says how far it is


class _Connection:
    """A DEALER socket to the server, and when it was last heard."""

    def __init__(self, endpoint: str, name: str, context: zmq.Context | None):
        self.endpoint = endpoint
        self.socket = make_socket(context or zmq.Context.instance(), zmq.DEALER, name.encode())
        self.socket.sndhwm = 0  # what is on the way is bounded by acknowledgements and demand
        self.socket.rcvhwm = 0
        self.socket.connect(endpoint)
        self.last_heard = time.monotonic()
        self.last_asked = -1e9

    def send(self, message: wire.ToReplay, *attachments: bytes) -> None:
        """Sends one message; never blocks."""
        self.socket.send_multipart((wire.encode(message), *attachments), zmq.NOBLOCK, copy=not attachments)

    def receive(self, timeout_milliseconds: int) -> tuple[wire.FromReplay, list[bytes]] | None:
        """Returns the next message and its attachments, or None when there is none in time, or it is malformed.

        Raises: PeerError when the server refuses us.
        """
        if not self.socket.poll(timeout_milliseconds):
            return None
        frames = self.socket.recv_multipart(zmq.NOBLOCK)
        try:
            message = wire.decode_from_replay(frames)
        except WireError as error:
            logger.warning("the replay server at %s sent something malformed: %s", self.endpoint, error)
            return None
        self.last_heard = time.monotonic()
        if isinstance(message, wire.Refused):
            raise PeerError(f"the replay server at {self.endpoint} refuses us: {message.reason}")
        return message, frames[1:]

    def close(self) -> None:
        """Says goodbye and closes the socket."""
        self.send(wire.Goodbye())
        self.socket.close(linger=500)


class InsertClient:
    """Sends the unrolls of one actor process, each stored exactly once while this process lives.

    The server says how far the client may go on; beyond that `insert` waits. What is not acknowledged is kept, and sent
    again after the server was lost.
    """

    def __init__(
        self, endpoint: str, actor: str, spec: StreamSpec, num_streams: int, context: zmq.Context | None = None
    ):
        self.slots: tuple[int, ...] = ()
        self.ladder_size = 0
        self.waited_seconds: dict[str, float] = collections.defaultdict(float)
        self.bytes_sent = 0
        self._actor = actor
        self._spec = spec
        self._num_streams = num_streams
        self._connection = _Connection(endpoint, actor, context)
        self._unacknowledged: collections.OrderedDict[int, tuple[wire.Insert, bytes]] = collections.OrderedDict()
        self._next_sequence = 0
        self._allowed_sequence = 0
        self._welcome = False
        self._reason = ""
        self._last_progress = time.monotonic()

    @property
    def is_welcome(self) -> bool:
        """True when the server knows us and has leased our slots."""
        return self._welcome

    @property
    def num_unacknowledged(self) -> int:
        """Inserts that the server may not have stored."""
        return len(self._unacknowledged)

    def connect(self, timeout_seconds: float, stopped: Callable[[], bool] = lambda: False) -> None:
        """Waits for the lease of our slots.

        Raises: PeerError when the server refuses us or is silent for so long.
        """
        self._wait(lambda: self._welcome, timeout_seconds, stopped, "replay_connection")

    def insert(
        self, header: UnrollHeader, block: bytes, timeout_seconds: float, stopped: Callable[[], bool] = lambda: False
    ) -> None:
        """Sends an unroll; first waits until the server allows it. Does not send it when stopped before.

        Raises: PeerError when the server is silent for so long; one that tells us to wait may do so.
        """
        self._wait(self._may_insert, timeout_seconds, stopped)
        if not self._may_insert():
            return
        message = wire.Insert(
            self._next_sequence,
            self._actor,
            header.stream,
            header.first_step,
            header.params_version,
            header.epsilon,
            header.priorities.astype(np.float32).tobytes(),
            header.episodes,
        )
        self._next_sequence += 1
        if not self._unacknowledged:
            self._last_progress = time.monotonic()
        self._unacknowledged[message.sequence] = (message, block)
        self._send_insert(message, block)

    def _may_insert(self) -> bool:
        return self._welcome and self._next_sequence < self._allowed_sequence

    def poll(self) -> None:
        """Takes what the server has said, and keeps the connection alive. Does not wait."""
        while self._receive(0):
            pass
        self._keep_alive()

    def flush(self, timeout_seconds: float) -> bool:
        """Waits until every insert is acknowledged; False when the time is up."""
        deadline = time.monotonic() + timeout_seconds
        while self._unacknowledged and time.monotonic() < deadline:
            self._receive(POLL_MILLISECONDS)
            self._keep_alive()
        return not self._unacknowledged

    def close(self) -> None:
        """Gives the slots back. Call `flush` before, or open inserts may be lost."""
        self._connection.close()

    def _wait(
        self, done: Callable[[], bool], timeout_seconds: float, stopped: Callable[[], bool], reason: str = ""
    ) -> None:
        started = said = time.monotonic()
        self.poll()
        while not done() and not stopped():
            now = time.monotonic()
            if now - max(started, self._connection.last_heard) > timeout_seconds:
                raise PeerError(
                    f"the replay server at {self._connection.endpoint} was silent for {timeout_seconds:.0f} s: "
                    "is it running, and are host and port right?"
                )
            if now - said > 10:
                said = now
                logger.info("waiting for %s at %s", self._waits_for() or reason, self._connection.endpoint)
            self._receive(POLL_MILLISECONDS)
            self._keep_alive()
            self.waited_seconds[reason or self._waits_for() or "replay"] += time.monotonic() - now

    def _waits_for(self) -> str:
        silent = time.monotonic() - self._connection.last_heard > RESEND_SECONDS
        return "replay_connection" if silent or not self._welcome else self._reason

    def _receive(self, timeout_milliseconds: int) -> bool:
        received = self._connection.receive(timeout_milliseconds)
        if received is None:
            return False
        match received[0]:
            case wire.Welcome() as message:
                self.slots, self.ladder_size = message.slots, message.ladder_size
                self._allowed_sequence = message.allowed_sequence
                self._welcome = True
                self._forget(message.stored_sequence)
                for insert, block in self._unacknowledged.values():
                    self._send_insert(insert, block)
            case wire.Acknowledge() as message:
                self.ladder_size = message.ladder_size
                self._allowed_sequence = message.allowed_sequence
                self._reason = message.waits_for
                self._forget(message.stored_sequence)
            case wire.Stranger():
                self._welcome = False
                self._connection.last_asked = -1e9
        return True

    def _forget(self, sequence: int) -> None:
        while self._unacknowledged and next(iter(self._unacknowledged)) < sequence:
            self._unacknowledged.popitem(last=False)
            self._last_progress = time.monotonic()

    def _keep_alive(self) -> None:
        now = time.monotonic()
        if self._unacknowledged and now - self._last_progress > RESEND_SECONDS:
            self._welcome = False  # an insert or its acknowledgement was lost
            self._last_progress = now
        if now - self._connection.last_asked < HEARTBEAT_SECONDS:
            return
        self._connection.last_asked = now
        if self._welcome:
            self._connection.send(wire.Heartbeat())
            return
        first = next(iter(self._unacknowledged), self._next_sequence)
        self._connection.send(wire.Hello(wire.PROTOCOL, self._actor, self._num_streams, self._spec, first))

    def _send_insert(self, message: wire.Insert, block: bytes) -> None:
        self.bytes_sent += len(block)
        self._connection.send(message, block)


@dataclasses.dataclass(frozen=True)
class LogStart:
    """The log (re)starts here: hold unrolls of `spec` in a ring of `ring_unrolls`, from `next_number` on."""

    server: str
    spec: StreamSpec
    ring_unrolls: int
    next_number: int
    is_same_log: bool  # False: what was held before belongs to another life of the server


@dataclasses.dataclass(frozen=True)
class LogAppend:
    """The next unroll of the log."""

    number: int
    insert: wire.Insert
    block: bytes


class LogClient:
    """A learner's side of the log: unrolls in order, batches that name them, priorities back."""

    def __init__(
        self, endpoint: str, learner: str, batch_size: int, prefetch_batches: int, context: zmq.Context | None = None
    ):
        self.waits_for = "replay_connection"
        self._connection = _Connection(endpoint, learner, context)
        self._learner = learner
        self._batch_size = batch_size
        self._prefetch_batches = prefetch_batches
        self._server = ""
        self._next_number = 0
        self._request = 0
        self._subscribed = False
        self._next_batch = 0  # index of the batch to come
        self._untaken = 0  # batches received and not yet used

    def poll(self, timeout_milliseconds: int) -> LogStart | LogAppend | Sample | None:
        """Returns the next event of the log in order, or None when there is none in time.

        Raises: PeerError when the server refuses us.
        """
        self._keep_alive()
        received = self._connection.receive(timeout_milliseconds)
        if received is None:
            return None
        message, attachments = received
        match message:
            case wire.Subscribed() if message.request == self._request:
                is_same = message.server == self._server
                start = LogStart(message.server, message.spec, message.ring_unrolls, message.next_number, is_same)
                self._server, self._next_number = message.server, message.next_number
                self._next_batch = message.next_batch
                self._subscribed = True
                self._demand()
                return start
            case wire.Append() if self._subscribed and message.number == self._next_number:
                self._next_number += 1
                if self._next_number % APPLIED_PERIOD_UNROLLS == 0:
                    self._demand()
                return LogAppend(message.number, wire.decode_insert(attachments[0]), attachments[1])
            case wire.Batch() if self._subscribed and message.index == self._next_batch:
                self._next_batch += 1
                self._untaken += 1
                self.waits_for = ""
                return self._sample(message)
            case wire.Standing() if (message.next_number, message.next_batch) == (self._next_number, self._next_batch):
                self.waits_for = message.waits_for
            case wire.Append() | wire.Batch() | wire.Standing() | wire.Stranger() if self._subscribed:
                # Something is missing, or the server does not know us: subscribe again from where we are.
                self._subscribed = False
                self.waits_for = "replay_connection"
                self._connection.last_asked = -1e9
            case wire.Waiting():
                self.waits_for = message.reason
        return None

    def take(self) -> None:
        """A received batch was used: the server may send another."""
        self._untaken -= 1
        self._demand()

    def update_priorities(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """Sends new priorities [B] of sampled keys [B]; a lost message is not sent again."""
        if self._subscribed:
            message = wire.UpdatePriorities(keys.astype(np.int64).tobytes(), priorities.astype(np.float32).tobytes())
            self._connection.send(message)

    def close(self) -> None:
        """Says goodbye."""
        self._connection.close()

    def _keep_alive(self) -> None:
        now = time.monotonic()
        if now - self._connection.last_heard > RESEND_SECONDS:
            self.waits_for = "replay_connection"
        if now - self._connection.last_asked < HEARTBEAT_SECONDS:
            return
        self._connection.last_asked = now
        if self._subscribed:
            self._demand()
            self._connection.send(wire.Heartbeat())
        else:
            self._request += 1  # what still comes of an older subscription is not for us
            message = wire.Subscribe(
                wire.PROTOCOL, self._learner, self._request, self._server, self._next_number, self._batch_size
            )
            self._connection.send(message)

    def _sample(self, message: wire.Batch) -> Sample | None:
        try:
            return message.sample()
        except WireError as error:
            logger.warning("a batch is dropped: %s", error)
            self.take()
            return None

    def _demand(self) -> None:
        self._connection.send(wire.Demand(self._next_number, self._next_batch + self._prefetch_batches - self._untaken))
