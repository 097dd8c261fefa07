"""The sockets of all roles: messages are bounded, nothing lingers, dead links are noticed, keys are checked."""

import contextlib
import errno
import logging
import time
from collections.abc import Iterator, Sequence

import zmq
from zmq.utils.monitor import recv_monitor_message

from apexrl.errors import ConfigError
from apexrl.hosts import at_port, is_host, is_ipv6, is_loopback
from apexrl.net.keyring import Keyring
from apexrl.net.wire import MAX_MESSAGE_BYTES

logger = logging.getLogger(__name__)

COPIED_BYTES = 65_536  # a frame below this is copied into the message
_SEND, _SEND_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)  # pyzmq's enums are slow to combine
HEARTBEAT_SECONDS = 5
DEAD_LINK_SECONDS = 20
UNREAD_SECONDS = 30
HANDSHAKE_SECONDS = 10.0  # after which a connection ends that has said nothing, or shown no key
HANDSHAKE_FAULTS = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
RECONNECT_SECONDS = 5.0  # between two connections after a handshake that failed
LARGEST_PORT = 65_535
CONNECT_SECONDS = 5  # then the name is asked again: Linux would try a lost address for two minutes


def make_socket(context: zmq.Context, kind: int, identity: bytes | None = None) -> zmq.Socket:
    """Returns a socket with the options that all roles share. Only one thread may use it.

    Raises: ConfigError when the process has no file descriptor left.
    """
    try:
        socket = context.socket(kind)
    except zmq.ZMQError as error:
        raise ConfigError(f"no socket can be made ({error}): raise the number of open files (ulimit -n)") from error
    socket.linger = 0
    socket.maxmsgsize = MAX_MESSAGE_BYTES
    socket.handshake_ivl = round(1000 * HANDSHAKE_SECONDS)
    socket.reconnect_ivl = 100
    socket.reconnect_ivl_max = 2000
    if identity is not None:
        socket.setsockopt(zmq.ROUTING_ID, identity)
    if kind == zmq.ROUTER:
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    return socket


def bind(
    socket: zmq.Socket, host: str, port: int, keyring: Keyring | None = None, clients: tuple[str, ...] = ()
) -> str:
    """Binds to host:port (port 0: any free one) and returns the endpoint.

    TCP notices dead links, and so do the ZMTP heartbeats of the sockets that connect. It also cuts off a peer that has
    read nothing for UNREAD_SECONDS while something waits for it; ours connect again. A socket that binds sends none.
    libzmq 4.3.5 aborts the process when it has to send one to a peer that died while the queue from it was full.

    Args:
      keyring: with it only owners of the keys of the roles in `clients` may connect.
    Raises: ConfigError when the address cannot be bound; the socket is closed then.
    """
    with _closed_on_error(socket):
        if not (isinstance(port, int) and 0 <= port <= LARGEST_PORT):  # libzmq takes others for some of these
            raise ConfigError(f"port {port}: give a whole number up to {LARGEST_PORT}, or 0 for any that is free")
        if keyring is not None:
            keyring.guard(socket, clients)
    if keyring is None and not is_loopback(host):
        logger.warning("%s:%d is open to everybody who can reach it, and not encrypted: give --keys", host, port)
    socket.tcp_keepalive = 1
    socket.tcp_keepalive_idle = socket.tcp_keepalive_intvl = HEARTBEAT_SECONDS
    socket.tcp_keepalive_cnt = DEAD_LINK_SECONDS // HEARTBEAT_SECONDS
    socket.setsockopt(zmq.TCP_MAXRT, UNREAD_SECONDS * 1000)
    socket.ipv6 = is_ipv6(host)
    try:
        socket.bind(address(host, port or "*"))
    except zmq.ZMQError as error:
        socket.close()
        cure = "choose another port or stop what listens there"
        if error.errno in (errno.ENODEV, errno.EADDRNOTAVAIL):
            cure = "give --bind-host an address of this host"
        raise ConfigError(f"cannot listen on {host}:{port} ({error}): {cure}") from error
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return endpoint.decode().rstrip("\0")


def connect(socket: zmq.Socket, endpoint: str, keyring: Keyring | None = None, server: str = "") -> None:
    """Connects to an endpoint; with a keyring, only to the owner of the server role's key.

    Raises: ConfigError when a key is missing or the endpoint is none; the socket is closed then.
    """
    with _closed_on_error(socket):
        host = _host_of(endpoint)
        if keyring is not None:
            keyring.introduce(socket, server)
    # With the option, libzmq would try a name that has an IPv6 address by that one alone.
    socket.ipv6 = is_ipv6(host)
    socket.connect_timeout = CONNECT_SECONDS * 1000
    socket.heartbeat_ivl = HEARTBEAT_SECONDS * 1000
    socket.heartbeat_timeout = socket.heartbeat_ttl = DEAD_LINK_SECONDS * 1000
    socket.connect(endpoint)


@contextlib.contextmanager
def _closed_on_error(socket: zmq.Socket) -> Iterator[None]:
    try:
        yield
    except ConfigError:
        socket.close()
        raise


def receive(socket: zmq.Socket, timeout_milliseconds: int = 0) -> list[bytes] | None:
    """Returns the frames of the next message, None when none comes in time."""
    for attempt in range(2):
        try:
            return socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            # A message that poll announced may be gone when we read it, because its connection was closed.
            if attempt or timeout_milliseconds <= 0 or not socket.poll(timeout_milliseconds):
                return None
    return None


def send(socket: zmq.Socket, frames: Sequence[bytes]) -> None:
    """Sends one message without waiting, in half the time of pyzmq's `send_multipart`.

    Raises: zmq.Again when the queue is full.
    """
    for frame in frames[:-1]:
        socket.send(frame, _SEND_MORE, copy=len(frame) < COPIED_BYTES)
    socket.send(frames[-1], _SEND, copy=len(frames[-1]) < COPIED_BYTES)


class HandshakeMonitor:
    """Notices that the handshake with a server fails, which the client's socket itself never reports.

    It connects the socket, and again after a failure: libzmq does not try again where a key is refused, and the server
    may know it later, or have another one itself.
    """

    def __init__(self, socket: zmq.Socket, endpoint: str, keyring: Keyring, server: str):
        """Connects to the owner of the server role's key.

        Raises: ConfigError when a key is missing or the endpoint is none; the socket is closed then.
        """
        # Before it connects: a server that refuses our key says so once, and perhaps at once.
        self._monitor = socket.get_monitor_socket(HANDSHAKE_FAULTS)
        self._monitor.linger = 0
        self._socket, self._endpoint, self._keyring, self._server = socket, endpoint, keyring, server
        self._has_failed = False
        self._connect_again_at = -1e9
        try:
            connect(socket, endpoint, keyring, server)
        except ConfigError:
            self._monitor.close()
            raise

    def fault(self) -> str:
        """Returns the handshake's failure since the last call, or an empty string. Connects again when that is due."""
        found = ""
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                found = "it does not accept our key: is our public key in its --keys directory?"
            else:
                found = "no encrypted connection: do both sides have the same --keys, and we its public key?"
        self._has_failed |= bool(found)
        now = time.monotonic()
        if self._has_failed and now >= self._connect_again_at:
            self._has_failed, self._connect_again_at = False, now + RECONNECT_SECONDS
            self._connect_again()
        return found

    def close(self) -> None:
        """Ends the watch. Call it before the socket is closed."""
        self._socket.disable_monitor()
        self._monitor.close()

    def _connect_again(self) -> None:
        """Connects with the server's key as it is now. Messages that wait in the socket are lost."""
        with contextlib.suppress(zmq.ZMQError):  # libzmq has ended the connection itself
            self._socket.disconnect(self._endpoint)
        with contextlib.suppress(ConfigError):  # the key that we know stays
            self._keyring.introduce(self._socket, self._server)
        self._socket.connect(self._endpoint)


def connect_watched(socket: zmq.Socket, endpoint: str, keyring: Keyring | None, server: str) -> HandshakeMonitor | None:
    """Connects as `connect` does; where there are keys, returns the watch of the handshakes.

    Raises: ConfigError when a key is missing or the endpoint is none; the socket is closed then.
    """
    if keyring is not None:
        return HandshakeMonitor(socket, endpoint, keyring, server)
    connect(socket, endpoint)
    return None


def address(host: str, port: int | str) -> str:
    """Returns the endpoint of a host's port."""
    return f"tcp://{at_port(host, port)}"


def _host_of(endpoint: str) -> str:
    """Returns the host of an endpoint.

    Raises: ConfigError when it is none as `address` makes them.
    """
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    is_port = port.isascii() and port.isdecimal() and 0 < int(port) < 65536
    if not is_port or not is_host(host) or endpoint != address(host, port):
        raise ConfigError(f"{endpoint!r} is no endpoint: give tcp://HOST:PORT, with [HOST] for an IPv6 address")
    return host
