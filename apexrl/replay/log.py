"""The experience log: compressed unrolls, numbered for ever; the newest are kept as the bytes that arrived."""

from typing import NamedTuple


class Record(NamedTuple):
    """One unroll as its actor sent it."""

    message: bytes  # the encoded insert message, forwarded unchanged
    block: bytes  # the compressed unroll
    transitions: int  # starts that are valid
    arrived_seconds: float  # of the server's monotonic clock


class UnrollLog:
    """A ring of records. Numbers first_number .. end_number - 1 are held. One owner."""

    def __init__(self, ring_unrolls: int):
        self._ring: list[Record | None] = [None] * ring_unrolls
        self.first_number = 0
        self.end_number = 0
        self.num_transitions = 0
        self.num_bytes = 0

    def __len__(self) -> int:
        return self.end_number - self.first_number

    @property
    def is_full(self) -> bool:
        """True when the next append needs an eviction first."""
        return len(self) == len(self._ring)

    def append(self, record: Record) -> int:
        """Adds a record and returns its number. The ring must not be full."""
        assert not self.is_full
        number = self.end_number
        self._ring[number % len(self._ring)] = record
        self.end_number += 1
        self.num_transitions += record.transitions
        self.num_bytes += len(record.message) + len(record.block)
        return number

    def evict(self) -> int:
        """Drops the oldest record and returns its number."""
        number = self.first_number
        record = self[number]
        self._ring[number % len(self._ring)] = None
        self.first_number += 1
        self.num_transitions -= record.transitions
        self.num_bytes -= len(record.message) + len(record.block)
        return number

    def __getitem__(self, number: int) -> Record:
        """Returns a record that is held.

        Raises: IndexError when it was evicted, or does not exist yet.
        """
        record = self._ring[number % len(self._ring)]
        if not self.first_number <= number < self.end_number or record is None:
            raise IndexError(f"unroll {number} is not among {self.first_number}..{self.end_number - 1}")
        return record
