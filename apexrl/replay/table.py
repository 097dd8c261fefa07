"""Prioritized sampling of single transitions over the log.

A transition's key is unroll_number * K + offset, counted up for ever. Its slot in the priority index is
key % (ring_unrolls * K), so that a key older than the ring is recognised by comparison, and a late priority never lands
on the newer transition that took its slot.
"""

import numpy as np

from apexrl.replay.priority_index import PriorityIndex
from apexrl.types import Sample


def importance_weights(probabilities: np.ndarray, size: int, exponent: float) -> np.ndarray:
    """Returns [B] float32 (size * probability) ** -exponent, divided by the largest of the batch.

    Source: arXiv:1511.05952, section 3.4; the largest weight is taken over the batch, as in dqn_zoo.
    """
    weights = (size * probabilities) ** -exponent
    return (weights / weights.max()).astype(np.float32)


class PrioritizedTable:
    """Priorities of the transitions that the log holds. One owner; mirrors the log's first and end number."""

    def __init__(
        self, ring_unrolls: int, unroll_starts: int, priority_exponent: float, importance_exponent: float, seed: int
    ):
        self._index = PriorityIndex(ring_unrolls, unroll_starts)
        self._unroll_starts = unroll_starts
        self._ring_unrolls = ring_unrolls
        self._priority_exponent = priority_exponent
        self._importance_exponent = importance_exponent
        self._rng = np.random.default_rng(seed)
        self._first_key = 0
        self._end_key = 0
        self.num_stale = 0

    def insert(self, number: int, priorities: np.ndarray) -> None:
        """Makes an unroll sampleable: priorities [K] before the exponent, 0 where no transition starts."""
        self._index.set_row(number % self._ring_unrolls, self._powers(priorities))
        self._end_key = (number + 1) * self._unroll_starts

    def evict(self, number: int) -> None:
        """Takes the oldest unroll out of sampling."""
        self._index.set_row(number % self._ring_unrolls, np.zeros(self._unroll_starts))
        self._first_key = (number + 1) * self._unroll_starts

    def sample(self, batch_size: int, size: int) -> Sample:
        """Draws a batch; `size` is the number of transitions held.

        Raises: ValueError when every priority is zero.
        """
        slots, probabilities = self._index.sample(batch_size, self._rng)
        keys = self._first_key + (slots - self._first_key) % self._index.num_slots
        return Sample(keys, probabilities, importance_weights(probabilities, size, self._importance_exponent))

    def update_priorities(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """Sets the priorities of the keys still held; the others are ignored and counted in `num_stale`.

        A slot of priority zero is no transition and stays so.
        """
        held = (keys >= self._first_key) & (keys < self._end_key)
        self.num_stale += int(len(keys) - held.sum())
        slots = keys[held] % self._index.num_slots
        exists = self._index.get(slots) > 0
        self._index.set_slots(slots[exists], self._powers(priorities[held][exists]))

    def can_sample(self) -> bool:
        """False when nothing has a priority."""
        return self._index.total() > 0

    def priority_quantiles(self, quantiles: tuple[float, ...], num_draws: int = 1024) -> np.ndarray:
        """Returns quantiles of the priorities (before the exponent) of transitions drawn uniformly."""
        first, end = self._first_key, self._end_key
        if end == first:
            return np.zeros(len(quantiles))
        slots = np.random.default_rng(0).integers(first, end, num_draws) % self._index.num_slots
        powers = self._index.get(slots)
        powers = powers[powers > 0]
        if not len(powers) or self._priority_exponent == 0:
            return np.zeros(len(quantiles))
        return np.quantile(powers, quantiles) ** (1 / self._priority_exponent)

    def _powers(self, priorities: np.ndarray) -> np.ndarray:
        """Returns priority ** exponent, but 0 for 0 whatever the exponent: there is no transition."""
        return np.where(priorities > 0, priorities.astype(np.float64) ** self._priority_exponent, 0.0)
