"""Small files that others read while they are written."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from apexrl.errors import ConfigError


def write_json(path: Path, value: object) -> None:
    """Replaces a JSON file; readers see the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")
    temporary.replace(path)


def write_durably(path: Path, data: bytes) -> None:
    """Replaces a file; after a power cut it is the old one or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Makes names that were created or replaced in a directory survive a power cut."""
    sync_file(directory)


def sync_file(path: Path) -> None:
    """Makes what was written to a file survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked(path: Path, owner: str) -> Iterator[None]:
    """Holds a lock file in a directory, which is made; the end of the process gives it back, too.

    Raises: ConfigError when another process, `owner` in words, holds it, or the directory cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ConfigError(f"{path.parent} cannot be written ({error.strerror}): give another --run-dir") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"{path.parent} belongs to {owner}: end it first, or give another --run-dir") from error
        yield
    finally:
        os.close(descriptor)
