"""Measures the selection of replay in the learner: microseconds a batch for each kind, in this process, no sockets.

    python -m benchmarks.selection

`keep` looks candidates up and keeps some; `add` takes the results of an update. `uniform` is the draw of the candidates
in the server, without a selection.
"""

import time
from collections.abc import Callable
from typing import get_args

import numpy as np

from apexrl.agents.replaying.mix import Distance, Selection, SelectionRule
from apexrl.agents.replaying.selection import Selector
from apexrl.config.tables import TableConfig
from apexrl.losses.relevance import PROJECTED
from apexrl.replay.kinds import make_table
from apexrl.types import StreamSpec

RING_UNROLLS = 10_000
KEPT, CANDIDATES = 32, 128
QUEUE = "queue"


def costs(num_batches: int) -> dict[str, float]:
    """Returns the median microseconds of each part of the work."""
    rng = np.random.default_rng(0)
    found = {"uniform": median_us(candidates_of(rng), num_batches)}
    for distance in get_args(Distance):
        for rule in get_args(SelectionRule):
            if rule != "attentive" or distance != "kl":
                selector = full_selector(rule, distance, rng)
                numbers = rng.choice(RING_UNROLLS, CANDIDATES, replace=False)
                found[f"keep {rule} {distance}"] = median_us(keeping(selector, rule, numbers), num_batches)
        found[f"add {distance}"] = median_us(
            adding(full_selector("elite-1", distance, rng), distance, rng), num_batches
        )
    return found


def candidates_of(rng: np.random.Generator) -> Callable[[], object]:
    """Returns the draw of one batch of candidates from a full table."""
    spec = StreamSpec("Known-v0", (2,), "float32", 1, 2, 1, unroll_starts=20)
    table = make_table(TableConfig("uniform", 0.0, 1), RING_UNROLLS, spec, (0.6, 0.4), 0)
    table.insert(0, np.zeros((RING_UNROLLS, 0)), np.ones((RING_UNROLLS, 20), bool))
    return lambda: table.sample(CANDIDATES)


def full_selector(rule: SelectionRule, distance: Distance, rng: np.random.Generator) -> Selector:
    """Returns a selector that knows every unroll of the ring."""
    selector = Selector({rule: Selection(rule, KEPT, distance, queue=QUEUE)}, RING_UNROLLS)
    numbers = np.arange(RING_UNROLLS)
    selector.add({QUEUE: (numbers, results(distance, RING_UNROLLS, rng))})
    return selector


def results(distance: Distance, size: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Returns results as updates give them."""
    if distance == "kl":
        return {"distance": rng.exponential(size=size).astype(np.float32)}
    return {"feature": rng.normal(size=(size, PROJECTED)).astype(np.float32)}


def keeping(selector: Selector, table: str, numbers: np.ndarray) -> Callable[[], object]:
    """Returns the selection of one batch."""
    return lambda: selector.keep(table, numbers, 0)


def adding(selector: Selector, distance: Distance, rng: np.random.Generator) -> Callable[[], object]:
    """Returns the intake of one update's results."""
    numbers, rows = rng.choice(RING_UNROLLS, KEPT, replace=False), results(distance, KEPT, rng)
    return lambda: selector.add({QUEUE: (numbers, rows)})


def median_us(work: Callable[[], object], num_batches: int) -> float:
    """Returns the median microseconds of a piece of work."""
    seconds = []
    for _ in range(num_batches):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return float(np.median(seconds)) * 1e6


if __name__ == "__main__":
    print(f"microseconds a batch: {KEPT} of {CANDIDATES} candidates, {RING_UNROLLS:,} unrolls")
    for name, microseconds in costs(num_batches=2000).items():
        print(f"{name:24} {microseconds:8.1f}")
