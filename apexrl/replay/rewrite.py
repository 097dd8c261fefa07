"""A file of a journal that is written again from the log in memory, because the disk may not have it whole."""

import contextlib
from pathlib import Path
from typing import NamedTuple

from apexrl.errors import JournalError
from apexrl.files import write_durably
from apexrl.replay.log import UnrollLog
from apexrl.replay.segment import SegmentHeader, pack, pack_header


class Rewrite(NamedTuple):
    """The bytes of such a file. It holds all that it needs, so any thread may `write` it."""

    first: int  # the number with which the file begins that it replaces
    number: int  # with which it begins itself: those before have left the log
    path: Path
    pieces: list[bytes]
    replaced_bytes: int

    @classmethod
    def of(cls, path: Path, header: SegmentHeader, first: int, numbers: range, log: UnrollLog) -> "Rewrite":
        """Takes unrolls of the log, which has all of them, for the place of the file that begins with `first`.

        Raises: OSError when the disk does not tell the size of the file.
        """
        pieces = [pack_header(header)]
        for number in numbers:
            entry = log.get(number)
            assert entry is not None
            pieces += pack(number, entry.message, entry.block)
        replaced_bytes = 0
        with contextlib.suppress(FileNotFoundError):
            replaced_bytes = path.stat().st_size
        return cls(first, numbers[0], path, pieces, replaced_bytes)

    def write(self) -> None:
        """Writes the file and waits until the disk has it.

        Raises: JournalError when it does not take it; the old one stays.
        """
        try:
            write_durably(self.path, b"".join(self.pieces))
        except OSError as error:
            raise JournalError(f"the journal in {self.path.parent} cannot be written ({error.strerror})") from error
