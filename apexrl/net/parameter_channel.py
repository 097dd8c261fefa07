"""Parameters from the learner to everybody who acts; the newest wins.

A subscriber keeps only the newest message in its socket (CONFLATE). It says that it is there once a second, and the
publisher gives each connection that it heard of every value once. Nothing that a peer says takes memory.
"""

import contextlib
import logging
import threading
import time

import zmq

from apexrl.errors import WireError
from apexrl.net.keyring import Keyring
from apexrl.net.sockets import bind, connect, make_socket, receive, send
from apexrl.networks.parameters import Parameters, decode_parameters

logger = logging.getLogger(__name__)

HELLO = b"\x01"
HELLO_SECONDS = 1.0
MAX_HEARD_BYTES = 1024  # a CURVE handshake needs more than 256
MAX_HEARD_AT_ONCE = 1000  # messages, before values are sent again
MAX_SUBSCRIBERS = 16_384  # connections; others have to wait until one of them ends
REPEAT_SECONDS = 30.0  # without a new value the last one is sent again: a sign of life
POLL_MILLISECONDS = 20
WARNING_SECONDS = 10.0


class ParameterPublisher:
    """Publishes encoded parameters; whoever makes it runs `run` in a thread, which alone uses the socket."""

    def __init__(self, host: str, port: int, keyring: Keyring | None = None, context: zmq.Context | None = None):
        """Binds the port; with a keyring only actors may subscribe.

        Raises: ConfigError when it cannot be had.
        """
        context = context or zmq.Context.instance()
        self._socket = make_socket(context, zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # say who is gone, and whose queue is full
        self._socket.maxmsgsize = MAX_HEARD_BYTES
        self._socket.rcvhwm = 4
        self._socket.sndhwm = 1
        self.endpoint = bind(self._socket, host, port, keyring, ("actor",))
        self._last: bytes | None = None
        self._told: dict[bytes, int] = {}  # by connection: the round in which it was sent a value, 0 before the first
        self._is_full = False
        self._closed = threading.Event()

    def publish(self, encoded: bytes) -> None:
        """Replaces the last value and sends it to all subscribers soon."""
        self._last = encoded

    def close(self) -> None:
        """Ends the thread, which closes the socket."""
        self._closed.set()

    def run(self) -> None:
        """Publishes until closed; the body of the thread."""
        number, value, began = 0, None, 0.0  # of the round in which all are sent the value
        while not self._closed.is_set():
            self._hear()
            last, now = self._last, time.monotonic()
            if last is not value or now >= began + REPEAT_SECONDS:
                number, value, began = number + 1, last, now
            if value is not None:
                self._send(number, value)
        self._socket.close()

    def _hear(self) -> None:
        """Waits a moment for subscribers, and takes in who is new."""
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
                "%s has %d subscribers and takes no more: is it open to strangers?", self.endpoint, MAX_SUBSCRIBERS
            )

    def _send(self, number: int, encoded: bytes) -> None:
        """Sends the value of a round to all who do not have it; one who is busy with an older one gets it later."""
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
        """Connects and waits for nobody."""
        self.endpoint = endpoint
        self.num_dropped = 0
        self._warned = -WARNING_SECONDS
        context = context or zmq.Context.instance()
        self._socket = make_socket(context, zmq.DEALER)
        self._socket.setsockopt(zmq.CONFLATE, 1)
        connect(self._socket, endpoint, keyring, "learner")
        self._said = -HELLO_SECONDS
        self._say_hello()

    def fetch_encoded(self, timeout_milliseconds: int = 0) -> bytes | None:
        """Returns the newest parameters as they were sent, None when nothing came in time."""
        self._say_hello()
        frames = receive(self._socket, timeout_milliseconds)
        return None if frames is None else frames[0]

    def _say_hello(self) -> None:
        """Makes the publisher hear of this connection, which may be a new one."""
        now = time.monotonic()
        if now >= self._said + HELLO_SECONDS:
            self._said = now
            with contextlib.suppress(zmq.Again):
                self._socket.send(HELLO, zmq.NOBLOCK)

    def fetch(self, timeout_milliseconds: int = 0) -> Parameters | None:
        """Returns the newest parameters if they came since the last call, else None; malformed ones are dropped."""
        encoded = self.fetch_encoded(timeout_milliseconds)
        if encoded is None:
            return None
        try:
            return decode_parameters(encoded)
        except WireError as error:
            self.drop(error)
            return None

    def drop(self, error: WireError) -> None:
        """Counts parameters that cannot be used, and says so now and then."""
        self.num_dropped += 1
        now = time.monotonic()
        if now >= self._warned + WARNING_SECONDS:
            self._warned = now
            logger.warning("parameters from %s are dropped (%d so far): %s", self.endpoint, self.num_dropped, error)

    def close(self) -> None:
        """Closes the socket."""
        self._socket.close()


def relay(upstream: str, publisher: ParameterPublisher, stop: threading.Event, keyring: Keyring | None) -> None:
    """Passes parameters on to the workers of a host, so that the host fetches them once. Runs until `stop` is set."""
    subscriber = ParameterSubscriber(upstream, keyring)
    while not stop.is_set():
        encoded = subscriber.fetch_encoded(200)
        if encoded is not None:
            publisher.publish(encoded)
    subscriber.close()
