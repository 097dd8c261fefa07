"""Measures one sample and one update in the replay server, by the number of transitions held, without sockets."""

import time
from pathlib import Path

import numpy as np


def scaling(batch: int) -> list[dict[str, float]]:
    """Returns the costs of one sample and one update, by the number of transitions held, measured in this process."""
    from apexrl.config.tables import TableConfig
    from apexrl.replay.kinds import make_table
    from apexrl.types import StreamSpec

    rng = np.random.default_rng(0)
    spec = StreamSpec("Known-v0", (2,), "float32", 1, 2, 1, unroll_starts=64)
    rows = []
    for power in range(16, 25):
        unrolls = 2**power // 64
        table = make_table(TableConfig("priority", 0, 1), unrolls, spec, (0.6, 0.4), 0)
        for first in range(0, unrolls, 1024):
            priorities = rng.exponential(size=(min(1024, unrolls - first), 64)).astype(np.float32)
            table.insert(first, priorities, np.ones(priorities.shape, bool))
        samples, updates = [], []
        for _ in range(300):
            before = time.perf_counter()
            sample = table.sample(batch)
            between = time.perf_counter()
            table.update_priorities(sample.keys, rng.exponential(size=batch))
            table.can_sample(batch)
            samples.append(between - before)
            updates.append(time.perf_counter() - between)
        rows.append({"log2_transitions": power, "sample_us": float(np.median(samples)) * 1e6,
                     "update_us": float(np.median(updates)) * 1e6})  # fmt: skip
    return rows


def plot(rows: list[dict[str, float]], path: Path) -> None:
    """Draws the costs over the logarithm of the size. A straight line is a logarithmic cost."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.5))
    powers = [row["log2_transitions"] for row in rows]
    for name in ("sample_us", "update_us"):
        axes.plot(powers, [row[name] for row in rows], marker="o", label=name.removesuffix("_us") + " 512")
    axes.set_xticks(powers, [f"$2^{{{power}}}$" for power in powers])
    axes.set_xlabel("transitions held")
    axes.set_ylabel("microseconds")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
