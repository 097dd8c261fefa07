"""The files of unrolls in a directory, in the order of their checked headers: names may lie. Reads only.

A file belongs to a log when its header says so, whatever its name is. Its name counts only where its header cannot be
read. So copies and exchanged names cost no unroll.
"""

import logging
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from apexrl.errors import ConfigError, fault_of
from apexrl.files import open_regular, read_whole
from apexrl.replay.segment import Entry, Scan, SegmentHeader, read_header, scan
from apexrl.types import StreamSpec

logger = logging.getLogger(__name__)

SEGMENT_PATTERN = "unrolls-*.log"
MAX_SEGMENT_BYTES = 2**31  # far more than the 32 MiB after which a file gets no further records
_NAME = re.compile(r"unrolls-(\d{16,20})\.log", re.ASCII)


class SegmentFile(NamedTuple):
    """A file of unrolls by its header, or by its name where that cannot be read."""

    path: Path
    header: SegmentHeader | None

    @property
    def first_number(self) -> int:
        """The number of its first unroll."""
        return self.header.first_number if self.header is not None else first_number_of(self.path)

    @property
    def is_in_place(self) -> bool:
        """Whether it has the name that a server gives such a file."""
        return self.path == segment_path(self.path.parent, self.first_number)

    def is_of(self, logs: Collection[str]) -> bool:
        """Whether it holds unrolls of one of some logs; one whose header cannot be read, by its name."""
        return self.header.log in logs if self.header is not None else is_name(self.path)

    def scan(self) -> Scan:
        """Reads the whole file.

        Raises: OSError.
        """
        return scan(read_whole(self.path, MAX_SEGMENT_BYTES), self.first_number)


def segment_path(directory: Path, first_number: int) -> Path:
    """Returns the path of the file that begins with an unroll."""
    return directory / f"unrolls-{first_number:016d}.log"


def is_name(path: Path) -> bool:
    """Returns whether a name is one that a server gives its files."""
    return path == segment_path(path.parent, first_number_of(path))


def first_number_of(path: Path) -> int:
    """Returns the number of the first unroll in a file, as its name says."""
    found = _NAME.fullmatch(path.name)
    return int(found[1]) if found is not None else 0


def segment_files(directory: Path) -> list[SegmentFile]:
    """Returns the files of unrolls of all logs, oldest first; of those that begin with one number, the real one last.

    Others that are named like them are left out: directories, pipes, and what has neither a header nor a right name.
    """
    files = [file for path in directory.glob(SEGMENT_PATTERN) if (file := _segment_file(path)) is not None]
    return sorted(files, key=lambda file: (file.first_number, file.is_in_place, file.path.name))


def are_of(files: Iterable[SegmentFile], logs: Collection[str], spec: StreamSpec) -> bool:
    """Returns whether files are of some logs with a spec, as far as their headers tell, which have checksums."""
    headers = [file.header for file in files if file.header is not None]
    own = [header for header in headers if header.log in logs]
    return spec.unroll_starts > 0 and (not headers or (bool(own) and all(header.spec == spec for header in own)))


def strays(directory: Path) -> list[Path]:
    """Returns what is named like a file of unrolls and is none."""
    paths = (path for path in directory.glob(SEGMENT_PATTERN) if _segment_file(path) is None)
    return sorted(path for path in paths if os.path.lexists(path))  # others were evicted meanwhile


def _segment_file(path: Path) -> SegmentFile | None:
    header = None
    try:
        with open_regular(path) as file:
            header = read_header(file)
    except OSError:  # its reader will say why it cannot be read
        if not path.is_file():
            return None
    return SegmentFile(path, header) if header is not None or is_name(path) else None


def read_segments(files: Iterable[SegmentFile]) -> Iterator[tuple[SegmentFile, Scan]]:
    """Yields files and their content, without those that were evicted meanwhile.

    Raises: ConfigError when one cannot be read.
    """
    for file in files:
        try:
            yield file, file.scan()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise ConfigError(f"{file.path} cannot be read ({fault_of(error)})") from error


def ends_of(files: Sequence[SegmentFile]) -> dict[Path, int]:
    """Returns the number before which a file's unrolls end, by its path: from there on a later file has them.

    A number that two files hold was acknowledged with the later one. Only headers tell where that one begins.
    """
    firsts = [file.first_number for file in files if file.header is not None]
    return {file.path: min((n for n in firsts if n > file.first_number), default=sys.maxsize) for file in files}


def in_order(files: Sequence[SegmentFile]) -> Iterator[Entry]:
    """Yields the readable unrolls of files in order, each number once.

    Raises: ConfigError when a file cannot be read.
    """
    held: dict[int, Entry] = {}
    ends = ends_of(files)
    for file, found in read_segments(files):
        if found.damages:
            num_bytes = sum(damage.num_bytes for damage in found.damages)
            logger.warning("%d bytes of %s are no records: damaged, or being written", num_bytes, file.path)
        for number in sorted(number for number in held if number < file.first_number):
            yield held.pop(number)
        held.update((entry.number, entry) for entry in found.entries if entry.number < ends[file.path])
    for number in sorted(held):
        yield held[number]
