"""The experience log: compressed unrolls, numbered for ever; the newest are kept as the bytes that arrived."""

from typing import NamedTuple


class Record(NamedTuple):
    """One unroll as its actor sent it."""

    message: bytes  # the encoded insert message, forwarded unchanged
    block: bytes  # the compressed unroll
    transitions: int  # starts that are valid
    arrived_seconds: float  # of the server's monotonic clock

    @property
    def num_bytes(self) -> int:
        """Bytes of the message and the block."""
        return len(self.message) + len(self.block)


class UnrollLog:
    """A ring of records. Numbers first_number .. end_number - 1 are held, but for what a damaged journal lost."""

    def __init__(self, ring_unrolls: int):
        self._ring: list[Record | None] = [None] * ring_unrolls
        self.first_number = 0
        self.end_number = 0
        self.num_transitions = 0
        self.num_inserted = 0  # transitions since the log began, those evicted included
        self.num_bytes = 0

    def __len__(self) -> int:
        return self.end_number - self.first_number

    @property
    def room(self) -> int:
        """How many records may be appended before an eviction is needed."""
        return len(self._ring) - len(self)

    def skip_to(self, number: int) -> None:
        """Makes `number` the next one; the numbers before it are missing. Only while a log is restored.

        Raises: ValueError when that is not ahead, or the ring cannot hold the gap.
        """
        if len(self) == 0 and number > self.end_number:
            self.first_number = self.end_number = number
        if not 0 <= number - self.end_number <= self.room:
            raise ValueError(f"cannot skip from {self.end_number} to {number}")
        self.end_number = number

    def append(self, record: Record) -> int:
        """Adds a record and returns its number. There must be room."""
        assert self.room > 0
        number = self.end_number
        self._ring[number % len(self._ring)] = record
        self.end_number += 1
        self.num_transitions += record.transitions
        self.num_inserted += record.transitions
        self.num_bytes += record.num_bytes
        return number

    def evict(self) -> int:
        """Drops the oldest record and returns its number."""
        number = self.first_number
        record = self.get(number)
        self._ring[number % len(self._ring)] = None
        self.first_number += 1
        if record is not None:
            self.num_transitions -= record.transitions
            self.num_bytes -= record.num_bytes
        return number

    def get(self, number: int) -> Record | None:
        """Returns a record; None when it was evicted, is missing, or does not exist yet."""
        if not self.first_number <= number < self.end_number:
            return None
        return self._ring[number % len(self._ring)]
