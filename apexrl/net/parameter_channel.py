"""The parameter channel: from the learner to all actors and evaluators; the newest value wins.

A subscriber keeps only the newest message in its socket (CONFLATE). ZeroMQ may lose a message there that comes in
while the subscriber looks; the next value makes up for it, or the last one, which is sent again when no other comes.
Once a second a subscriber says that it is there. The publisher sends each value once to each connection that it has
heard of. It stores nothing of a peer's messages. With many subscribers it sends fewer values, so that the learner's
network has room for the rest.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import zmq

from apexrl.errors import WireError
from apexrl.lines import Repeats
from apexrl.net.keyring import Keyring
from apexrl.net.listener import Listener
from apexrl.net.sockets import connect_watched, make_socket, receive, send

if TYPE_CHECKING:
    from apexrl.networks.parameters import Parameters

logger = logging.getLogger(__name__)

HELLO = b"\x01"
HELLO_SECONDS = 1.0
MAX_HEARD_BYTES = 1024  # a CURVE handshake needs more than 256
MAX_HEARD_AT_ONCE = 1000  # messages read in a row before values are sent again
MAX_SUBSCRIBERS = 8_192  # connections; further ones wait until one of these ends
REPEAT_SECONDS = 30.0  # after so long without a new value, the last one is sent again as a sign of life
POLL_MILLISECONDS = 20
WARNING_SECONDS = 10.0


class ParameterPublisher:
    """Publishes encoded parameters. Its owner runs `run` in a thread, and only that thread uses the socket."""

    def __init__(
        self,
        host: str,
        port: int,
        keyring: Keyring | None = None,
        context: zmq.Context | None = None,
        bytes_per_second: float = 0.0,
    ):
        """Binds the port; with a keyring only actors may subscribe.

        Args:
          bytes_per_second: the most that all subscribers together are sent, on average; 0: no bound.
        Raises: ConfigError when the port cannot be bound.
        """
        context = context or zmq.Context.instance()
        self._socket = make_socket(context, zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a send raises when the peer is gone or its queue is full
        self._socket.rcvhwm = 4
        self._socket.sndhwm = 1
        self._listener = Listener(self._socket, host, port, MAX_HEARD_BYTES, keyring, ("actor",))
        self.endpoint = self._listener.endpoint
        self._last: Callable[[], bytes] | None = None
        self._told: dict[bytes, int] = {}  # the round of the last value sent to each connection, 0 before the first
        self._is_full = False
        self._bytes_per_second = bytes_per_second
        self._closed = threading.Event()

    def publish(self, encoded: bytes) -> None:
        """Replaces the value; the thread sends it to all subscribers soon."""
        self.publish_later(lambda: encoded)

    def publish_later(self, encode: Callable[[], bytes]) -> None:
        """Replaces the value by one that the thread makes itself, unless the next one comes before."""
        self._last = encode

    def close(self) -> None:
        """Ends the thread, which closes the socket."""
        self._closed.set()

    def run(self) -> None:
        """Sends values to subscribers until `close` is called. This is the body of the thread."""
        number, began = 0, 0.0  # the current round, and its start
        encode: Callable[[], bytes] | None = None  # makes its value
        value = b""
        with contextlib.closing(self._listener):
            while not self._closed.is_set():
                self._hear()
                last, now = self._last, time.monotonic()
                if last is not None and last is not encode and now >= began + self.round_seconds(value):
                    number, encode, began, value = number + 1, last, now, last()
                elif now >= began + max(REPEAT_SECONDS, self.round_seconds(value)):
                    number, began = number + 1, now
                if encode is not None:
                    self._send(number, value)

    def round_seconds(self, value: bytes) -> float:
        """Returns the least time from sending a value to all subscribers to sending the next one."""
        if not self._bytes_per_second:
            return 0.0
        return len(value) * len(self._told) / self._bytes_per_second

    def _hear(self) -> None:
        """Waits a moment for messages of subscribers, and adds the new ones."""
        timeout = POLL_MILLISECONDS
        for _ in range(MAX_HEARD_AT_ONCE):
            frames = receive(self._socket, timeout)
            if frames is None:
                return
            if frames[1:] == [HELLO]:
                self._take_in(frames[0])
            timeout = 0

    def _take_in(self, peer: bytes) -> None:
        was_full, self._is_full = self._is_full, len(self._told) >= MAX_SUBSCRIBERS
        if not self._is_full:
            self._told.setdefault(peer, 0)
        elif not was_full and peer not in self._told:
            logger.warning(
                "%s has %d subscribers and takes no more: is it open to strangers?", self.endpoint, len(self._told)
            )

    def _send(self, number: int, encoded: bytes) -> None:
        """Sends the value of a round to all who lack it. A subscriber with a full queue gets it later."""
        for peer in [peer for peer, told in self._told.items() if told != number]:
            try:
                send(self._socket, [peer, encoded])
                self._told[peer] = number
            except zmq.Again:
                pass
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                del self._told[peer]


class ParameterSubscriber:
    """Fetches the newest parameters. Belongs to one thread."""

    def __init__(self, endpoint: str, keyring: Keyring | None = None, context: zmq.Context | None = None):
        """Connects, without waiting for the publisher."""
        self.endpoint = endpoint
        self.num_dropped = 0
        self._repeats = Repeats(WARNING_SECONDS)
        context = context or zmq.Context.instance()
        self._socket = make_socket(context, zmq.DEALER)
        self._socket.setsockopt(zmq.CONFLATE, 1)
        self._monitor = connect_watched(self._socket, endpoint, keyring, "learner")
        self._said = -HELLO_SECONDS
        self._say_hello()

    def fetch_encoded(self, timeout_milliseconds: int = 0) -> bytes | None:
        """Returns the newest parameters, still encoded, None when none come in time."""
        self._say_hello()
        frames = receive(self._socket, timeout_milliseconds)
        return None if frames is None else frames[0]

    def _say_hello(self) -> None:
        """Announces this connection, which may be a new one, to the publisher."""
        now = time.monotonic()
        if now >= self._said + HELLO_SECONDS:
            self._said = now
            if self._monitor is not None:
                self._monitor.fault()
            with contextlib.suppress(zmq.Again):
                self._socket.send(HELLO, zmq.NOBLOCK)

    def fetch(self, timeout_milliseconds: int = 0) -> "Parameters | None":
        """Returns the newest parameters if any came since the last call, else None. Malformed ones are dropped."""
        from apexrl.networks.parameters import decode_parameters  # noqa: PLC0415 - a relay loads no torch

        encoded = self.fetch_encoded(timeout_milliseconds)
        if encoded is None:
            return None
        try:
            return decode_parameters(encoded)
        except WireError as error:
            self.drop(error)
            return None

    def drop(self, error: WireError) -> None:
        """Counts unusable parameters, and logs a warning at most every WARNING_SECONDS."""
        self.num_dropped += 1
        if self._repeats.let_through():
            logger.warning("parameters from %s are dropped (%d so far): %s", self.endpoint, self.num_dropped, error)

    def close(self) -> None:
        """Closes the socket."""
        if self._monitor is not None:
            self._monitor.close()
        self._socket.close()


def relay(upstream: str, publisher: ParameterPublisher, stop: threading.Event, keyring: Keyring | None) -> None:
    """Forwards parameters to the workers of a host until `stop` is set, so that the host fetches them once."""
    subscriber = ParameterSubscriber(upstream, keyring)
    while not stop.is_set():
        encoded = subscriber.fetch_encoded(200)
        if encoded is not None:
            publisher.publish(encoded)
    subscriber.close()
