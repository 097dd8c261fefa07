"""The results of updates: priorities go to the replay, results of rows to the replica, and metrics are kept."""

import logging
from collections.abc import Collection, Mapping

import numpy as np
import psutil

from apexrl.config.tables import TableSpec
from apexrl.learning.experience.draw import Draw
from apexrl.learning.experience.replica import Replica
from apexrl.learning.experience.replicas import Replicas
from apexrl.learning.record.metrics import RejectedShares, UpdateMetrics, VersionLags
from apexrl.learning.updates.soundness import Soundness
from apexrl.learning.updates.updater import Pending, Updater
from apexrl.lifecycle import CpuMeter, measured, resident_bytes

logger = logging.getLogger(__name__)


class Results:
    """Takes the results of each update, in order. Used from one thread."""

    def __init__(self, tables: Collection[TableSpec], is_offline: bool = False):
        """Takes none yet.

        Args:
          tables: as the algorithm itself makes them; only the replay knows its own --tables.
          is_offline: whether other learners made the versions that acted, so that experience has no age in updates.
        """
        self._is_offline = is_offline
        self._prioritized = {table.name for table in tables if table.kind == "priority"}  # and without any, unsaid
        fifo_tables = [table.name for table in tables if table.kind == "fifo"]
        self._soundness = Soundness()
        self._update_metrics = UpdateMetrics()
        self._version_lags, self._rejected_shares = VersionLags(fifo_tables), RejectedShares(fifo_tables)
        self._meter = CpuMeter()

    def take(self, pending: Pending, draw: Draw, version: int, updater: Updater, replica: Replica) -> None:
        """Takes the results of an update; waits for them if need be.

        Args:
          version: of the network before the update.
        Raises: ApexError when the network has diverged.
        """
        priorities, metrics = pending.result()
        self._update_metrics.add(metrics, pending.row_metrics)
        self._soundness.check(priorities, metrics, updater)
        for table in sorted(self._prioritized & pending.keys.keys() - priorities.keys()):
            self._prioritized.remove(table)
            logger.warning("the learner gives no priorities of %s: those of the actors stay", table)
        for table, values in priorities.items():
            keys = pending.keys[table]
            replica.update_priorities(draw.generation, table, keys, self._soundness.usable(keys, values))
        if not self._is_offline:
            self._version_lags.add(version, draw.versions)
        if rows := pending.rows():
            if not self._is_offline:
                self._rejected_shares.add(version, acted_rows(draw, pending.keys), rows)
            replica.add_results(draw.generation, {table: (pending.keys[table], rows[table]) for table in rows})

    def metrics(self) -> dict[str, float]:
        """Returns the metrics by tag; those that are gathered between two reports begin anew."""
        metrics = {f"learner/{name}": value for name, value in self._update_metrics.values().items()}
        metrics |= self._version_lags.report() | self._rejected_shares.report()
        return metrics | {
            "system/learner_cores": self._meter.cores(),
            "learner/unusable_transitions_total": float(self._soundness.num_unusable),
            "learner/skipped_updates_total": float(self._soundness.num_skipped),
        }


def acted_rows(draw: Draw, keys: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the versions [M] that acted in the rows of an update, by table; some of the draw may be evicted."""
    samples = draw.samples
    return {table: samples[table].versions[np.isin(samples[table].keys, there)] for table, there in keys.items()}


def learner_metrics(
    updater: Updater, replica: Replica | Replicas, results: Results, updates_per_second: float
) -> dict[str, float]:
    """Returns the metrics of a learner by tag."""
    metrics = {f"learner/selection/{name}": value for name, value in replica.selection_metrics.items()}
    return (
        metrics
        | results.metrics()
        | {
            "learner/updates_per_second": updates_per_second,
            "learner/updates_total": float(updater.num_updates),
            "learner/undecodable_unrolls_total": float(replica.num_undecodable),
        }
        | measured("system/learner_memory_bytes", resident_bytes)
        | measured("system/cpu_share", lambda: psutil.cpu_percent() / 100)
    )
