"""The start of a server: it reads its journal and mends what is damaged. Files, no sockets, no clock."""

import itertools
import logging
import math
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from apexrl.errors import ConfigError
from apexrl.files import give_second_name, name_aside, set_aside, sync_directory, sync_file, write_durably
from apexrl.replay.journal import IDENTITY_FILE, LogIdentity, files_of, read_identity, told_by_headers
from apexrl.replay.segment import FORMAT, Entry, Scan, SegmentHeader, pack, pack_header
from apexrl.replay.segment_files import (
    SegmentFile,
    ends_of,
    is_name,
    read_segments,
    segment_files,
    segment_path,
    strays,
)

logger = logging.getLogger(__name__)


class Recovered(NamedTuple):
    """The content of a journal."""

    identity: LogIdentity
    entries: list[Entry]  # in the order of their numbers, which may have gaps
    end_number: int


def recover(directory: Path, capacity: int = sys.maxsize, max_bytes: float = math.inf) -> Recovered | None:
    """Reads a journal and mends it: truncates an incomplete last record, keeps damaged files as `*.damaged`.

    Needs the `Lock`. The identity that it returns begins the next life of the server; the first append writes it down.
    Each file of the log gets the name that its header says. A file that has a server's name and is none of the log's is
    kept as `*.aside`. So is another one of unrolls that a file in its place holds, such as a copy.

    Args:
      capacity, max_bytes: of the newest unrolls, by their starts and their bytes. Once these are read, files that are
        older stay as they are, unread.
    Returns: None when the directory holds no journal.
    Raises: ConfigError when another version wrote it, or when no file says which log it is; OSError when it cannot be
      mended.
    """
    identity = _identity(directory)
    if identity is None:
        return None
    _put_in_place(directory, identity)
    files = files_of(directory, identity)
    scans, ends, num_bytes = list[tuple[SegmentFile, Scan]](), ends_of(files), 0
    most_unrolls, newest = -(-capacity // identity.spec.unroll_starts), None
    held: dict[int, tuple[Entry, SegmentFile]] = {}
    for file, found in read_segments(reversed(files)):
        scans.append((file, found))
        for entry in reversed(found.entries):
            if entry.number < ends[file.path] and entry.number not in held:
                held[entry.number] = entry, file
                num_bytes += len(entry.message) + len(entry.block)
        newest = max(held, default=None) if newest is None else newest  # in the first file that has any
        if newest is not None and (file.first_number <= newest + 1 - most_unrolls or num_bytes >= max_bytes):
            break
    for file, found in scans:
        used = [entry for entry in found.entries if held.get(entry.number) == (entry, file)]
        if not found.entries and _is_whole(file, found, files[-1]):
            file.path.unlink()  # a later file may begin before it, and would end where it begins
        elif file.is_in_place and used and _is_whole(file, found, files[-1]):
            _sync(file.path)  # a server that was killed had not synced all of it
        else:
            _set_aside(file, found, used, identity)
    entries = [held[number][0] for number in sorted(held)]
    end = max(held, default=identity.lives[-1] - 1) + 1
    identity = msgspec.structs.replace(identity, lives=(*identity.lives, end))
    return Recovered(identity, entries, end)


def _identity(directory: Path) -> LogIdentity | None:
    """Returns the identity of a log before its next life, None without one; sets a damaged log.json aside."""
    identity, files = read_identity(directory), segment_files(directory)
    told = told_by_headers(directory, files)  # also where it is not needed: another version is refused
    if identity is not None:
        return identity
    if told is None and any(is_name(file.path) for file in files):
        raise ConfigError(f"{directory} holds unrolls, but not whose: both {IDENTITY_FILE} and headers are lost")
    if told is None:
        return None
    logger.warning("%s is missing or damaged: learners will read the log from its beginning", IDENTITY_FILE)
    if os.path.lexists(directory / IDENTITY_FILE):
        set_aside(directory / IDENTITY_FILE, "damaged")
    return LogIdentity(FORMAT, secrets.token_hex(8), (0,), told.spec, (told.log, *told.ancestors))


def _put_in_place(directory: Path, identity: LogIdentity) -> None:
    """Gives each file of a log the name that its header says, where no other file of the log has it.

    A kill at any time leaves names that the next start reads: it asks the headers. Other logs' files, and what is no
    file of unrolls, lose only names that a server gives.
    """
    own = files_of(directory, identity)
    others = [*strays(directory), *(file.path for file in segment_files(directory) if file not in own)]
    for path in others:
        if is_name(path):
            logger.error("%s is not of this log: set aside as %s", path, set_aside(path, "aside").name)
        else:
            logger.warning("%s is not of this log: it is left as it is", path)
    misplaced = [file for file in own if not file.is_in_place]
    for i, file in enumerate(misplaced):
        if is_name(file.path):  # perhaps that of another one, which has this one's
            misplaced[i] = file._replace(path=file.path.rename(_free_name(file.path)))
    for file in misplaced:
        right = segment_path(directory, file.first_number)
        if not os.path.lexists(right):
            logger.warning("%s begins with unroll %d: renamed to %s", file.path, file.first_number, right.name)
            file.path.rename(right)
    sync_directory(directory)


def _free_name(path: Path) -> Path:
    """Returns a name of a file of unrolls that no file has, and no server gives."""
    names = (path.with_name(f"{path.stem}.{count}.log") for count in itertools.count(1))
    return next(name for name in names if not os.path.lexists(name))


def _is_whole(file: SegmentFile, found: Scan, last: SegmentFile) -> bool:
    """Returns whether a file has no damage, after the last one was truncated to its whole records."""
    if not found.damages:
        return True
    path, torn = file.path, found.damages[-1]
    if file != last or len(found.damages) > 1 or torn.offset != found.end_of_records or found.header is None:
        return False
    logger.warning("%s ends in %d bytes of an unfinished record: cut off", path.name, torn.num_bytes)
    if path.is_symlink() or path.stat().st_nlink > 1:  # others have the file, too
        write_durably(path, path.read_bytes()[: found.end_of_records])
    else:
        os.truncate(path, found.end_of_records)
    return True


def _sync(path: Path) -> None:
    """Makes a file durable. Where that fails it is written anew: a later sync would succeed all the same."""
    try:
        sync_file(path)
    except OSError as error:
        logger.warning("%s cannot be synced (%s): it is written anew", path, error.strerror)
        write_durably(path, path.read_bytes())


def _set_aside(file: SegmentFile, found: Scan, used: Sequence[Entry], identity: LogIdentity) -> None:
    """Keeps a file aside, and writes those of its records anew that are used, into a file for each gapless run.

    A kill at any time leaves all of them in files that the next start reads.
    """
    path, damages = file.path, found.damages
    aside = name_aside(path, "damaged" if damages else "aside")
    fault = f"is damaged in {len(damages)} places ({sum(damage.num_bytes for damage in damages)} bytes)"
    if not damages:
        fault = f"holds unrolls of {segment_path(path.parent, file.first_number).name}, too"
    logger.error("%s %s: set aside as %s, %d unrolls of it are used", path, fault, aside.name, len(used))
    if not aside.exists():
        give_second_name(path, aside)
    header = found.header or SegmentHeader(FORMAT, identity.log, 0, 0, identity.spec)
    runs: dict[Path, list[bytes]] = {}
    next_number = -1
    for entry in used:
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
