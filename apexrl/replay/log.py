"""The experience log: numbered compressed unrolls. It keeps the newest, as the bytes that arrived."""

from typing import NamedTuple


class LogEntry(NamedTuple):
    """One unroll as its actor sent it."""

    message: bytes  # the encoded insert message, forwarded unchanged
    block: bytes  # the compressed unroll; of either, a large one may be a memoryview of where it was received
    transitions: int  # starts that are valid
    arrived_seconds: float  # by the server's monotonic clock

    @property
    def num_bytes(self) -> int:
        """Bytes of the message and the block."""
        return len(self.message) + len(self.block)


class UnrollLog:
    """A ring of entries. Numbers first_number .. end_number - 1 are held, but for those that a damaged journal lost."""

    def __init__(self, ring_unrolls: int):
        self._ring: list[LogEntry | None] = [None] * ring_unrolls
        self.first_number = 0
        self.end_number = 0
        self.num_transitions = 0
        self.num_inserted = 0  # transitions since the log began, those evicted included
        self.num_bytes = 0

    def __len__(self) -> int:
        return self.end_number - self.first_number

    @property
    def free(self) -> int:
        """Entries that may be appended before an eviction is needed."""
        return len(self._ring) - len(self)

    def skip_to(self, number: int) -> None:
        """Makes `number` the next one; the numbers before it are missing. For who follows another log.

        Raises: ValueError when that is not ahead, or the ring cannot hold the gap.
        """
        if len(self) == 0 and number > self.end_number:
            self.first_number = self.end_number = number
        if not 0 <= number - self.end_number <= self.free:
            raise ValueError(f"cannot skip from {self.end_number} to {number}")
        self.end_number = number

    def append(self, entry: LogEntry) -> int:
        """Adds an entry and returns its number. One must be free."""
        assert self.free > 0
        number = self.end_number
        self._ring[number % len(self._ring)] = entry
        self.end_number += 1
        self.num_transitions += entry.transitions
        self.num_inserted += entry.transitions
        self.num_bytes += entry.num_bytes
        return number

    def evict(self) -> int:
        """Drops the oldest entry and returns its number."""
        number = self.first_number
        entry = self.get(number)
        self._ring[number % len(self._ring)] = None
        self.first_number += 1
        if entry is not None:
            self.num_transitions -= entry.transitions
            self.num_bytes -= entry.num_bytes
        return number

    def get(self, number: int) -> LogEntry | None:
        """Returns an entry; None when it was evicted, is missing, or does not exist yet."""
        if not self.first_number <= number < self.end_number:
            return None
        return self._ring[number % len(self._ring)]
