"""One replay: the log, the table that samples it, and the limiter between inserts and samples."""

import numpy as np

from apexrl.config import ReplayConfig
from apexrl.replay.limiter import Limiter
from apexrl.replay.log import Record, UnrollLog
from apexrl.replay.table import PrioritizedTable
from apexrl.types import Sample, StreamSpec


class Replay:
    """Owns all experience of a server. Single-threaded; inserts are always taken, the limiter only says who waits."""

    def __init__(self, config: ReplayConfig, spec: StreamSpec, batch_size: int, seed: int):
        """Makes an empty replay.

        Args:
          batch_size: of the learner; the limiter's slack must hold a few batches.
        Raises: ValueError when the capacity cannot hold min_size_to_sample.
        """
        if config.capacity < config.min_size_to_sample:
            raise ValueError(
                f"capacity {config.capacity} is smaller than min_size_to_sample {config.min_size_to_sample}"
            )
        self.config = config
        self.spec = spec
        self.soft_unrolls = -(-config.capacity // spec.unroll_starts)
        self.ring_unrolls = ring_unrolls(config.capacity, spec.unroll_starts)
        self.log = UnrollLog(self.ring_unrolls)
        self.table = PrioritizedTable(
            self.ring_unrolls, spec.unroll_starts, config.priority_exponent, config.importance_exponent, seed
        )
        self.limiter = Limiter(config.samples_per_insert, config.min_size_to_sample, slack=1.0)
        self.num_batches = 0
        self.set_batch_size(batch_size)

    def set_batch_size(self, batch_size: int) -> None:
        """Fits the slack of the limiter to a learner's batch: 4 batches, or a tenth of the samples due at the start."""
        config = self.config
        self.limiter.slack = max(4.0 * batch_size, 0.1 * config.samples_per_insert * config.min_size_to_sample)

    def insert(self, record: Record, priorities: np.ndarray) -> int:
        """Appends an unroll, makes it sampleable, and returns its number."""
        if self.log.is_full:
            self._evict_to(self.soft_unrolls)
        number = self.log.append(record)
        self.table.insert(number, priorities)
        self.limiter.inserted += record.transitions
        return number

    def sample(self, batch_size: int) -> Sample:
        """Draws a batch; call only when `why_no_sample` has no reason against it."""
        self.num_batches += 1
        if self.num_batches % self.config.eviction_period_batches == 0:
            self._evict_to(self.soft_unrolls)
        self.limiter.sampled += batch_size
        return self.table.sample(batch_size, self.log.num_transitions)

    def why_no_insert(self) -> str:
        """Returns why actors have to wait, or an empty string."""
        return "" if self.limiter.may_insert() else "learner"

    def why_no_sample(self, batch_size: int) -> str:
        """Returns why a learner has to wait, or an empty string."""
        if self.limiter.inserted < self.limiter.min_size:
            return "min_size"
        if not self.limiter.may_sample(batch_size):
            return "actors"
        return "" if self.table.can_sample() else "priorities"

    def _evict_to(self, num_unrolls: int) -> None:
        while len(self.log) > num_unrolls:
            self.table.evict(self.log.evict())


def ring_unrolls(capacity: int, unroll_starts: int) -> int:
    """Returns how many unrolls server and learner must be able to hold: the capacity and an excess of a sixteenth."""
    soft = -(-capacity // unroll_starts)
    return soft + max(soft // 16, 8)
