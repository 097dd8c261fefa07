"""One connection to a replay server: it sends and receives messages and knows when the server last answered."""

import asyncio
import contextlib
import logging
import os
import threading
import time

import msgspec
import zmq

from apexrl.errors import ApexError, PeerRefused, PeerTimeout, WireError
from apexrl.lines import Repeats
from apexrl.net import wire
from apexrl.net.identity import new_routing_id
from apexrl.net.keyring import Keyring
from apexrl.net.protocols import PROTOCOL, PROTOCOLS
from apexrl.net.sockets import connect_watched, make_socket, receive, send

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 1.0
RESEND_SECONDS = 5.0  # after so long without a sign of life the client introduces itself again
POLL_SECONDS = 0.1
COMPLAIN_SECONDS = 10.0  # between two warnings
MAX_ASK_SECONDS = 10.0  # longest pause between two heartbeats to a silent server
MAX_QUEUED_MESSAGES = 16_384  # more than acknowledgements and demand allow in flight


class Use:
    """The use of a client, by one thread at a time: it may begin again in the thread that has it already."""

    def __init__(self, endpoint: str):
        self._endpoint = endpoint
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        """Raises ApexError when another thread is in the midst of its own use."""
        if not self._lock.acquire(blocking=False):
            raise ApexError(
                f"the client of {self._endpoint} is in use by another thread: make a client for each thread, or hold a "
                "lock of yours around each call"
            )

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class Connection:
    """A DEALER socket to the server, which knows the peer by its secret routing id.

    Belongs to one thread of the process that made it: a socket does not survive a fork, and two threads at once are
    told by `use`.
    """

    def __init__(
        self, endpoint: str, keyring: Keyring | None = None, context: zmq.Context | None = None, log: str = ""
    ):
        """`log`: the name of the one that is meant, where the server has several."""
        self.endpoint = endpoint
        self.log_name: wire.LogName = log or msgspec.UNSET  # as greetings have it
        self.routing_id = new_routing_id()
        self.num_dropped = 0  # messages of ours that the server dropped
        self.last_heard = self.last_sent = time.monotonic()
        self.has_answered = False
        self.use = Use(endpoint)
        self.waiters: set[asyncio.Future[None]] = set()  # tasks that wait until it is readable
        self.watched = -1  # a copy of the descriptor, while there are some
        self._process = os.getpid()
        self._is_known = False  # the server took our greeting at least once
        self._ask_again = -1e9
        self._fault = "is it running, and are host and port right?"
        self._repeats = Repeats(COMPLAIN_SECONDS)
        self._socket = make_socket(context or zmq.Context.instance(), zmq.DEALER, self.routing_id)
        self._socket.sndhwm = self._socket.rcvhwm = MAX_QUEUED_MESSAGES
        self._monitor = connect_watched(self._socket, endpoint, keyring, "replay")

    def send(self, message: wire.ToReplay) -> None:
        """Sends one message; never blocks. Messages to an absent server wait in the socket, up to a bound."""
        self.send_frames(wire.encode(message))

    def send_frames(self, *frames: bytes) -> None:
        """Sends a message that is encoded already."""
        self.check_usable()
        self.last_sent = time.monotonic()
        with self.use, contextlib.suppress(zmq.Again):
            send(self._socket, frames)

    def receive(self, timeout_milliseconds: int) -> tuple[wire.FromReplay, list[bytes]] | None:
        """Returns the next message and its attachments, None when none comes in time or it is malformed.

        Raises: PeerRefused when the server refuses this client, or cannot read its greeting.
        """
        self.check_usable()
        with self.use:
            frames = receive(self._socket, timeout_milliseconds)
        if frames is None:
            return None
        try:
            message = wire.decode_from_replay(frames)
        except WireError as error:
            self._complain("the replay server at %s sent something malformed: %s", self.endpoint, error)
            return None
        self.last_heard, self.has_answered = time.monotonic(), True
        match message:
            case wire.Refused():
                raise PeerRefused(f"the replay server at {self.endpoint} refuses us: {message.reason}")
            case wire.Dropped():
                self.num_dropped += 1
                if message.is_malformed and not self._is_known:
                    raise PeerRefused(f"the replay server at {self.endpoint} cannot read us: {message.reason}")
                self._complain("the replay server at %s dropped a message of ours: %s", self.endpoint, message.reason)
            case wire.Welcome() | wire.Subscribed():
                self._is_known = True
                if message.protocol not in PROTOCOLS:
                    raise PeerRefused(
                        f"the replay server at {self.endpoint} answers in protocol {message.protocol}, "
                        f"we speak {PROTOCOLS[0]} to {PROTOCOL}"
                    )
                if message.log_name != self.log_name:
                    raise PeerRefused(f"the replay server at {self.endpoint} is too old for several logs: update it")
        return message, frames[1:]

    def wait(self, seconds: float) -> None:
        """Waits for a message, but no longer than so many seconds."""
        self.check_usable()
        with self.use:
            self._socket.poll(max(int(seconds * 1000) + 1, 1))

    @property
    def is_readable(self) -> bool:
        """Whether `receive` has a message now."""
        self.check_usable()
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def fileno(self) -> int:
        """Returns a descriptor that becomes readable when something came; receive until nothing is left then."""
        self.check_usable()
        return int(self._socket.getsockopt(zmq.FD))

    @property
    def is_usable(self) -> bool:
        """False when it was closed, and in a process that was forked from its own."""
        return os.getpid() == self._process and not self._socket.closed

    def check_usable(self) -> None:
        """Raises ApexError when nothing can be sent or received by this connection."""
        if os.getpid() != self._process:
            raise ApexError(
                f"the client of {self.endpoint} belongs to process {self._process}, of which this one is a fork: "
                "make another client after the fork"
            )
        if self._socket.closed:
            raise ApexError(f"the client of {self.endpoint} was closed: make another one")

    @property
    def is_silent(self) -> bool:
        """True when the server has sent nothing for RESEND_SECONDS."""
        return time.monotonic() - self.last_heard > RESEND_SECONDS

    def should_ask(self) -> bool:
        """True when a heartbeat is due: every second, and up to every 10 s while the server is silent.

        The longer pauses keep a returning server from a flood of the messages that wait for it.
        """
        now = time.monotonic()
        if now < self._ask_again:
            return False
        silent_seconds = now - self.last_heard
        self._ask_again = now + min(max(HEARTBEAT_SECONDS, silent_seconds / 4), MAX_ASK_SECONDS)
        fault = self._monitor.fault() if self._monitor is not None else ""
        if fault:
            self._fault = fault
            self._complain("no connection to the replay server at %s: %s", self.endpoint, fault)
        return True

    def need_not_ask(self) -> None:
        """Postpones the next heartbeat by a second, because the server has just answered."""
        self._ask_again = time.monotonic() + HEARTBEAT_SECONDS

    def ask_at_once(self) -> None:
        """Makes `should_ask` true at its next call."""
        self._ask_again = -1e9

    def silence(self) -> PeerTimeout:
        """Returns the error to raise when the server has been silent for too long."""
        seconds = time.monotonic() - self.last_heard
        return PeerTimeout(f"the replay server at {self.endpoint} was silent for {seconds:.1f} s: {self._fault}")

    def close(self) -> None:
        """Says goodbye and closes the socket. Does nothing where the connection is not usable."""
        if not self.is_usable:
            return
        self.send(wire.Goodbye())
        if self._monitor is not None:
            self._monitor.close()
        self._socket.close(linger=500)

    def _complain(self, text: str, *values: object) -> None:
        if self._repeats.let_through():
            logger.warning(f"{text}%s", *values, self._repeats.more())
