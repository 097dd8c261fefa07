"""The row of an unroll, or of a transition: everything but its frames, as named columns of 32-bit words.

So it is one copy, and one select.
"""

import math
from typing import NamedTuple

import numpy as np

WORD_BYTES = 4


class Column(NamedTuple):
    """One named array of a row."""

    start: int  # its first word
    entries: int
    shape: tuple[int, ...]  # the shape of one entry
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Bytes of its values; a column ends at a whole word."""
        return self.entries * math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def words(self) -> int:
        """Words that it takes."""
        return -(-self.num_bytes // WORD_BYTES)


class RowLayout:
    """Where the columns of a row lie. Columns are added once, in order."""

    def __init__(self) -> None:
        self.columns: dict[str, Column] = {}
        self.words = 0

    def add(self, name: str, entries: int, dtype: str, shape: tuple[int, ...] = ()) -> None:
        """Appends a column."""
        column = Column(self.words, entries, shape, dtype)
        self.columns[name] = column
        self.words += column.words

    def write(self, rows: np.ndarray, name: str, values: np.ndarray) -> None:
        """Writes values [.., entries, *shape] into rows [.., words] int32."""
        column = self.columns[name]
        words = rows[..., column.start : column.start + column.words]
        place = words.view(np.uint8)[..., : column.num_bytes].view(column.dtype)
        place[...] = values.reshape(place.shape)
