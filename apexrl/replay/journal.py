"""The log on disk: an acknowledged unroll survives the server. Files, no sockets, no clock, no threads.

A journal is a directory:
  log.json              the log's name, the spec of its unrolls, and the number at which each life of the server began
  unrolls-NUMBER.log    records (`segment.py`) from that number on; deleted whole when all of them are evicted
  priorities.bin        a snapshot of the tables (`snapshot.py`)
  *.damaged             files set aside because a part of them is unreadable (`recovery.py`)
  lock                  held by the server that writes here
An append returns when the operating system has the bytes, so a killed server loses nothing. A power cut can still take
the bytes that are not synced. `take_unsynced` gives their files, and the owner syncs them from any thread.

A sync that fails is told once: the system counts the bytes as written afterwards, and the next sync of that file
succeeds without them. So nothing goes into such a file any more. `rewrite` replaces it from the log in memory, and only
then appends go on, in a new file.
"""

import bisect
import contextlib
import logging
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from apexrl.errors import UNREADABLE, ConfigError, JournalError
from apexrl.files import open_locked, read_whole, set_aside, sync_and_close, sync_directory, write_durably, write_pieces
from apexrl.replay.log import UnrollLog
from apexrl.replay.rewrite import Rewrite
from apexrl.replay.segment import FORMAT, Entry, SegmentHeader, pack, pack_header
from apexrl.replay.segment_files import (
    SegmentFile,
    are_of,
    first_number_of,
    in_order,
    is_name,
    read_segments,
    segment_files,
    segment_path,
)
from apexrl.types import Count, Name, StreamSpec

logger = logging.getLogger(__name__)

SEGMENT_BYTES = 32 * 2**20
PROBE_BYTES = 2**20
IDENTITY_FILE, SNAPSHOT_FILE, LOCK_FILE = "log.json", "priorities.bin", "lock"


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
        self._descriptor = open_locked(directory / LOCK_FILE, "a replay server that runs", "--journal-dir")

    def close(self) -> None:
        """Releases the lock."""
        os.close(self._descriptor)


def segment_paths(directory: Path) -> list[Path]:
    """Returns the files of unrolls, oldest first, by their headers."""
    return [file.path for file in segment_files(directory)]


def read_identity(directory: Path) -> LogIdentity | None:
    """Returns the identity of the log in a directory, None when it is missing, unreadable, or not that of the files.

    Raises: ConfigError when another version of the software wrote it.
    """
    try:
        data = read_whole(directory / IDENTITY_FILE)
        check_format(msgspec.json.decode(data, type=_Format).format, directory)
        identity = msgspec.json.decode(data, type=LogIdentity)
    except UNREADABLE:
        return None
    logs = (identity.log, *identity.ancestors)
    return identity if identity.lives and are_of(segment_files(directory), logs, identity.spec) else None


def identity_of(directory: Path) -> LogIdentity:
    """Returns the identity of a directory's log. Without log.json it comes from the files' headers and has no lives.

    Raises: ConfigError when the directory is no journal, or has another version.
    """
    if (identity := read_identity(directory) or told_by_headers(directory, segment_files(directory))) is not None:
        return identity
    if inner := sorted(path.parent for path in directory.glob(f"*/{IDENTITY_FILE}")):  # of shards, or logs with names
        raise ConfigError(f"{directory} holds {len(inner)} journals, each in a directory: give one, {inner[0]}")
    raise ConfigError(f"{directory} is no journal: give the --journal-dir of a replay server (journal/ of a run)")


def told_by_headers(directory: Path, files: Sequence[SegmentFile]) -> LogIdentity | None:
    """Returns the log of the newest file that is in its place, with all others of its stream as ancestors.

    It has no lives. None when no file has a header.

    Raises: ConfigError when another version of the software wrote one of them.
    """
    headers = [(file.is_in_place, file.header) for file in files if file.header is not None]
    for _, header in headers:
        check_format(header.format, directory)
    if not headers:
        return None
    _, newest = max(headers, key=lambda item: (item[0], item[1].first_number))
    logs = dict.fromkeys(header.log for _, header in headers if header.spec == newest.spec)
    return LogIdentity(FORMAT, newest.log, (), newest.spec, tuple(log for log in logs if log != newest.log))


def files_of(directory: Path, identity: LogIdentity) -> list[SegmentFile]:
    """Returns the files of a log's unrolls, oldest first."""
    return [file for file in segment_files(directory) if file.is_of((identity.log, *identity.ancestors))]


def held_numbers(directory: Path) -> range:
    """Returns the numbers of a journal's unrolls, from the first file's first to the last file's last."""
    files = files_of(directory, identity_of(directory))
    for _, found in read_segments(reversed(files)):
        if found.entries:
            return range(files[0].first_number, found.entries[-1].number + 1)
    return range(0)


def read_entries(directory: Path) -> Iterator[Entry]:
    """Yields the readable unrolls of a journal in order. Takes no lock, mends nothing, skips evicted files."""
    return in_order(files_of(directory, identity_of(directory)))


def check_format(found: int, directory: Path) -> None:
    """Raises ConfigError when this version does not read journals of a format."""
    if found != FORMAT:
        raise ConfigError(
            f"the journal in {directory} has format {found}, this version reads format {FORMAT}: "
            "start a new run or give another --journal-dir; the version that wrote this journal still reads it"
        )


class Journal:
    """Appends to a log's journal and forgets its oldest files. One owner; needs the `Lock`."""

    def __init__(
        self, directory: Path, identity: LogIdentity, sync_at_once: bool = False, segment_bytes: int = SEGMENT_BYTES
    ):
        """Opens a journal for one life of the server. The first append writes the life down and begins a file.

        Args:
          sync_at_once: an append returns when the disk has the bytes, not only the operating system.
          segment_bytes: a file that has reached them gets no further records.
        """
        self.directory, self._identity = directory, identity
        paths = [path for path in segment_paths(directory) if is_name(path)]  # `recover` has put all in their places
        self.num_bytes = sum(path.stat().st_size for path in paths)
        self.unsynced_bytes = 0  # that a power cut would take
        self._sync_at_once, self._segment_bytes, self._is_written_down = sync_at_once, segment_bytes, False
        self._firsts = [first_number_of(path) for path in paths]
        self._descriptor, self._size, self._has_directory = -1, 0, False
        self._refused_bytes = 0  # of the append that failed last
        self._unsynced: list[int] = []  # descriptors of finished files, and of the directory when it has new names
        self._doubted: list[int] = []  # firsts of our files that the disk may not have whole, the one in use included
        self._taken_files = self._taken_bytes = 0  # to be synced, by the last `take_unsynced`
        self._is_trusted = True  # no sync failed

    def append(self, first_number: int, records: Sequence[tuple[bytes, bytes]]) -> None:
        """Writes (message, block) records as the unrolls first_number, first_number + 1, ...

        Raises: JournalError when the file system does not take them; none of them is written then.
        """
        if not self._is_trusted:
            raise JournalError(f"the journal in {self.directory} cannot be written: a sync failed")
        pieces: list[bytes] = []
        for i, (message, block) in enumerate(records):
            pieces += pack(first_number + i, message, block)
        written = sum(map(len, pieces))
        try:
            if self._descriptor < 0 or self._size >= self._segment_bytes:
                self._begin_file(first_number)
            self.unsynced_bytes += written
            write_pieces(self._descriptor, pieces)
        except OSError as error:
            self._undo()
            self._refused_bytes = written
            raise JournalError(f"the journal in {self.directory} cannot be written ({error.strerror})") from error
        if self._sync_at_once:
            self._sync_now()
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
        """Returns whether the append that failed can succeed: writes as much, a megabyte at least, and deletes it.

        Any thread may ask.
        """
        path = self.directory / "probe"
        try:
            write_durably(path, bytes(max(PROBE_BYTES, self._refused_bytes)))
            return True
        except OSError:
            return False
        finally:
            with contextlib.suppress(OSError):
                path.unlink()

    def take_unsynced(self) -> list[int]:
        """Returns descriptors of the files written since the last call.

        `sync` them in any thread, then say `synced`, or `distrust` when that raised an error.
        Raises: JournalError when the system has no descriptor left.
        """
        if not self._is_trusted:  # a rewrite syncs what it writes
            return []
        if self._descriptor >= 0 and self.unsynced_bytes:
            try:
                self._unsynced.append(os.dup(self._descriptor))
            except OSError as error:
                raise JournalError(f"the journal in {self.directory} cannot be synced ({error.strerror})") from error
        descriptors, self._unsynced, self._has_directory = self._unsynced, [], False
        self._taken_files, self._taken_bytes = len(self._doubted) - (self._descriptor >= 0), self.unsynced_bytes
        return descriptors

    def synced(self) -> None:
        """Takes note that the disk has all that was taken last."""
        del self._doubted[: self._taken_files]
        self.unsynced_bytes -= self._taken_bytes
        self._taken_files = self._taken_bytes = 0

    def distrust(self) -> None:
        """Takes note that a sync failed. Appends raise JournalError until each `rewrite` is done."""
        for descriptor in (*self._unsynced, self._descriptor):
            with contextlib.suppress(OSError):  # there may be no open file, or its last write failed
                os.close(descriptor)
        self._unsynced, self._descriptor, self._has_directory = [], -1, False
        self._taken_files = self._taken_bytes = 0
        self._is_trusted = not self._doubted

    def rewrite(self, log: UnrollLog) -> Rewrite | None:
        """Returns the next file that the disk may not have whole, as the log has it; None when appends may go on.

        Write it in any thread, then say `rewritten`. Raises: OSError when the disk does not tell the size of a file.
        """
        while not self._is_trusted and self._doubted:
            first = self._doubted[0]
            end = min([log.end_number, *(other for other in self._firsts if other > first)])
            if first in self._firsts and (numbers := range(max(first, log.first_number), end)):
                path = segment_path(self.directory, numbers[0])
                return Rewrite.of(path, self._header(numbers[0]), first, numbers, log)
            del self._doubted[0]  # all of it has left the log, or it has no record
        if not self._is_trusted:
            self._is_trusted, self.unsynced_bytes = True, 0
        return None

    def rewritten(self, rewrite: Rewrite) -> None:
        """Takes note that the disk has a file again."""
        self._doubted.remove(rewrite.first)
        if rewrite.first not in self._firsts:  # it has left the log meanwhile
            rewrite.path.unlink(missing_ok=True)
            return
        self.num_bytes += sum(map(len, rewrite.pieces)) - rewrite.replaced_bytes
        if rewrite.number != rewrite.first:
            bisect.insort(self._firsts, rewrite.number)
            self.forget_before(rewrite.number)

    def save(self, log: UnrollLog) -> None:
        """Waits until the disk has all, also what a failed sync may have lost.

        Raises: JournalError when the disk does not take it.
        """
        try:
            if self._taken_bytes:
                raise JournalError("nobody told how the last sync ended")
            sync(self.take_unsynced())
            self.synced()
        except JournalError:
            self.distrust()
        while (rewrite := self.rewrite(log)) is not None:
            rewrite.write()
            self.rewritten(rewrite)

    def close(self) -> None:
        """Syncs and closes the file, without another descriptor."""
        descriptors = self._unsynced + [self._descriptor] * (self._descriptor >= 0)
        self._unsynced, self._descriptor = [], -1
        sync(descriptors)
        if self._is_trusted:
            self._taken_files, self._taken_bytes = len(self._doubted), self.unsynced_bytes
            self.synced()

    def _begin_file(self, first_number: int) -> None:
        header = pack_header(self._header(first_number))
        path = segment_path(self.directory, first_number)
        if not self._is_written_down:
            write_durably(self.directory / IDENTITY_FILE, msgspec.json.encode(self._identity))
            self._is_written_down = True
        if first_number in self._firsts:
            path.unlink(missing_ok=True)  # one without a record, of an append that failed
        elif os.path.lexists(path):
            logger.error("%s is not ours: set aside as %s", path, set_aside(path, "aside").name)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        try:
            write_pieces(descriptor, [header])
            if self._sync_at_once:
                sync_directory(self.directory)
            elif not self._has_directory:  # who syncs the file syncs its name, too: nobody waits for the disk here
                self._unsynced.append(os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY))
                self._has_directory = True
        except OSError:
            os.close(descriptor)
            path.unlink()
            raise
        if self._descriptor >= 0:
            self._unsynced.append(self._descriptor)
        self._descriptor, self._size = descriptor, len(header)
        if first_number not in self._firsts:
            self.num_bytes += len(header)
            self._firsts.append(first_number)
        if first_number not in self._doubted:
            self._doubted.append(first_number)

    def _header(self, first_number: int) -> SegmentHeader:
        own = self._identity
        return SegmentHeader(FORMAT, own.log, own.life, first_number, own.spec)

    def _sync_now(self) -> None:
        try:
            os.fdatasync(self._descriptor)
        except OSError as error:
            self._undo()
            self.distrust()
            raise JournalError(f"the journal in {self.directory} cannot be written ({error.strerror})") from error
        self.unsynced_bytes = self._taken_bytes = 0

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
    try:
        sync_and_close(descriptors)
    except OSError as error:
        raise JournalError(f"the disk did not take all of the journal ({error.strerror})") from error
