"""An actor's side of the replay: inserts unrolls, each stored exactly once. Belongs to one thread."""

import collections
import logging
import operator
import time
from collections.abc import Callable

import msgspec
import numpy as np
import zmq

from apexrl.errors import PeerRefused, PeerTimeout, WireError
from apexrl.net import wire
from apexrl.net.arguments import MAX_NUMBER, checked_header, checked_number
from apexrl.net.calls import Closing, Steps, call, deadline_of
from apexrl.net.connection import HEARTBEAT_SECONDS, POLL_SECONDS, RESEND_SECONDS, Connection
from apexrl.net.identity import marked
from apexrl.net.insert_checks import InsertSizes, why_impossible
from apexrl.net.keyring import Keyring
from apexrl.net.protocols import PROTOCOL, PROTOCOLS
from apexrl.types import StreamSpec, UnrollHeader

logger = logging.getLogger(__name__)

SAID_SECONDS = 10.0  # of waiting, between two lines that say so
MAX_AT_ONCE = 1000  # messages that one call takes without looking at the time
LISTEN_SECONDS = 0.001  # between two looks for messages, while the server allows inserts anyway


class InsertClient(Closing):
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
        log: str = "",
    ):
        """Connects, without waiting for the server.

        Args:
          name: a name for people to read. `actor` is this name and a mark that no other client has.
          log: the name of the log, where the server has several.
        Raises: WireError when no server takes such a name or the unrolls of such a spec.
        """
        num_streams = checked_number(operator.index, num_streams, "num_streams")
        _check_greeting(wire.Hello(PROTOCOLS[0], marked(name, b""), num_streams, spec, 0, PROTOCOL, log))
        self._connection = Connection(endpoint, keyring, context, log)
        self.use = self._connection.use
        self.actor = marked(name, self._connection.routing_id)
        self.slots: tuple[int, ...] = ()
        self.ladder_size = 0
        self.waited_seconds: dict[str, float] = collections.defaultdict(float)
        self.bytes_sent = 0
        self._spec = spec
        self._sizes = InsertSizes(spec)
        self._num_streams = num_streams
        self._unacknowledged: collections.OrderedDict[int, tuple[bytes, bytes]] = collections.OrderedDict()
        self._next_sequence = 0
        self._allowed_sequence = 0
        self._next_to_send = 0
        self._asked = -1  # up to here, for acknowledgements
        self._welcome = False
        self._greeted_seconds = -1e9
        self._reason = ""  # why the server lets us wait
        self._lost = ""  # why it dropped an insert
        self._last_progress = self._last_standing = time.monotonic()
        self._unsaid_seconds = 0.0  # of waiting
        self._listened_seconds = -1e9

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

    @property
    def away_seconds(self) -> float:
        """Seconds since the server last said where we stand. One that lets us wait says so every second."""
        return time.monotonic() - self._last_standing

    def connect(self, timeout_seconds: float, stopped: Callable[[], bool] = lambda: False) -> None:
        """Waits until the server has leased the slots, or until `stopped` is true.

        Raises: PeerTimeout when it has not in time, PeerRefused when it refuses this client.
        """
        self.connecting(timeout_seconds, stopped).finish()

    @call
    def connecting(self, timeout_seconds: float, stopped: Callable[[], bool] = lambda: False) -> Steps[None]:
        """Is `connect` to be awaited."""
        yield from self._waiting(lambda: self._welcome, timeout_seconds, stopped, "replay_connection")

    def insert(
        self, header: UnrollHeader, block: bytes, timeout_seconds: float, stopped: Callable[[], bool] = lambda: False
    ) -> bool:
        """Waits until the server allows another unroll, then sends this one. Sends nothing when stopped before.

        Returns: whether it was sent. The stream has a gap when it was not and another follows.
        Raises: PeerTimeout when the server does not allow it in time: it is silent, or a table's limiter waits for a
          learner. PeerRefused when it refuses this client. WireError when no server takes the unroll, for example
          because a priority is not finite. Nothing was sent then.
        """
        message = self.checked(header, block)
        return self.send_now(message, block) or self.sending(message, block, timeout_seconds, stopped).finish()

    @call
    def inserting(
        self, header: UnrollHeader, block: bytes, timeout_seconds: float, stopped: Callable[[], bool] = lambda: False
    ) -> Steps[bool]:
        """Is `insert` to be awaited."""
        return (yield from self.sending(self.checked(header, block), block, timeout_seconds, stopped))

    def checked(self, header: UnrollHeader, block: bytes) -> wire.Insert:
        """Returns the message of an unroll, with the number that it gets if it is the next one to be sent.

        Raises: WireError when a server would drop it.
        """
        spec, sizes = self._spec, self._sizes
        if np.shape(header.valid) != (spec.unroll_starts,) or np.shape(header.priorities) != (spec.num_priorities,):
            shapes = f"valid of shape {np.shape(header.valid)} and priorities of shape {np.shape(header.priorities)}"
            raise WireError(f"{shapes}, not ({spec.unroll_starts},) and ({spec.num_priorities},)")
        message = wire.Insert.of(checked_header(header), self._next_sequence, self.actor)
        encoded = wire.encode(msgspec.structs.replace(message, sequence=MAX_NUMBER))
        wire.decode_insert(encoded)
        fault = sizes.why_malformed(message, encoded, block, self._num_streams)
        if fault := fault or sizes.why_wrong_numbers(message):
            raise WireError(f"no replay server takes this insert: {fault}")
        return message

    def send_now(self, message: wire.Insert, block: bytes) -> bool:
        """Sends a `checked` message, if the server allows it already; returns whether it did."""
        with self.use:
            if time.monotonic() - self._listened_seconds > LISTEN_SECONDS:
                self.poll()
            if not self.may_insert:
                return False
            self._connection.check_usable()
            if not self._unacknowledged:
                self._last_progress = time.monotonic()
            sequence = self._next_sequence
            if message.sequence != sequence:
                message = msgspec.structs.replace(message, sequence=sequence)
            self._unacknowledged[sequence] = wire.encode(message), block
            self._next_sequence += 1
            self._send_allowed()
            return True

    @call
    def sending(
        self, message: wire.Insert, block: bytes, timeout_seconds: float, stopped: Callable[[], bool] = lambda: False
    ) -> Steps[bool]:
        """Is `insert` of a `checked` message, to be awaited."""
        deadline = deadline_of(timeout_seconds)
        while not self.send_now(message, block):
            yield from self._waiting(lambda: self.may_insert, deadline - time.monotonic(), stopped)
            if not self.may_insert:
                return False
        return True

    def poll(self) -> None:
        """Takes the messages that have arrived and keeps the connection alive. Does not wait."""
        self._listened_seconds = time.monotonic()
        for _ in range(MAX_AT_ONCE):
            if not self._receive():
                break
        self._keep_alive()

    def flush(self, timeout_seconds: float) -> bool:
        """Waits until every insert is acknowledged; returns False when the time is up before.

        Raises: PeerRefused when the server dropped an insert since the last call, which is acknowledged and not stored.
        """
        return self.flushing(timeout_seconds).finish()

    @call
    def flushing(self, timeout_seconds: float) -> Steps[bool]:
        """Is `flush` to be awaited."""
        deadline = deadline_of(timeout_seconds)
        self.poll()  # also where there is no time: a call that is made again and again gets on
        while self._unacknowledged:
            if self._welcome and self._asked != self._next_to_send:  # a server acknowledges the last few when asked
                self._asked = self._next_to_send
                self._connection.send(wire.Heartbeat())
            if (left := deadline - time.monotonic()) <= 0:
                break
            if not self._receive():
                yield self._connection, min(POLL_SECONDS, left)
            self._keep_alive()
        lost, self._lost = self._lost, ""
        if lost:
            raise PeerRefused(f"the replay server at {self._connection.endpoint} dropped an insert of ours: {lost}")
        return not self._unacknowledged

    def fileno(self) -> int:
        """Returns a descriptor that becomes readable when the server said something: call `poll` then."""
        return self._connection.fileno()

    def close(self) -> None:
        """Releases the slots. Call `flush` first, or unacknowledged inserts may be lost."""
        self._connection.close()

    def _waiting(
        self, done: Callable[[], bool], timeout_seconds: float, stopped: Callable[[], bool], reason: str = ""
    ) -> Steps[None]:
        deadline = deadline_of(timeout_seconds)
        self.poll()
        while not done() and not stopped():
            now = time.monotonic()
            if now >= deadline:
                raise self._late()
            if self._unsaid_seconds > SAID_SECONDS:
                self._unsaid_seconds = 0.0
                logger.info("waiting for %s at %s", self._waits_for() or reason, self._connection.endpoint)
            if not self._receive():
                yield self._connection, min(POLL_SECONDS, deadline - now)
            self._keep_alive()
            elapsed = time.monotonic() - now
            self.waited_seconds[reason or self._waits_for() or "replay"] += elapsed
            self._unsaid_seconds += elapsed
        self._unsaid_seconds = 0.0

    def _late(self) -> PeerTimeout:
        if self._connection.is_silent or not self._connection.has_answered:
            return self._connection.silence()
        reason = self._reason or "other inserts of ours to be stored"
        return PeerTimeout(f"the replay server at {self._connection.endpoint} lets us wait: it waits for {reason}")

    def _waits_for(self) -> str:
        return "replay_connection" if self._connection.is_silent or not self._welcome else self._reason

    def _receive(self) -> bool:
        received = self._connection.receive(0)
        if received is None:
            return False
        message, _ = received
        match message:
            case wire.Welcome():
                self.slots, self.ladder_size = message.slots, message.ladder_size
                self._allowed_sequence = message.allowed_sequence
                self._stands(message.waits_for)
                self._forget(message.stored_sequence)
                if not self._welcome:  # else it answers an older greeting, and nothing was lost
                    self._welcome = True
                    self._next_to_send, self._asked = next(iter(self._unacknowledged), self._next_sequence), -1
                self._send_allowed()
            case wire.Acknowledge():
                self.ladder_size = message.ladder_size
                self._allowed_sequence = message.allowed_sequence
                self._stands(message.waits_for)
                self._forget(message.stored_sequence)
                if self._welcome:
                    self._connection.need_not_ask()
                    self._send_allowed()
            case wire.Stranger():
                self._welcome, self._reason = False, "a greeting that it takes: is this its port for actors?"
                if time.monotonic() - self._greeted_seconds > HEARTBEAT_SECONDS:  # else at the usual pace
                    self._connection.ask_at_once()
            case wire.Dropped() if not self._welcome:
                self._reason = message.reason
                if not message.is_malformed:  # crowded: there may be room later
                    self._last_standing = time.monotonic()
            case wire.Dropped() if message.is_malformed:
                self._lost = message.reason
        return True

    def _stands(self, waits_for: str) -> None:
        self._reason, self._last_standing = waits_for, time.monotonic()

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
        self._greeted_seconds = time.monotonic()
        first = next(iter(self._unacknowledged), self._next_sequence)
        who = PROTOCOLS[0], self.actor, self._num_streams, self._spec
        self._connection.send(wire.Hello(*who, first, PROTOCOL, self._connection.log_name))

    def _send_allowed(self) -> None:
        """Sends the unrolls that were not sent since the last welcome, as far as the server allows."""
        end = min(self._next_sequence, self._allowed_sequence)
        first = next(iter(self._unacknowledged), self._next_sequence)
        for sequence in range(max(self._next_to_send, first), end):
            encoded, block = self._unacknowledged[sequence]
            self.bytes_sent += len(block)
            self._connection.send_frames(encoded, block)
        self._next_to_send = max(self._next_to_send, end)


def _check_greeting(greeting: wire.Hello) -> None:
    """Raises WireError when no server takes a greeting."""
    try:
        wire.decode_to_replay([wire.encode(greeting)])
    except (TypeError, WireError) as error:
        raise WireError(f"no replay server takes this actor: {error}") from error
    if reason := why_impossible(greeting.spec):
        raise WireError(f"no replay server takes this actor: {reason}")
