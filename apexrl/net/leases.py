"""Slots on the epsilon ladder, leased to the streams of actors and used again when they are free."""

import heapq


class Leases:
    """Gives out the lowest free slots, so that the ladder stays dense when actors come and go."""

    def __init__(self, max_slots: int):
        self.ladder_size = 0
        self._max_slots = max_slots
        self._held: set[int] = set()
        self._free: list[int] = []  # below ladder_size, a heap

    @property
    def num_free(self) -> int:
        """How many more slots can be leased."""
        return self._max_slots - len(self._held)

    def take(self, count: int) -> tuple[int, ...]:
        """Leases slots; there must be as many free ones."""
        assert count <= self.num_free
        while len(self._free) < count:
            heapq.heappush(self._free, self.ladder_size)
            self.ladder_size += 1
        slots = tuple(heapq.heappop(self._free) for _ in range(count))
        self._held.update(slots)
        return slots

    def give_back(self, slots: tuple[int, ...]) -> None:
        """Frees slots; the ladder ends behind the last one held."""
        self._held.difference_update(slots)
        self.ladder_size = max(self._held, default=-1) + 1
        self._free = [slot for slot in {*self._free, *slots} if slot < self.ladder_size]
        heapq.heapify(self._free)
