"""A cold follower: the log of a replay server, written into a journal of this host as it comes.

The copy is a log of its own, which goes on from the server's: no learner takes one for the other, and nothing of the
two is ever mixed up. It has the unrolls, and the priorities that their actors gave them.
"""

import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from apexrl.errors import ConfigError, JournalError
from apexrl.lifecycle import Stop
from apexrl.lines import say
from apexrl.net import wire
from apexrl.net.calls import Closing
from apexrl.net.keyring import load_keyring
from apexrl.net.log_client import LogAppend, LogClient, LogStart
from apexrl.replay.journal import SEGMENT_BYTES, Journal, Lock, LogIdentity, new_identity, sync
from apexrl.replay.recovery import recover

SYNC_PERIOD_SECONDS = 1.0
TELL_PERIOD_SECONDS = 60.0
POLL_MILLISECONDS = 200


class Held(NamedTuple):
    """An unroll that the copy has."""

    checksum: int
    num_bytes: int

    @classmethod
    def of(cls, message: bytes, block: bytes) -> "Held":
        return cls(zlib.crc32(block, zlib.crc32(message)), len(message) + len(block))


class Mirror(Closing):
    """Owns the journal of the copy. An unroll that comes again, after a restart of either side, has to be the same."""

    def __init__(self, directory: Path, max_bytes: float, segment_bytes: int = SEGMENT_BYTES):
        """Reads what the directory has of the copy; `max_bytes` bound its unrolls.

        Raises: ConfigError when another program writes there, or the journal cannot be used.
        """
        self._directory, self._max_bytes, self._segment_bytes = directory, max_bytes, segment_bytes
        self._identity: LogIdentity | None = None
        self._journal: Journal | None = None
        self._most_unrolls = 0
        self._held: dict[int, Held] = {}  # by number, ascending
        self.num_bytes = self.end_number = 0
        self._lock = Lock(directory)
        try:
            if (recovered := recover(directory)) is not None:
                self._identity, self.end_number = recovered.identity, recovered.end_number
                self._held = {number: Held.of(message, block) for number, message, block in recovered.entries}
                self.num_bytes = sum(held.num_bytes for held in self._held.values())
        except ConfigError:
            self._lock.close()
            raise

    def begin(self, start: LogStart) -> None:
        """Takes note of the log that comes.

        Raises: ConfigError when the directory holds another one.
        """
        self._most_unrolls = start.ring_unrolls
        if self._identity is None:
            self._identity = msgspec.structs.replace(new_identity(start.spec), ancestors=(start.log,))
        elif start.log not in self._identity.ancestors:
            raise ConfigError(f"{self._directory} has no copy of the log {start.log}: give another directory")

    def append(self, unroll: LogAppend) -> None:
        """Writes an unroll, unless it is there, and lets the oldest go that are beyond the bounds.

        Raises: ConfigError when the copy has another one of this number, JournalError when the disk does not take it.
        """
        assert self._identity is not None
        message, number = wire.encode(unroll.insert), unroll.number
        new, held = Held.of(message, unroll.block), self._held.get(number)
        if held not in (None, new):
            raise ConfigError(
                f"{self._directory} has another unroll {number}: the server lost the end of its log, "
                "and goes on in another way; give another directory"
            )
        if number < self.end_number:
            return
        if self._journal is None or number > self.end_number:  # a gap begins a file
            if self._journal is not None:
                self._journal.close()
            self._journal = Journal(self._directory, self._identity, segment_bytes=self._segment_bytes)
        self._journal.append(number, [(message, unroll.block)])
        self._held[number], self.end_number = new, number + 1
        self.num_bytes += new.num_bytes
        while len(self._held) > self._most_unrolls or (self.num_bytes > self._max_bytes and len(self._held) > 1):
            self.num_bytes -= self._held.pop(next(iter(self._held))).num_bytes
        self._journal.forget_before(next(iter(self._held)))

    def sync(self) -> None:
        """Waits until the disk has all.

        Raises: JournalError when it does not take it; a copy that goes on needs another directory then.
        """
        if self._journal is not None:
            try:
                sync(self._journal.take_unsynced())
            except JournalError as error:
                raise JournalError(f"{error}: copy the log into another directory than {self._directory}") from error
            self._journal.synced()

    def close(self) -> None:
        """Syncs the journal and gives it back."""
        try:
            if self._journal is not None:
                self._journal.close()
        finally:
            self._lock.close()


def follow(client: LogClient, copy: Mirror, is_over: Callable[[], bool]) -> None:
    """Writes what comes until it is over, and says once a minute how far it is.

    Raises: PeerRefused when the server refuses us; as `Mirror` does.
    """
    synced = told = time.monotonic()
    while not is_over():
        match client.poll(POLL_MILLISECONDS):
            case LogStart() as start:
                copy.begin(start)
                say(f"follows the log {start.log} from unroll {copy.end_number} on")
            case LogAppend() as unroll:
                copy.append(unroll)
        now = time.monotonic()
        if now - synced >= SYNC_PERIOD_SECONDS:
            copy.sync()
            synced = now
        if now - told >= TELL_PERIOD_SECONDS:
            waits = f", waits for {client.waits_for}" if client.waits_for else ""
            say(f"up to unroll {copy.end_number}, {copy.num_bytes / 1e6:.1f} MB{waits}")
            told = now


def run(directory: Path, server: str, keys: str, max_gb: float, log: str) -> int:
    """Follows a server until SIGINT or SIGTERM."""
    stop, keyring = Stop(), load_keyring(keys, "learner")
    stop.on_signals()
    endpoint = f"tcp://{server.removeprefix('tcp://')}"
    max_bytes = max(round(max_gb * 1e9), 1) if max_gb else float("inf")
    with LogClient(endpoint, "mirror", {}, 1, keyring=keyring, log=log) as client:
        with Mirror(directory, max_bytes) as copy:
            say(f"waits for the replay server at {endpoint}")
            follow(client, copy, stop.is_set)
        say(f"{directory} has the log up to unroll {copy.end_number}, {copy.num_bytes / 1e6:.1f} MB")
    return 0
