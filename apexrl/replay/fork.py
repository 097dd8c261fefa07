"""A fork of a log: a new log that begins with the unrolls of another one. Files only.

A file of unrolls is never written again once another one follows it, so both logs share it as one file with two names.
The newest is copied, because the next server may cut an unfinished record off it. Where the file system takes no second
name, all are copied.
"""

import contextlib
import secrets
from pathlib import Path

import msgspec

from apexrl.errors import ConfigError, WireError
from apexrl.files import give_second_name, sync_directory, write_durably
from apexrl.replay.journal import IDENTITY_FILE, SNAPSHOT_FILE, Lock, LogIdentity, files_of, read_identity
from apexrl.replay.segment import SegmentHeader, pack, pack_header
from apexrl.replay.segment_files import SegmentFile, ends_of
from apexrl.replay.snapshot import load_snapshot, write_snapshot
from apexrl.types import LogPosition


def fork_log(source: Path, target: Path, until: LogPosition | None = None) -> tuple[str, str]:
    """Makes the journal of a new log; returns the names of the old log and of the new one.

    Unrolls keep their numbers, and lives go on. The name is new: nobody takes a replica or a snapshot of one log for
    one of the other.

    Args:
      target: a directory that holds no journal.
      until: end where a learner was. The priorities of that time are not known, so those of the actors are taken.
    Raises: ConfigError when a server writes the old journal, when log.json does not say which log it is, or when
      nothing from before `until` is left; OSError when the disk does not take the new one.
    """
    with contextlib.closing(Lock(source)):
        identity = read_identity(source)
        if identity is None:
            raise ConfigError(f"{source / IDENTITY_FILE} is missing or damaged: resume that run first, which mends it")
        forked = msgspec.structs.replace(
            identity, log=secrets.token_hex(8), ancestors=(*identity.ancestors, identity.log)
        )
        target.mkdir(parents=True, exist_ok=True)
        files = files_of(source, identity)
        if until is not None:
            end = until.next_number if until.log in (identity.log, *identity.ancestors) else 0
            files = [file for file in files if file.first_number < end]
            if not files:
                raise ConfigError(f"{source} holds nothing from before unroll {end} any more: fork a newer checkpoint")
            ends = ends_of(files)
            for file in files:
                if ends[file.path] >= end:
                    _copy_until(file, target, end, forked)
            files = [file for file in files if ends[file.path] < end]
            forked = msgspec.structs.replace(forked, lives=tuple(life for life in forked.lives if life < end))
        for file in files:
            may_link = until is not None or file != files[-1]
            give_second_name(file.path, target / file.path.name, may_link)
        if until is None:
            _copy_snapshot(source, target, identity.log, forked.log)
        write_durably(target / IDENTITY_FILE, msgspec.json.encode(forked))
        sync_directory(target)
    return identity.log, forked.log


def _copy_until(file: SegmentFile, target: Path, end: int, identity: LogIdentity) -> None:
    """Copies the readable records before a number, if there are any."""
    found = file.scan()
    kept = [entry for entry in found.entries if entry.number < end]
    if kept:
        header = found.header or SegmentHeader(identity.format, identity.log, 0, kept[0].number, identity.spec)
        pieces = [piece for entry in kept for piece in pack(*entry)]
        write_durably(target / file.path.name, b"".join([pack_header(header), *pieces]))


def _copy_snapshot(source: Path, target: Path, log: str, name: str) -> None:
    """Copies the priorities. Those of another log, or that cannot be read, are left: the actors' own count then."""
    with contextlib.suppress(OSError, WireError):
        snapshot = load_snapshot(source / SNAPSHOT_FILE)
        if snapshot.log == log:
            write_snapshot(target / SNAPSHOT_FILE, msgspec.structs.replace(snapshot, log=name))
