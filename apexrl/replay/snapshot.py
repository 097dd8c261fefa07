"""The snapshot of the tables in a journal's directory: one file with a checksum, replaced atomically."""

import logging
import os
import zlib
from pathlib import Path

import msgspec

from apexrl.errors import MALFORMED, WireError, fault_of
from apexrl.files import read_whole, set_aside, write_durably
from apexrl.replay.table import TableState
from apexrl.types import Count

logger = logging.getLogger(__name__)

MAGIC = b"apxS"
MAX_SNAPSHOT_BYTES = 2**32  # eight bytes for each of half a milliard transitions


class Snapshot(msgspec.Struct, frozen=True):
    """The state of the tables when the log held the unrolls first_number to end_number - 1."""

    log: str
    life: Count
    first_number: Count
    end_number: Count
    tables: dict[str, TableState]
    inserted: Count = 0  # transitions since the log began


def write_snapshot(path: Path, snapshot: Snapshot) -> None:
    """Replaces the file.

    Raises: OSError when the disk does not take it; the old file is untouched then.
    """
    body = msgspec.msgpack.encode(snapshot)
    write_durably(path, MAGIC + zlib.crc32(body).to_bytes(4, "little") + body)


def load_snapshot(path: Path) -> Snapshot:
    """Returns the snapshot in a file.

    Raises: OSError when it cannot be read, WireError when it is damaged.
    """
    data = read_whole(path, MAX_SNAPSHOT_BYTES)
    if data[:4] != MAGIC or zlib.crc32(memoryview(data)[8:]).to_bytes(4, "little") != data[4:8]:
        raise WireError(f"{path.name} is damaged")
    try:
        return msgspec.msgpack.decode(data[8:], type=Snapshot)
    except MALFORMED as error:
        raise WireError(f"{path.name} is of another version: {fault_of(error)}") from error


def recover_snapshot(path: Path, log: str) -> Snapshot | None:
    """Returns the snapshot of a log; None when there is none, or when it is unusable and has been renamed."""
    if not os.path.lexists(path):
        return None
    try:
        snapshot = load_snapshot(path)
        if snapshot.log == log:
            return snapshot
        fault = f"{path.name} is of another log"
    except WireError as error:
        fault = str(error)
    except OSError as error:
        fault = f"{path.name} cannot be read ({fault_of(error)})"
    logger.error("%s: set aside as %s", fault, set_aside(path, "damaged").name)
    return None
