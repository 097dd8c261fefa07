"""The kinds of tables by name: a configuration becomes a table."""

import numpy as np

from apexrl.config.tables import QUEUES, TableConfig
from apexrl.replay.limiter import Limiter
from apexrl.replay.priority_table import PriorityTable
from apexrl.replay.unroll_tables import EliteTable, FifoTable, LifoTable, UniformTable, UnrollTable
from apexrl.types import Granularity, StreamSpec

Table = PriorityTable | UnrollTable


def make_table(config: TableConfig, ring_unrolls: int, spec: StreamSpec, exponents: tuple[float, float],
               seed: int | np.random.SeedSequence) -> Table:  # fmt: skip
    """Returns an empty table; exponents are of the priority and of the importance weights."""
    limiter = Limiter(config.samples_per_insert, config.min_size_to_sample, 1.0, is_queue=config.kind in QUEUES)
    rng = np.random.default_rng(seed)
    if config.kind == "priority":
        granularity: Granularity = "unrolls" if spec.has_unroll_priorities else "transitions"
        return PriorityTable(granularity, (ring_unrolls, spec.num_priorities), exponents, limiter, rng)
    if config.kind == "elite":
        return EliteTable(limiter, rng, min(config.capacity, ring_unrolls))
    if config.kind in QUEUES:
        return FifoTable(limiter, rng) if config.kind == "fifo" else LifoTable(limiter, rng)
    return UniformTable(limiter, rng, config.capacity)
