"""Parameters from the learner to everybody who acts; the newest wins.

A subscriber keeps only the newest message in its socket (CONFLATE), which also conflates what it sends: it can have one
subscription only. So a late subscriber is served by sending the last value once more, to all, at most twice a second.
"""

import logging
import threading
import time

import zmq

from apexrl.errors import WireError
from apexrl.net.keyring import Keyring
from apexrl.net.sockets import bind, connect, make_socket, receive
from apexrl.parameters import Parameters, decode_parameters

logger = logging.getLogger(__name__)

RESEND_SECONDS = 0.5  # between two sendings of the last value for those who came late
REPEAT_SECONDS = 30.0  # without a new value the last one is sent again: a sign of life


class ParameterPublisher:
    """Publishes encoded parameters; whoever makes it runs `run` in a thread, which alone uses the socket."""

    def __init__(self, host: str, port: int, keyring: Keyring | None = None, context: zmq.Context | None = None):
        """Binds the port; with a keyring only actors may subscribe.

        Raises: ConfigError when it cannot be had.
        """
        context = context or zmq.Context.instance()
        self._socket = make_socket(context, zmq.XPUB)
        self._socket.sndhwm = 4
        self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)  # hear of every subscriber, not only of the first
        self.endpoint = bind(self._socket, host, port, keyring, ("actor",))
        self._lock = threading.Lock()
        self._last: bytes | None = None
        self._fresh = False
        self._closed = threading.Event()

    def publish(self, encoded: bytes) -> None:
        """Replaces the last value and sends it to all subscribers soon."""
        with self._lock:
            self._last, self._fresh = encoded, True

    def close(self) -> None:
        """Ends the thread, which closes the socket."""
        self._closed.set()

    def run(self) -> None:
        """Publishes until closed; the body of the thread."""
        has_come = False
        sent = 0.0
        while not self._closed.is_set():
            has_come |= self._somebody_came()
            with self._lock:
                last, fresh, self._fresh = self._last, self._fresh, False
            now = time.monotonic()
            is_due = fresh or (has_come and now >= sent + RESEND_SECONDS) or now >= sent + REPEAT_SECONDS
            if last is not None and is_due:
                self._socket.send(last, zmq.NOBLOCK)
                has_come, sent = False, now
        self._socket.close()

    def _somebody_came(self) -> bool:
        """Waits a moment for subscriptions; returns whether there was one."""
        has_come = False
        timeout = 20
        while (frames := receive(self._socket, timeout)) is not None:
            has_come |= frames[0][:1] == b"\x01"
            timeout = 0
        return has_come


class ParameterSubscriber:
    """Fetches the newest parameters. Belongs to one thread."""

    def __init__(self, endpoint: str, keyring: Keyring | None = None, context: zmq.Context | None = None):
        """Connects and waits for nobody."""
        self.endpoint = endpoint
        context = context or zmq.Context.instance()
        self._socket = make_socket(context, zmq.SUB)
        self._socket.setsockopt(zmq.CONFLATE, 1)
        self._socket.subscribe(b"")
        connect(self._socket, endpoint, keyring, "learner")

    def fetch_encoded(self, timeout_milliseconds: int = 0) -> bytes | None:
        """Returns the newest parameters as they were sent, None when nothing came in time."""
        frames = receive(self._socket, timeout_milliseconds)
        return None if frames is None else frames[0]

    def fetch(self, timeout_milliseconds: int = 0) -> Parameters | None:
        """Returns the newest parameters if they came since the last call, else None; malformed ones are dropped."""
        encoded = self.fetch_encoded(timeout_milliseconds)
        if encoded is None:
            return None
        try:
            return decode_parameters(encoded)
        except WireError as error:
            logger.warning("parameters from %s are dropped: %s", self.endpoint, error)
            return None

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
