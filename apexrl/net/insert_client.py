"""An actor's side of the replay: inserts unrolls, each stored exactly once. Belongs to one thread."""

import collections
import logging
import time
from collections.abc import Callable

import zmq

from apexrl.net import wire
from apexrl.net.connection import HEARTBEAT_SECONDS, POLL_MILLISECONDS, RESEND_SECONDS, Connection
from apexrl.net.identity import marked
from apexrl.net.keyring import Keyring
from apexrl.types import StreamSpec, UnrollHeader

logger = logging.getLogger(__name__)


class InsertClient:
    """Sends the unrolls of one actor process, each stored exactly once while this process lives.

    The server says up to which number the client may insert; beyond it `insert` waits. The client keeps unacknowledged
    unrolls and resends them after it has lost the server.
    """

    def __init__(
        self,
        endpoint: str,
        name: str,
        spec: StreamSpec,
        num_streams: int,
        keyring: Keyring | None = None,
        context: zmq.Context | None = None,
    ):
        """Connects, without waiting for the server.

        Args:
          name: a name for people to read. `actor` is this name and a mark that no other client has.
        """
        self._connection = Connection(endpoint, keyring, context)
        self.actor = marked(name, self._connection.routing_id)
        self.slots: tuple[int, ...] = ()
        self.ladder_size = 0
        self.waited_seconds: dict[str, float] = collections.defaultdict(float)
        self.bytes_sent = 0
        self._spec = spec
        self._num_streams = num_streams
        self._unacknowledged: collections.OrderedDict[int, tuple[bytes, bytes]] = collections.OrderedDict()
        self._next_sequence = 0
        self._allowed_sequence = 0
        self._next_to_send = 0
        self._welcome = False
        self._welcomed_seconds = -1e9
        self._reason = ""
        self._last_progress = time.monotonic()

    @property
    def may_insert(self) -> bool:
        """True when an insert would not wait."""
        return self._welcome and self._next_sequence < self._allowed_sequence

    @property
    def num_dropped(self) -> int:
        """The number of messages that the server dropped; the log has the reasons."""
        return self._connection.num_dropped

    @property
    def num_unacknowledged(self) -> int:
        """The number of inserts that the server may not have stored."""
        return len(self._unacknowledged)

    def connect(self, timeout_seconds: float, stopped: Callable[[], bool] = lambda: False) -> None:
        """Waits until the server has leased the slots, or until `stopped` is true.

        Raises: PeerError when the server refuses this client, or is silent for `timeout_seconds`.
        """
        self._wait(lambda: self._welcome, timeout_seconds, stopped, "replay_connection")

    def insert(
        self, header: UnrollHeader, block: bytes, timeout_seconds: float, stopped: Callable[[], bool] = lambda: False
    ) -> bool:
        """Waits until the server allows another unroll, then sends this one. Sends nothing when stopped before.

        Returns: whether it was sent. The stream has a gap when it was not and another follows.
        Raises: PeerError when the server is silent for `timeout_seconds`; a server that tells the client to wait is
          not silent. WireError when no server takes the header, for example because a return is not finite.
        """
        self._wait(lambda: self.may_insert, timeout_seconds, stopped)
        if not self.may_insert:
            return False
        message = wire.Insert.of(header, self._next_sequence, self.actor)
        encoded = wire.encode(message)
        wire.decode_insert(encoded)
        self._next_sequence += 1
        if not self._unacknowledged:
            self._last_progress = time.monotonic()
        self._unacknowledged[message.sequence] = (encoded, block)
        self._send_allowed()
        return True

    def poll(self) -> None:
        """Takes the messages that have arrived and keeps the connection alive. Does not wait."""
        while self._receive(0):
            pass
        self._keep_alive()

    def flush(self, timeout_seconds: float) -> bool:
        """Waits until every insert is acknowledged; returns False when the time is up before."""
        deadline, asked = time.monotonic() + timeout_seconds, -1
        while self._unacknowledged and time.monotonic() < deadline:
            if self._welcome and asked != self._next_to_send:  # a server acknowledges the last few only when asked
                asked = self._next_to_send
                self._connection.send(wire.Heartbeat())
            self._receive(POLL_MILLISECONDS)
            self._keep_alive()
        return not self._unacknowledged

    def close(self) -> None:
        """Releases the slots. Call `flush` first, or unacknowledged inserts may be lost."""
        self._connection.close()

    def _wait(
        self, done: Callable[[], bool], timeout_seconds: float, stopped: Callable[[], bool], reason: str = ""
    ) -> None:
        started = said = time.monotonic()
        self.poll()
        while not done() and not stopped():
            now = time.monotonic()
            if now - max(started, self._connection.last_heard) > timeout_seconds:
                raise self._connection.silence(timeout_seconds)
            if now - said > 10:
                said = now
                logger.info("waiting for %s at %s", self._waits_for() or reason, self._connection.endpoint)
            self._receive(POLL_MILLISECONDS)
            self._keep_alive()
            self.waited_seconds[reason or self._waits_for() or "replay"] += time.monotonic() - now

    def _waits_for(self) -> str:
        return "replay_connection" if self._connection.is_silent or not self._welcome else self._reason

    def _receive(self, timeout_milliseconds: int) -> bool:
        received = self._connection.receive(timeout_milliseconds)
        if received is None:
            return False
        match received[0]:
            case wire.Welcome() as message:
                self.slots, self.ladder_size = message.slots, message.ladder_size
                self._allowed_sequence = message.allowed_sequence
                self._reason = message.waits_for
                self._forget(message.stored_sequence)
                if not self._welcome:  # else it answers an older greeting, and nothing was lost
                    self._welcome = True
                    self._welcomed_seconds = time.monotonic()
                    self._next_to_send = next(iter(self._unacknowledged), self._next_sequence)
                self._send_allowed()
            case wire.Acknowledge() as message:
                self.ladder_size = message.ladder_size
                self._allowed_sequence = message.allowed_sequence
                self._reason = message.waits_for
                self._forget(message.stored_sequence)
                if self._welcome:
                    self._connection.need_not_ask()
                    self._send_allowed()
            case wire.Stranger():
                self._welcome = False
                if time.monotonic() - self._welcomed_seconds > HEARTBEAT_SECONDS:  # else at the usual pace
                    self._connection.ask_at_once()
        return True

    def _forget(self, sequence: int) -> None:
        while self._unacknowledged and next(iter(self._unacknowledged)) < sequence:
            self._unacknowledged.popitem(last=False)
            self._last_progress = time.monotonic()

    def _keep_alive(self) -> None:
        if self._unacknowledged and time.monotonic() - self._last_progress > RESEND_SECONDS:
            self._welcome = False  # an insert or its acknowledgement was lost
            self._last_progress = time.monotonic()
        if not self._connection.should_ask():
            return
        if self._welcome:
            self._connection.send(wire.Heartbeat())
            return
        first = next(iter(self._unacknowledged), self._next_sequence)
        self._connection.send(wire.Hello(wire.PROTOCOL, self.actor, self._num_streams, self._spec, first))

    def _send_allowed(self) -> None:
        """Sends the unrolls that were not sent since the last welcome, as far as the server allows."""
        end = min(self._next_sequence, self._allowed_sequence)
        first = next(iter(self._unacknowledged), self._next_sequence)
        for sequence in range(max(self._next_to_send, first), end):
            encoded, block = self._unacknowledged[sequence]
            self.bytes_sent += len(block)
            self._connection.send_frames(encoded, block)
        self._next_to_send = max(self._next_to_send, end)
