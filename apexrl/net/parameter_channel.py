"""Parameters from the learner to everybody who acts; the newest wins.

A message is one frame, a topic and the encoded parameters: one frame, because the subscriber keeps only the newest
message in its socket (CONFLATE), which ZeroMQ does for single frames only. A subscriber that comes late subscribes to a
topic of its own beside the common one, and is sent the last value there, alone.
"""

import logging
import secrets
import threading

import zmq

from apexrl.net.sockets import bind, make_socket
from apexrl.parameters import Parameters, decode_parameters

logger = logging.getLogger(__name__)

_NEWEST = b"newest/"
_LAST = b"last/"
_TOPIC_BYTES = 16


class ParameterPublisher:
    """Publishes encoded parameters; whoever makes it runs `run` in a thread, which alone uses the socket."""

    def __init__(self, endpoint_host: str, port: int, context: zmq.Context | None = None):
        """Binds the port.

        Raises: ConfigError when it cannot be had.
        """
        context = context or zmq.Context.instance()
        self._socket = make_socket(context, zmq.XPUB)
        self._socket.sndhwm = 4
        self.endpoint = bind(self._socket, endpoint_host, port)
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
        while not self._closed.is_set():
            late = self._subscriptions()
            with self._lock:
                last, fresh, self._fresh = self._last, self._fresh, False
            if last is None:
                continue
            for topic in [_NEWEST.ljust(_TOPIC_BYTES, b"-")] * fresh + late:
                self._socket.send(topic + last, zmq.NOBLOCK)
        self._socket.close()

    def _subscriptions(self) -> list[bytes]:
        """Returns the topics of those who came in the last moment; waits a little for the first one."""
        topics = []
        timeout = 20
        while self._socket.poll(timeout):
            event = self._socket.recv()
            if event[:1] == b"\x01" and event[1:].startswith(_LAST) and len(event) == 1 + _TOPIC_BYTES:
                topics.append(event[1:])
            timeout = 0
        if topics and self._last is None:  # nothing to send yet: the common topic will bring the first value
            topics = []
        return topics


class ParameterSubscriber:
    """Fetches the newest parameters. Belongs to one thread."""

    def __init__(self, endpoint: str, context: zmq.Context | None = None):
        self.endpoint = endpoint
        self.params_version = -1
        context = context or zmq.Context.instance()
        self._socket = make_socket(context, zmq.SUB)
        self._socket.setsockopt(zmq.CONFLATE, 1)
        self._socket.subscribe(_NEWEST)
        self._socket.subscribe(_LAST + secrets.token_hex(8).encode()[: _TOPIC_BYTES - len(_LAST)])
        self._socket.connect(endpoint)

    def fetch_encoded(self, timeout_milliseconds: int = 0) -> bytes | None:
        """Returns the newest parameters as they were sent, None when nothing came in time."""
        if not self._socket.poll(timeout_milliseconds):
            return None
        return self._socket.recv(zmq.NOBLOCK)[_TOPIC_BYTES:]

    def fetch(self, timeout_milliseconds: int = 0) -> Parameters | None:
        """Returns the newest parameters if they came since the last call, else None.

        Raises: WireError when they are malformed.
        """
        encoded = self.fetch_encoded(timeout_milliseconds)
        if encoded is None:
            return None
        parameters = decode_parameters(encoded)
        # A restarted learner may be behind what we have: it is right all the same.
        self.params_version = parameters.header.params_version
        return parameters

    def close(self) -> None:
        """Closes the socket."""
        self._socket.close()


def relay(upstream: str, publisher: ParameterPublisher, stop: threading.Event) -> None:
    """Passes parameters on to the workers of a host, so that the host fetches them once. Runs until `stop` is set."""
    subscriber = ParameterSubscriber(upstream)
    while not stop.is_set():
        encoded = subscriber.fetch_encoded(200)
        if encoded is not None:
            publisher.publish(encoded)
    subscriber.close()
