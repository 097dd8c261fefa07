"""An actor that keeps to the server's pace, and checks nothing that it sends."""

import time
from collections.abc import Callable

from apexrl.net import wire
from apexrl.net.connection import Connection
from apexrl.net.identity import marked
from apexrl.net.protocols import PROTOCOL
from apexrl.types import StreamSpec, UnrollHeader


class RawActor:
    """Inserts what an `InsertClient` refuses at the call."""

    def __init__(self, endpoint: str, name: str, spec: StreamSpec, num_streams: int):
        self._connection = Connection(endpoint)
        self._greeting = wire.Hello(
            PROTOCOL, marked(name, self._connection.routing_id), num_streams, spec, first_sequence=0
        )
        self._is_welcome = False
        self._sequence = self._stored = self._allowed = 0

    @property
    def num_dropped(self) -> int:
        """The number of messages that the server dropped."""
        return self._connection.num_dropped

    def insert(self, header: UnrollHeader, block: bytes, timeout_seconds: float) -> bool:
        """Sends an insert when it is allowed; returns whether it was in time."""
        if not self._until(lambda: self._sequence < self._allowed, timeout_seconds):
            return False
        message = wire.Insert.of(header, self._sequence, self._greeting.actor)
        self._connection.send_frames(wire.encode(message), block)
        self._sequence += 1
        return True

    def flush(self, timeout_seconds: float) -> bool:
        """Waits until every insert is acknowledged; returns whether they were in time."""
        return self._until(lambda: self._stored >= self._sequence, timeout_seconds)

    def close(self) -> None:
        """Says goodbye."""
        self._connection.close()

    def _until(self, done: Callable[[], bool], timeout_seconds: float) -> bool:
        deadline = time.monotonic() + timeout_seconds
        while not done() and time.monotonic() < deadline:
            if self._connection.should_ask():
                self._connection.send(wire.Heartbeat() if self._is_welcome else self._greeting)
            message, _ = self._connection.receive(50) or (None, [])
            match message:
                case wire.Stranger():
                    self._is_welcome = False
                case wire.Welcome():
                    self._is_welcome = True
                    self._sequence = message.stored_sequence  # those on the way are lost
            if isinstance(message, wire.Welcome | wire.Acknowledge):
                self._stored, self._allowed = message.stored_sequence, message.allowed_sequence
        return done()
