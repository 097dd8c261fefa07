"""A socket that listens, within bounds: strangers take up neither the memory nor the file descriptors of its process.

Three bounds hold before a peer has shown a key: the bytes of a frame, the seconds of a handshake (`sockets`), and the
number of connections. libzmq has no bound for the last one, so a thread counts them and ends those beyond it.
"""

import contextlib
import logging
import resource
import socket as tcp
import threading
import time
from collections.abc import Iterator

import zmq
from zmq.utils.monitor import recv_monitor_message

from apexrl.errors import ConfigError
from apexrl.lines import Repeats
from apexrl.net.keyring import Keyring
from apexrl.net.sockets import bind, make_socket

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 8_192  # of a port
MAX_BEGUN_BYTES = 4 * 2**30  # of the frames that all connections of a port may have begun to send, together
RESERVED_FILES = 256  # descriptors of a process that its ports leave to everything else
PORTS = 2  # of a process, which share the other descriptors out
REBIND_SECONDS = 5.0
SAID_SECONDS = 10.0  # between two warnings
CLOSE_SECONDS = 10.0  # for a thread that has an event to read
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_MONITOR_STOPPED


class Listener:
    """Binds a socket, and ends connections beyond the bound. It belongs to the socket's thread."""

    def __init__(
        self,
        socket: zmq.Socket,
        host: str,
        port: int,
        max_frame_bytes: int,
        keyring: Keyring | None = None,
        clients: tuple[str, ...] = (),
    ):
        """Binds to host:port, as `bind` does.

        Raises: ConfigError when the address cannot be bound; the socket is closed then.
        """
        self._socket = socket
        self._max_frame_bytes = socket.maxmsgsize = max_frame_bytes
        self._max_connections = most_connections(max_frame_bytes)
        self._num_ended, self._repeats = 0, Repeats(SAID_SECONDS)
        self._held: set[int] = set()  # descriptors of the connections
        monitor = _monitor(socket)
        try:
            self.endpoint = bind(socket, host, port, keyring, clients)
        except ConfigError:
            monitor.close()
            raise
        self._port = int(self.endpoint.rsplit(":", 1)[1])
        if self._max_connections < min(MAX_CONNECTIONS, MAX_BEGUN_BYTES // max_frame_bytes):
            files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            logger.warning(
                "%s takes %d connections at most, because this process may open %d files: for more, raise the hard "
                "limit (ulimit -Hn, LimitNOFILE)", self.endpoint, self._max_connections, files
            )  # fmt: skip
        name = f"connections {self._port}"
        self._watching = threading.Thread(target=self._watch, args=(monitor,), name=name, daemon=True)
        self._watching.start()

    def close(self, linger_ms: int | None = None) -> None:
        """Closes the socket, and waits for the end of the thread: it may not meet the end of the interpreter."""
        if not self._socket.closed:
            self._socket.monitor(None, 0)
            self._socket.close(linger_ms)
        self._watching.join(CLOSE_SECONDS)

    def take_frames(self, max_frame_bytes: int) -> None:
        """Takes frames of so many bytes from now on. Where it did not, all connections end, and their peers come back.

        Raises: ConfigError when another process has taken the port meanwhile.
        """
        if max_frame_bytes <= self._max_frame_bytes:
            return
        self._socket.unbind(self.endpoint)
        self._max_frame_bytes = self._socket.maxmsgsize = max_frame_bytes
        self._max_connections = most_connections(max_frame_bytes)
        deadline = time.monotonic() + REBIND_SECONDS
        while True:
            try:
                self._socket.bind(self.endpoint)
                return
            except zmq.ZMQError as error:  # libzmq's thread has not let go of it yet
                if time.monotonic() > deadline:
                    fault = f"cannot listen on {self.endpoint} again ({error}): stop what listens there"
                    raise ConfigError(fault) from error
                time.sleep(0.01)

    def _watch(self, monitor: zmq.Socket) -> None:
        """Counts connections until the socket is closed. This is the body of the thread."""
        with contextlib.closing(monitor), contextlib.suppress(zmq.ContextTerminated):
            while (event := recv_monitor_message(monitor))["event"] != zmq.EVENT_MONITOR_STOPPED:
                descriptor = int(event["value"])
                if event["event"] == zmq.EVENT_ACCEPTED:
                    self._admit(descriptor)
                elif event["event"] == zmq.EVENT_DISCONNECTED:
                    self._held.discard(descriptor)
                else:  # the port was closed, and all its connections with it
                    self._held.clear()

    def _admit(self, descriptor: int) -> None:
        """Counts a new connection, and ends it when there are too many."""
        self._held.add(descriptor)
        if len(self._held) <= self._max_connections:
            return
        self._num_ended += 1
        if self._repeats.let_through():
            self._held = {held for held in self._held if self._is_ours(held)}  # should an end have gone untold
            logger.warning(
                "%s has %d connections and takes no more (%d were ended so far): is it open to strangers, "
                "or are unrolls large?",
                self.endpoint, self._max_connections, self._num_ended,
            )  # fmt: skip
        if self._is_ours(descriptor):
            with contextlib.suppress(OSError), _borrowed(descriptor) as connection:
                connection.shutdown(tcp.SHUT_RDWR)  # libzmq notices as if the peer had left

    def _is_ours(self, descriptor: int) -> bool:
        """Returns whether a descriptor is a connection of this port: libzmq may have closed it meanwhile."""
        with contextlib.suppress(OSError), _borrowed(descriptor) as connection:
            address = connection.getsockname()  # no pair where the descriptor is another kind of socket by now
            return isinstance(address, tuple) and bool(address[1] == self._port)
        return False


def most_connections(max_frame_bytes: int) -> int:
    """Returns how many connections a port takes: so many as memory and this process's file descriptors allow."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    by_files = MAX_CONNECTIONS if files == resource.RLIM_INFINITY else max((files - RESERVED_FILES) // PORTS, 1)
    return min(MAX_CONNECTIONS, MAX_BEGUN_BYTES // max_frame_bytes, by_files)


def _monitor(socket: zmq.Socket) -> zmq.Socket:
    """Returns the socket that tells the connections of a socket. It has no bound, so libzmq's thread never waits."""
    endpoint = f"inproc://connections-{socket.underlying}"
    socket.monitor(endpoint, _EVENTS)
    monitor = make_socket(socket.context, zmq.PAIR)
    monitor.rcvhwm = 0
    monitor.connect(endpoint)
    return monitor


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Iterator[tcp.socket]:
    """Yields a socket around a descriptor of libzmq's, and leaves it open.

    Raises: OSError when the descriptor is no socket.
    """
    connection = tcp.socket(fileno=descriptor)
    try:
        yield connection
    finally:
        connection.detach()
