"""Durable files: others may read them while they are replaced, and a kill or a power cut leaves them whole.

A file is written under one fixed temporary name in its own directory, made durable, and renamed. A kill can leave that
temporary file; the next write of the same file removes it.
"""

import contextlib
import errno
import fcntl
import filecmp
import functools
import itertools
import logging
import os
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from apexrl.errors import UNREADABLE, ConfigError, fault_of

logger = logging.getLogger(__name__)

T = TypeVar("T")
MOST_BYTES = 64 * 2**20  # of a file of a run that is read whole; the curve of a year has 40 MB
TEMPORARY = ".tmp"
MAX_PIECES = 1024  # of one write (IOV_MAX)
NO_DIRECTORY_SYNC = {  # of a file system whose directories cannot be opened or synced, as some of network and guests
    *(errno.EINVAL, errno.EBADF, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EISDIR, errno.EACCES),
}


def open_regular(path: Path) -> BinaryIO:
    """Opens a file for reading. A pipe or a device, which could be waited for without end, is none.

    Raises: OSError when there is no such file, or it cannot be read.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "this is no regular file", str(path))
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # where a pipe took its place meanwhile
    return os.fdopen(descriptor, "rb")


def first_line(path: Path) -> bytes:
    """Returns the first line of a regular file, 1,000 bytes of it at most; empty where the path names something else.

    Raises: OSError when it cannot be read.
    """
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        return file.readline(1000)


def read_whole(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """Returns the content of a regular file.

    Raises: OSError when there is no such file, it is larger, or cannot be read.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, and {most_bytes:,} are the most", str(path))
        return file.read(size)


def read_json(path: Path, kind: type[T], fault: str = "cannot be read") -> T:
    """Returns the content of a JSON file, checked by a type.

    Raises: ConfigError, with these words, when it cannot be read, is no JSON, or holds something else.
    """
    try:
        return msgspec.json.decode(read_whole(path), type=kind)
    except UNREADABLE as error:
        raise ConfigError(f"{path} {fault}: {fault_of(error)}") from error


def name_aside(path: Path, kind: str) -> Path:
    """Returns a name under which a file can be kept: NAME.kind, NAME.2.kind and so on.

    No file has it, unless with just this content.
    """
    for count in itertools.count(1):
        aside = path.with_name(f"{path.name}.{count}.{kind}" if count > 1 else f"{path.name}.{kind}")
        if not os.path.lexists(aside) or (aside.is_file() and filecmp.cmp(path, aside, shallow=False)):
            return aside
    raise AssertionError("there is always another name")


def set_aside(path: Path, kind: str) -> Path:
    """Renames a file to a name of its own, `name_aside`'s, and returns that path."""
    return path.rename(name_aside(path, kind))


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields the path of a temporary file, which then replaces the file: whole and durable, or not at all.

    Raises: OSError when the disk does not take it. The temporary file is gone then, and the old file stays: unless only
      the sync of their directory failed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + TEMPORARY)
    temporary.unlink(missing_ok=True)  # of a killed writer; a pipe or a link would lead elsewhere
    try:
        yield temporary
        sync_file(temporary)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_directory(path.parent)


def write_durably(path: Path, data: bytes) -> None:
    """Replaces a file. After a power cut it holds either the old data or the new."""
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def write_json(path: Path, value: object) -> None:
    """Replaces a JSON file durably.

    Raises: ConfigError when a text in it is not UTF-8, such as the name of a directory.
    """
    try:
        data = msgspec.json.encode(value)
    except UnicodeEncodeError as error:
        raise ConfigError(f"{path}: {error.object!r} is not UTF-8: give it another name") from error
    write_durably(path, msgspec.json.format(data, indent=2) + b"\n")


def give_second_name(path: Path, target: Path, may_link: bool = True) -> None:
    """Makes a file known by another name, too: as one file with two names, or as a durable copy.

    Args:
      may_link: whether nobody will write into the file. It is copied too where the file system takes no second name.
    """
    if may_link:
        with contextlib.suppress(OSError):  # the other file system, or one without links
            os.link(path, target)
            return
    with replacing(target) as temporary:
        shutil.copy(path, temporary)


def sync_directory(directory: Path) -> None:
    """Makes names that were created or replaced in a directory survive a power cut, where its file system can."""
    try:
        sync_file(directory)
    except OSError as error:
        if error.errno not in NO_DIRECTORY_SYNC:
            raise
        _say_unsynced(directory, error.strerror)


@functools.lru_cache
def _say_unsynced(directory: Path, reason: str) -> None:
    logger.warning("%s cannot be synced (%s): a power cut may take the names of new files there", directory, reason)


def sync_file(path: Path) -> None:
    """Makes the data written to a file survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_and_close(descriptors: Sequence[int]) -> None:
    """Makes the data written to open files, and the names in open directories, survive a power cut; closes all of them.

    Raises: OSError when the disk does not take the data of one.
    """
    faults: list[OSError] = []
    for descriptor in descriptors:
        for step in (_sync_open, os.close):  # a disk of another host may tell its fault only at the close
            try:
                step(descriptor)
            except OSError as error:
                faults.append(error)
    if faults:
        raise faults[0]


def _sync_open(descriptor: int) -> None:
    if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
        os.fdatasync(descriptor)
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NO_DIRECTORY_SYNC:
            raise


@contextlib.contextmanager
def locked(path: Path, owner: str, *, is_shared: bool = False, patience_seconds: float = 0.0) -> Iterator[None]:
    """Holds a lock file and makes its directory. The lock also ends with the process.

    Args:
      owner: a description of the process that may hold it, for the error.
      is_shared: others that share it may hold it, too.
      patience_seconds: for which it waits for another process that holds the lock.
    Raises: ConfigError when another process holds the lock, or the directory has no locks or cannot be written.
    """
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            descriptor = open_locked(path, owner, is_shared=is_shared)
            break
        except ConfigError as error:
            if time.monotonic() >= deadline or not isinstance(error.__cause__, BlockingIOError):
                raise
        time.sleep(0.1)
    try:
        yield
    finally:
        os.close(descriptor)


def open_locked(path: Path, owner: str, flag: str = "", *, is_shared: bool = False) -> int:
    """Returns the descriptor of a lock file, which holds the lock until it is closed. The other words are `locked`'s.

    Args:
      flag: the flag that named the directory, for the error.
    """
    directory = f"{flag} {path.parent}".lstrip()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_readable = is_shared and os.path.exists(path) and not os.access(path, os.W_OK)  # as in a snapshot
        descriptor = os.open(path, os.O_RDONLY if is_readable else os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigError(f"{directory} cannot be written ({error.strerror}): give another directory") from error
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            fault = f"{directory} belongs to {owner}: end it first, or give another directory"
        else:
            fault = (
                f"{directory} cannot be locked ({error.strerror}): mount its file system with locks, or give another"
            )
        raise ConfigError(fault) from error
    return descriptor


def is_held(path: Path) -> bool:
    """Returns whether a process holds a lock file, true also where that cannot be told. The file stays as it is."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        return not isinstance(error, FileNotFoundError)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def write_pieces(descriptor: int, pieces: Sequence[bytes]) -> None:
    """Writes all pieces to a file.

    Raises: OSError when the disk does not take them; a part may be written then.
    """
    for first in range(0, len(pieces), MAX_PIECES):
        some = pieces[first : first + MAX_PIECES]
        written = os.writev(descriptor, some)
        if written < sum(map(len, some)):  # a signal came, or the disk is nearly full
            rest = memoryview(b"".join(some))[written:]
            while rest:
                rest = rest[os.write(descriptor, rest) :]
