"""The log on disk: an acknowledged unroll survives the server. Files, no sockets, no clock, no threads.

A journal is a directory:
  log.json              the log's name, the spec of its unrolls, and the number at which each life of the server began
  unrolls-NUMBER.log    records (`segment.py`) from that number on; deleted whole when all of them are evicted
  priorities.bin        a snapshot of the tables (`snapshot.py`)
  *.damaged             files set aside because a part of them is unreadable (`recovery.py`)
  lock                  held by the server that writes here
An append returns when the operating system has the bytes, so a killed server loses nothing. A power cut can still take
the bytes that are not synced. `take_unsynced` gives their files, and the owner syncs them from any thread.
"""

import contextlib
import fcntl
import logging
import os
import secrets
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from apexrl.errors import ConfigError, JournalError
from apexrl.files import sync_directory, write_durably
from apexrl.replay.segment import FORMAT, Entry, Scan, SegmentHeader, pack, pack_header, scan
from apexrl.types import Count, Name, StreamSpec

logger = logging.getLogger(__name__)

SEGMENT_BYTES = 32 * 2**20
PROBE_BYTES = 2**20
MAX_PIECES = 1024  # of one write (IOV_MAX)
IDENTITY_FILE, SNAPSHOT_FILE, LOCK_FILE = "log.json", "priorities.bin", "lock"
SEGMENT_PATTERN = "unrolls-*.log"


class LogIdentity(msgspec.Struct, frozen=True):
    """The identity of a log. Each start of a server begins a new life of the log, which tells replicas apart."""

    format: int
    log: Name
    lives: tuple[Count, ...]  # the number at which each life of the server began
    spec: StreamSpec
    ancestors: tuple[Name, ...] = ()  # logs that it was forked or mended from; files of theirs name them

    @property
    def life(self) -> int:
        """The current life, counted from 0."""
        return len(self.lives) - 1

    def continues(self, log: str, life: int, next_number: int) -> bool:
        """True when a replica of `log`, fed in that life up to next_number, is a replica of this log too.

        It is no replica when the disk lost the newest unrolls of that life and other unrolls got their numbers.
        """
        return log == self.log and life <= self.life and next_number <= self.end_of_life(life, next_number)

    def end_of_life(self, life: int, end_number: int) -> int:
        """Returns the end of the numbers, at most end_number, that still name the same unrolls as in that life."""
        return min((end_number, *self.lives[life + 1 :]))


class _Format(msgspec.Struct, frozen=True):
    """The part of `log.json` that every format has."""

    format: int


def new_identity(spec: StreamSpec) -> LogIdentity:
    """Returns the identity of a new log."""
    return LogIdentity(FORMAT, secrets.token_hex(8), (0,), spec)


class Lock:
    """The right to write into a journal, held until `close`."""

    def __init__(self, directory: Path):
        """Raises: ConfigError when the directory cannot be used or another server holds it."""
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigError(f"--journal-dir {directory} cannot be used ({error.strerror})") from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._descriptor)
            raise ConfigError(
                f"--journal-dir {directory} belongs to a replay server that runs: give another"
            ) from error

    def close(self) -> None:
        """Releases the lock."""
        os.close(self._descriptor)


def segment_paths(directory: Path) -> list[Path]:
    """Returns the files of unrolls, oldest first."""
    return sorted(directory.glob(SEGMENT_PATTERN), key=first_number_of)


def segment_path(directory: Path, first_number: int) -> Path:
    """Returns the path of the file that begins with an unroll."""
    return directory / f"unrolls-{first_number:016d}.log"


def first_number_of(path: Path) -> int:
    """Returns the number of the first unroll in a file, as its name says."""
    digits = path.name.removeprefix("unrolls-").removesuffix(".log")
    return int(digits) if digits.isdigit() else 0


def read_identity(directory: Path) -> LogIdentity | None:
    """Returns the identity of the log in a directory, None when it is missing or unreadable.

    Raises: ConfigError when another version of the software wrote it.
    """
    try:
        data = (directory / IDENTITY_FILE).read_bytes()
        check_format(msgspec.json.decode(data, type=_Format).format, directory)
        identity = msgspec.json.decode(data, type=LogIdentity)
    except (OSError, msgspec.MsgspecError, ValueError):
        return None
    return identity if identity.lives else None


def identity_of(directory: Path) -> LogIdentity:
    """Returns the identity of a directory's log. Without log.json it comes from a file's header and has no lives.

    Raises: ConfigError when the directory is no journal, or has another version.
    """
    if (identity := read_identity(directory)) is not None:
        return identity
    for header in (found.header for _, found in read_segments(directory)):
        if header is not None:
            check_format(header.format, directory)
            return LogIdentity(FORMAT, header.log, (), header.spec)
    if shards := sorted(path.name for path in directory.glob("shard-*")):
        raise ConfigError(f"{directory} holds the journals of {len(shards)} shards: give one, {directory / shards[0]}")
    raise ConfigError(f"{directory} is no journal: give the --journal-dir of a replay server (journal/ of a run)")


def held_numbers(directory: Path) -> range:
    """Returns the numbers of a journal's unrolls, from the first file's first to the last file's last."""
    paths = segment_paths(directory)
    for _, found in read_segments(directory, newest_first=True):
        if found.entries:
            return range(first_number_of(paths[0]), found.entries[-1].number + 1)
    return range(0)


def read_entries(directory: Path) -> Iterator[Entry]:
    """Yields the readable unrolls of a journal in order. Takes no lock, mends nothing, skips evicted files."""
    for path, found in read_segments(directory):
        if found.damages:
            num_bytes = sum(damage.num_bytes for damage in found.damages)
            logger.warning("%d bytes of %s are no records: damaged, or being written", num_bytes, path)
        yield from found.entries


def read_segments(directory: Path, newest_first: bool = False) -> Iterator[tuple[Path, Scan]]:
    """Yields the files of unrolls and their content, without those that were evicted meanwhile.

    Raises: ConfigError when one cannot be read.
    """
    paths = segment_paths(directory)
    ends = [*map(first_number_of, paths[1:]), sys.maxsize]
    for path, end in sorted(zip(paths, ends, strict=False), key=lambda item: item[1], reverse=newest_first):
        try:
            found = scan(path.read_bytes(), first_number_of(path))
        except FileNotFoundError:
            continue
        except OSError as error:
            raise ConfigError(f"{path} cannot be read ({error.strerror})") from error
        # A number that two files hold was acknowledged with the later one.
        yield path, found._replace(entries=[entry for entry in found.entries if entry.number < end])


def check_format(found: int, directory: Path) -> None:
    """Raises ConfigError when this version does not read journals of a format."""
    if found != FORMAT:
        raise ConfigError(
            f"the journal in {directory} has format {found}, this version reads format {FORMAT}: start a new run or "
            "give another --journal-dir; the version that wrote this journal still reads it"
        )


class Journal:
    """Appends to a log's journal and forgets its oldest files. One owner; needs the `Lock`."""

    def __init__(self, directory: Path, identity: LogIdentity, sync_at_once: bool = False):
        """Opens a journal for one life of the server. The first append writes the life down and begins a file.

        Args:
          sync_at_once: an append returns when the disk has the bytes, not only the operating system.
        """
        self.directory = directory
        self.num_bytes = sum(path.stat().st_size for path in segment_paths(directory))
        self.unsynced_bytes = 0
        self._identity = identity
        self._is_written_down = False
        self._sync_at_once = sync_at_once
        self._firsts = [first_number_of(path) for path in segment_paths(directory)]
        self._descriptor = -1
        self._size = 0
        self._refused_bytes = 0  # of the append that failed last
        self._unsynced: list[int] = []  # descriptors of finished files

    def append(self, first_number: int, records: Sequence[tuple[bytes, bytes]]) -> None:
        """Writes (message, block) records as the unrolls first_number, first_number + 1, ...

        Raises: JournalError when the file system does not take them; none of them is written then.
        """
        pieces: list[bytes] = []
        for i, (message, block) in enumerate(records):
            pieces += pack(first_number + i, message, block)
        written = sum(map(len, pieces))
        try:
            if self._descriptor < 0 or self._size >= SEGMENT_BYTES:
                self._begin_file(first_number)
            self.unsynced_bytes += written
            _write_all(self._descriptor, pieces)
            if self._sync_at_once:
                os.fdatasync(self._descriptor)
                self.unsynced_bytes = 0
        except OSError as error:
            self._undo()
            self._refused_bytes = written
            raise JournalError(f"the journal in {self.directory} cannot be written ({error.strerror})") from error
        self._size += written
        self.num_bytes += written

    def forget_before(self, number: int) -> None:
        """Deletes the files that hold only unrolls before a number."""
        while len(self._firsts) > 1 and self._firsts[1] <= number:
            path = segment_path(self.directory, self._firsts.pop(0))
            try:
                size = path.stat().st_size
                path.unlink()
                self.num_bytes -= size
            except OSError as error:
                logger.warning("%s holds nothing any more but cannot be deleted: %s", path, error)

    def is_writable(self) -> bool:
        """Returns whether the append that failed can succeed: writes as much, a megabyte at least, and deletes it."""
        path = self.directory / "probe"
        try:
            with path.open("wb") as file:
                file.write(bytes(max(PROBE_BYTES, self._refused_bytes)))
                file.flush()
                os.fdatasync(file.fileno())
            return True
        except OSError:
            return False
        finally:
            with contextlib.suppress(OSError):
                path.unlink()

    def take_unsynced(self) -> list[int]:
        """Returns descriptors of the files written since the last call; call `sync` with them in any thread."""
        if self._descriptor >= 0 and self.unsynced_bytes:
            self._unsynced.append(os.dup(self._descriptor))
        descriptors, self._unsynced = self._unsynced, []
        self.unsynced_bytes = 0
        return descriptors

    def close(self) -> None:
        """Syncs and closes the file."""
        sync(self.take_unsynced())
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def _begin_file(self, first_number: int) -> None:
        header = pack_header(
            SegmentHeader(FORMAT, self._identity.log, self._identity.life, first_number, self._identity.spec)
        )
        path = segment_path(self.directory, first_number)
        if not self._is_written_down:
            write_durably(self.directory / IDENTITY_FILE, msgspec.json.encode(self._identity))
            self._is_written_down = True
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        try:
            _write_all(descriptor, [header])
            sync_directory(self.directory)
        except OSError:
            os.close(descriptor)
            path.unlink()
            raise
        if self._descriptor >= 0:
            self._unsynced.append(self._descriptor)
        self._descriptor, self._size = descriptor, len(header)
        self.num_bytes += len(header)
        if first_number not in self._firsts:
            self._firsts.append(first_number)

    def _undo(self) -> None:
        """Truncates a record that was written in part. If that fails, this file gets no further records."""
        if self._descriptor < 0:
            return
        try:
            os.ftruncate(self._descriptor, self._size)
        except OSError:
            self._unsynced.append(self._descriptor)
            self._descriptor = -1


def sync(descriptors: Sequence[int]) -> None:
    """Waits until the disk has the bytes written to the descriptors, and closes them.

    Raises: JournalError when the disk fails.
    """
    fault: OSError | None = None
    for descriptor in descriptors:
        try:
            os.fdatasync(descriptor)
        except OSError as error:
            fault = error
        os.close(descriptor)
    if fault is not None:
        raise JournalError(f"the disk did not take the journal ({fault.strerror}): a power cut may lose experience")


def _write_all(descriptor: int, pieces: Sequence[bytes]) -> None:
    for first in range(0, len(pieces), MAX_PIECES):
        some = pieces[first : first + MAX_PIECES]
        written = os.writev(descriptor, some)
        if written < sum(map(len, some)):  # a signal came, or the disk is nearly full
            rest = memoryview(b"".join(some))[written:]
            while rest:
                rest = rest[os.write(descriptor, rest) :]
