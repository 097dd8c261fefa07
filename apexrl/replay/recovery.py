"""The start of a server: it reads its journal and mends what is damaged. Files, no sockets, no clock."""

import filecmp
import itertools
import logging
import os
import secrets
from pathlib import Path
from typing import NamedTuple

import msgspec

from apexrl.errors import ConfigError
from apexrl.files import give_second_name, sync_directory, sync_file, write_durably
from apexrl.replay.journal import (
    IDENTITY_FILE,
    LogIdentity,
    check_format,
    read_identity,
    read_segments,
    segment_path,
)
from apexrl.replay.segment import FORMAT, Entry, Scan, SegmentHeader, pack, pack_header

logger = logging.getLogger(__name__)


class Recovered(NamedTuple):
    """The content of a journal."""

    identity: LogIdentity
    entries: list[Entry]  # in the order of their numbers, which may have gaps
    end_number: int


def recover(directory: Path) -> Recovered | None:
    """Reads a journal and mends it: truncates an incomplete last record, keeps damaged files as `*.damaged`.

    Needs the `Lock`. The identity that it returns begins the next life of the server; the first append writes it down.

    Returns: None when the directory holds no journal.
    Raises: ConfigError when another version wrote it, or when no file says which log it is; OSError when it cannot be
      mended.
    """
    identity = read_identity(directory)
    scans = list(read_segments(directory))
    for _, found in scans:  # before anything is changed
        if found.header is not None:
            check_format(found.header.format, directory)
    if identity is None:
        headers = [found.header for _, found in scans if found.header is not None]
        if not headers and scans:
            raise ConfigError(f"{directory} holds unrolls, but not whose: both {IDENTITY_FILE} and headers are lost")
        if not headers:
            return None
        logger.warning("%s is missing or damaged: learners will read the log from its beginning", IDENTITY_FILE)
        lost = tuple(dict.fromkeys(header.log for header in headers))
        identity = LogIdentity(FORMAT, secrets.token_hex(8), (0,), headers[-1].spec, lost)
    entries: dict[int, Entry] = {}
    for path, found in scans:
        if found.damages and not _cut_off_torn_end(path, found, is_last=path == scans[-1][0]):
            _set_aside(path, found, identity)
        elif found.entries:
            _sync(path)  # a server that was killed had not synced all of it
        else:
            path.unlink()
        for entry in found.entries:  # when a number was written twice, only the later unroll was acknowledged
            entries[entry.number] = entry
    end = max(entries, default=identity.lives[-1] - 1) + 1
    identity = msgspec.structs.replace(identity, lives=(*identity.lives, end))
    return Recovered(identity, [entries[number] for number in sorted(entries)], end)


def _cut_off_torn_end(path: Path, found: Scan, is_last: bool) -> bool:
    """Truncates the last file to its whole records; returns False when its damage is another one."""
    torn = found.damages[-1]
    if not is_last or len(found.damages) > 1 or torn.offset != found.end_of_records or found.header is None:
        return False
    logger.warning("%s ends in %d bytes of an unfinished record: cut off", path.name, torn.num_bytes)
    os.truncate(path, found.end_of_records)
    return True


def _sync(path: Path) -> None:
    """Makes a file durable. Where that fails it is written anew: a later sync would succeed all the same."""
    try:
        sync_file(path)
    except OSError as error:
        logger.warning("%s cannot be synced (%s): it is written anew", path, error.strerror)
        write_durably(path, path.read_bytes())


def _name_aside(path: Path) -> Path:
    """Returns the name under which a damaged file is kept: one that no file has, or a copy of just this content."""
    for count in itertools.count(1):
        aside = path.with_name(f"{path.name}.{count}.damaged" if count > 1 else f"{path.name}.damaged")
        if not aside.exists() or filecmp.cmp(path, aside, shallow=False):
            return aside
    raise AssertionError("there is always another name")


def _set_aside(path: Path, found: Scan, identity: LogIdentity) -> None:
    """Keeps a damaged file as `*.damaged`, and writes its readable records anew, into a file for each gapless run.

    A kill at any time leaves all of them in files that the next start reads.
    """
    aside = _name_aside(path)
    logger.error(
        "%s is damaged in %d places (%d bytes): set aside as %s, %d unrolls of it could be read",
        path, len(found.damages), sum(damage.num_bytes for damage in found.damages), aside.name, len(found.entries),
    )  # fmt: skip
    if not aside.exists():
        give_second_name(path, aside)
    header = found.header or SegmentHeader(FORMAT, identity.log, 0, 0, identity.spec)
    runs: dict[Path, list[bytes]] = {}
    next_number = -1
    for entry in found.entries:
        if entry.number != next_number:
            begin = msgspec.structs.replace(header, first_number=entry.number)
            pieces = runs[segment_path(path.parent, entry.number)] = [pack_header(begin)]
        pieces += pack(*entry)
        next_number = entry.number + 1
    for mended in reversed(runs):  # one of the damaged file's name comes last
        write_durably(mended, b"".join(runs[mended]))
    if path not in runs:
        path.unlink()
    sync_directory(path.parent)
