"""How every socket of the system is made: bounded messages, no lingering, dead links noticed, identities kept."""

import zmq

from apexrl.errors import ConfigError
from apexrl.net.wire import MAX_MESSAGE_BYTES

HEARTBEAT_SECONDS = 5
DEAD_LINK_SECONDS = 20


def make_socket(context: zmq.Context, kind: int, identity: bytes | None = None) -> zmq.Socket:
    """Returns a socket with the options that all roles share. It belongs to the thread that uses it."""
    socket = context.socket(kind)
    socket.linger = 0
    socket.maxmsgsize = MAX_MESSAGE_BYTES
    socket.heartbeat_ivl = HEARTBEAT_SECONDS * 1000
    socket.heartbeat_timeout = DEAD_LINK_SECONDS * 1000
    socket.reconnect_ivl = 100
    socket.reconnect_ivl_max = 2000
    if identity is not None:
        socket.setsockopt(zmq.ROUTING_ID, identity)
    if kind == zmq.ROUTER:
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    return socket


def bind(socket: zmq.Socket, host: str, port: int) -> str:
    """Binds to host:port (port 0: any free one) and returns the endpoint.

    Raises: ConfigError when the address cannot be had; the socket is closed then.
    """
    try:
        socket.bind(f"tcp://{host}:{port or '*'}")
    except zmq.ZMQError as error:
        socket.close()
        raise ConfigError(
            f"cannot listen on {host}:{port} ({error}): choose another port or stop who uses it"
        ) from error
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return endpoint.decode().rstrip("\0")


def address(host: str, port: int) -> str:
    """Returns the endpoint to connect to."""
    return f"tcp://{host}:{port}"
