"""Durable files: others may read them while they are replaced, and a kill or a power cut leaves them whole.

A file is written under one fixed temporary name in its own directory, made durable, and renamed. A kill can leave that
temporary file; the next write of the same file uses it again.
"""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec

from apexrl.errors import ConfigError

TEMPORARY = ".tmp"


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields the path of a temporary file, which then replaces the file: whole and durable, or not at all.

    Raises: OSError when the disk does not take it. The temporary file is gone then, and the old file stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + TEMPORARY)
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
    """Replaces a JSON file durably."""
    write_durably(path, msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")


def give_second_name(path: Path, target: Path, may_link: bool = True) -> None:
    """Makes a file known by another name, too: as one file with two names, or as a durable copy.

    Args:
      may_link: whether nobody will write into the file. It is copied too where the file system takes no second name.
    """
    if may_link:
        with contextlib.suppress(OSError):  # the other file system, or one without links
            os.link(path, target)
            return
    shutil.copy(path, target)
    sync_file(target)


def sync_directory(directory: Path) -> None:
    """Makes names that were created or replaced in a directory survive a power cut."""
    sync_file(directory)


def sync_file(path: Path) -> None:
    """Makes the data written to a file survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked(path: Path, owner: str) -> Iterator[None]:
    """Holds a lock file and makes its directory. The lock also ends with the process.

    Args:
      owner: a description of the process that may hold it, for the error.
    Raises: ConfigError when another process holds the lock, or the directory cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ConfigError(f"{path.parent} cannot be written ({error.strerror}): give another directory") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"{path.parent} belongs to {owner}: end it first, or give another directory") from error
        yield
    finally:
        os.close(descriptor)
