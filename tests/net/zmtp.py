"""ZMTP by hand: connections that greet, begin a frame, or say nothing."""

import contextlib
import socket
import struct

PATIENCE_SECONDS = 100  # to end what hangs


def connected(endpoint):
    """A TCP connection to an endpoint, which says nothing."""
    host, port = endpoint.removeprefix("tcp://").split(":")
    return socket.create_connection((host, int(port)), PATIENCE_SECONDS)


def greeted(endpoint, mechanism=b"NULL", kind=b"DEALER"):
    """A connection that has greeted; with NULL its handshake is complete. The other side may have ended it already."""
    connection = connected(endpoint)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32)
    body = b"\x05READY\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind
    with contextlib.suppress(ConnectionError):
        connection.sendall(greeting + (bytes([4, len(body)]) + body if mechanism == b"NULL" else b""))
    return connection


def begin_frame(connection, num_bytes, is_command=False):
    """Says that a frame of so many bytes comes, and sends its first ones."""
    with contextlib.suppress(ConnectionError):
        connection.sendall(bytes([6 if is_command else 2]) + struct.pack(">Q", num_bytes) + bytes(1000))


def is_ended(connection):
    """Waits until the other side ends a connection."""
    with contextlib.suppress(ConnectionError):
        while connection.recv(4096):
            pass
    return True
