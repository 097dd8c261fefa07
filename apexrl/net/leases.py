"""Slots of the exploration ladder: each stream of an actor leases one, and a free slot is leased again."""

import heapq


class Leases:
    """Leases the lowest free slots, so that the ladder stays dense when actors come and go."""

    def __init__(self, max_slots: int):
        self.ladder_size = 0
        self._max_slots = max_slots
        self._held: set[int] = set()
        self._free: list[int] = []  # a heap of the free slots below ladder_size

    @property
    def num_free(self) -> int:
        """The number of slots that can still be leased."""
        return self._max_slots - len(self._held)

    def lease(self, count: int) -> tuple[int, ...]:
        """Leases `count` slots. At least so many must be free."""
        assert count <= self.num_free
        while len(self._free) < count:
            heapq.heappush(self._free, self.ladder_size)
            self.ladder_size += 1
        slots = tuple(heapq.heappop(self._free) for _ in range(count))
        self._held.update(slots)
        return slots

    def give_back(self, slots: tuple[int, ...]) -> None:
        """Frees slots. The ladder then ends behind the highest slot that is still leased."""
        self._held.difference_update(slots)
        end = self.ladder_size
        while self.ladder_size and self.ladder_size - 1 not in self._held:
            self.ladder_size -= 1
        for slot in slots:
            heapq.heappush(self._free, slot)
        if self.ladder_size < end:
            self._free = [slot for slot in self._free if slot < self.ladder_size]
            heapq.heapify(self._free)
