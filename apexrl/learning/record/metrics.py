"""Metrics of training games, of sampled experience and of updates.

Tags are grouped as evaluation/, actor/, replay/, learner/, system/.
"""

import collections
import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping

import numpy as np

from apexrl.agents.contract import Bands
from apexrl.types import Episode

logger = logging.getLogger(__name__)

MAX_KEPT_UPDATES = 1000
AGES_UPDATES = (0, 10, 100, 1000, 10_000)  # the least ages of the bins
PROBABILITY = "probability_"  # begins the names of an update's mean probability of each action
PROBABILITY_UPDATES = 100  # over which it is averaged
MOST_LAG_UPDATES = 20  # Sample Factory: 20 to 30 are usually fine, networks with memory bear fewer
WORSE = 1.5  # a lag that is so much greater than the one that was said last is said again


def episode_sums(episodes: Iterable[Episode], bands: Bands) -> np.ndarray:
    """Returns [3, 1 + bands]: number, raw returns and steps of training games, of all and by exploration."""
    sums = np.zeros((3, 1 + len(bands)))
    for episode in episodes:
        band = [i for i, (least, _) in enumerate(bands, 1) if episode.exploration >= least][:1]
        sums[:, [0, *band]] += np.array([[1.0], [episode.episode_return], [float(episode.steps)]])
    return sums


def returns_by_exploration(sums: np.ndarray, bands: Bands) -> dict[str, float]:
    """Returns the mean raw return of training games by their sums, in all and by band, and their mean length."""
    counts, returns, steps = sums
    if not counts[0]:
        return {}
    names = ["actor/return_mean", *(f"actor/return_by_exploration/{name}" for _, name in bands)]
    means = {name: returns[i] / counts[i] for i, name in enumerate(names) if counts[i]}
    return {name: float(mean) for name, mean in means.items()} | {"actor/game_steps": float(steps[0] / counts[0])}


class UpdateMetrics:
    """The metrics of the newest update that arrived; the policy's probabilities are means over some updates.

    One update sees a few states only, and its `probability_*` are as noisy. Used from one thread.
    """

    def __init__(self) -> None:
        self._newest: dict[str, float] = {}
        self._of_rows: Callable[[], dict[str, float]] = dict
        self._recent: collections.deque[dict[str, float]] = collections.deque(maxlen=PROBABILITY_UPDATES)

    def add(self, metrics: dict[str, float], of_rows: Callable[[], dict[str, float]] = dict) -> None:
        """Takes the metrics of the newest update: always the same names; `of_rows` returns more when it is asked."""
        self._newest, self._of_rows = metrics, of_rows
        probabilities = {name: value for name, value in metrics.items() if name.startswith(PROBABILITY)}
        if all(map(math.isfinite, probabilities.values())):  # one that is not would hide the others for long
            self._recent.append(probabilities)

    def values(self) -> dict[str, float]:
        """Returns the newest metrics, each `probability_*` as its mean over the last PROBABILITY_UPDATES updates."""
        names = self._recent[-1] if self._recent else ()
        means = {name: float(np.mean([values[name] for values in self._recent])) for name in names}
        return self._newest | self._of_rows() | means


class VersionLags:
    """The lag of sampled experience in updates: the learner's version minus the version that acted.

    Keeps the lags of each table's newest MAX_KEPT_UPDATES updates until they are reported. Used from one thread.
    """

    def __init__(self, fifo_tables: Collection[str]):
        """Takes the tables whose experience should be of about the learner's version."""
        self._fifo_tables = frozenset(fifo_tables)
        self._lags: dict[str, collections.deque[np.ndarray]] = {}
        self._tolerated: float = MOST_LAG_UPDATES

    def add(self, version: int, acted: Mapping[str, np.ndarray]) -> None:
        """Takes the version that is updated, and those that acted in its batches [M] by table.

        A peer may state any number. One below 0 names no version, and one above the learner's none of its own: it is
        of a run before, or of another one.
        """
        for table, versions in acted.items():
            kept = self._lags.setdefault(table, collections.deque(maxlen=MAX_KEPT_UPDATES))
            kept.append(version - versions[(versions >= 0) & (versions <= version)])

    def report(self) -> dict[str, float]:
        """Returns p50, p95 and max since the last report, of all fifo tables together and of each other table.

        Says it where the fifo tables are too far behind, and once more where that became worse.
        """
        by_prefix: dict[str, list[np.ndarray]] = collections.defaultdict(list)
        for table, kept in self._lags.items():
            by_prefix["version_lag_" if table in self._fifo_tables else f"version_lag/{table}/"].extend(kept)
        self._lags = {}
        metrics: dict[str, float] = {}
        for prefix, arrays in by_prefix.items():
            lags = np.concatenate(arrays)
            if len(lags):
                numbers = (*np.percentile(lags, (50, 95)), lags.max())
                names = (f"learner/{prefix}{name}" for name in ("p50", "p95", "max"))
                metrics |= dict(zip(names, map(float, numbers), strict=True))
        self._warn(metrics.get("learner/version_lag_p95", 0.0))
        return metrics

    def _warn(self, lag: float) -> None:
        if lag > self._tolerated:
            self._tolerated = WORSE * lag
            logger.warning(
                "actors lag: one unroll in 20 is %d updates old or older, and more than %d can harm learning: publish "
                "more often (--publish-period-updates, --publish-period-seconds), run fewer environments, or take "
                "larger batches (--batch-size)",
                lag, MOST_LAG_UPDATES,
            )  # fmt: skip


class RejectedShares:
    """The share of replayed experience that a trust region rejects, by its age in updates. Used from one thread."""

    def __init__(self, fifo_tables: Collection[str]):
        """Takes the tables that replay nothing."""
        self._fifo_tables = frozenset(fifo_tables)
        self._sums, self._counts = np.zeros(len(AGES_UPDATES)), np.zeros(len(AGES_UPDATES))

    def add(self, version: int, acted: Mapping[str, np.ndarray], rows: Mapping[str, Mapping[str, np.ndarray]]) -> None:
        """Takes the version that was updated, those that acted [M] by table, and results [M] by table and name."""
        for table in rows.keys() - self._fifo_tables:
            shares = rows[table].get("rejected_share")
            if shares is None:
                continue
            known = (acted[table] >= 0) & (acted[table] <= version) & np.isfinite(shares)
            bins = np.digitize(version - acted[table][known], AGES_UPDATES) - 1
            np.add.at(self._sums, bins, shares[known])
            np.add.at(self._counts, bins, 1)

    def report(self) -> dict[str, float]:
        """Returns the mean share of each age that there was since the last report, by the least age."""
        means = {age: self._sums[i] / self._counts[i] for i, age in enumerate(AGES_UPDATES) if self._counts[i]}
        self._sums[:], self._counts[:] = 0, 0
        return {f"learner/rejected_share_by_age/from_{age}": float(mean) for age, mean in means.items()}
