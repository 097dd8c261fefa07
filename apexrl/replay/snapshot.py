"""The snapshot of the tables in a journal's directory: one file with a checksum, replaced atomically."""

import logging
import zlib
from pathlib import Path

import msgspec

from apexrl.errors import WireError
from apexrl.files import write_durably
from apexrl.replay.table import TableState

logger = logging.getLogger(__name__)

MAGIC = b"apxS"


class Snapshot(msgspec.Struct, frozen=True):
    """The state of the tables when the log held the unrolls first_number to end_number - 1."""

    log: str
    life: int
    first_number: int
    end_number: int
    tables: dict[str, TableState]
    inserted: int = 0  # transitions since the log began


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
    data = path.read_bytes()
    if data[:4] != MAGIC or zlib.crc32(memoryview(data)[8:]).to_bytes(4, "little") != data[4:8]:
        raise WireError(f"{path.name} is damaged")
    try:
        return msgspec.msgpack.decode(data[8:], type=Snapshot)
    except (msgspec.MsgspecError, ValueError) as error:
        raise WireError(f"{path.name} is of another version: {error}") from error


def recover_snapshot(path: Path, log: str) -> Snapshot | None:
    """Returns the snapshot of a log; None when there is none, or when it is unusable and has been renamed."""
    if not path.exists():
        return None
    try:
        snapshot = load_snapshot(path)
        if snapshot.log == log:
            return snapshot
        fault = f"{path.name} is of another log"
    except WireError as error:
        fault = str(error)
    aside = path.with_name(path.name + ".damaged")
    logger.error("%s: set aside as %s", fault, aside.name)
    path.rename(aside)
    return None
