"""The check of each update's results: bad experience is set aside, and a network that has diverged ends the run."""

import logging
from collections.abc import Mapping

import numpy as np

from apexrl.errors import ApexError
from apexrl.learning.updates.updater import Updater
from apexrl.networks.checkpoint import all_finite

logger = logging.getLogger(__name__)

MOST_UNUSABLE_UPDATES = 20  # one after the other: then it is the network


class Soundness:
    """Counts results that are not finite. Used from one thread."""

    def __init__(self) -> None:
        self.num_unusable = 0  # transitions or unrolls whose errors were not finite
        self.num_skipped = 0  # updates whose gradient was not finite: they changed nothing
        self._unusable_updates = 0  # one after the other, up to now

    def check(self, priorities: Mapping[str, np.ndarray], metrics: Mapping[str, float], updater: Updater) -> None:
        """Takes the results of an update: new priorities [M] by table, and its metrics.

        Raises: ApexError when it is the network, not its experience, that gives no finite errors or gradients; or a
          priority is negative.
        """
        if negative := [table for table, values in priorities.items() if (values < 0).any()]:
            raise ApexError(f"the learner gives negative priorities of {negative[0]}: at least 0 is needed")
        finite = [np.isfinite(values) for values in priorities.values()]
        is_skipped = not np.isfinite(metrics.get("gradient_norm", 0.0))
        self.num_skipped += is_skipped
        all_sound = all(table.all() for table in finite)
        # A few transitions that are at fault get priority 0, and do not come again.
        is_unusable = not all(table.any() for table in finite) or (is_skipped and all_sound)
        self._unusable_updates = self._unusable_updates + 1 if is_unusable else 0
        if all_sound and not is_skipped:
            return
        if self._unusable_updates > MOST_UNUSABLE_UPDATES or not all_finite(updater.state_dict()):
            raise ApexError(
                f"the network has diverged at update {updater.num_updates}: lower --learning-rate; "
                "the run can go on from its last checkpoint (--resume)"
            )

    def usable(self, keys: np.ndarray, priorities: np.ndarray) -> np.ndarray:
        """Returns the priorities [M] of keys, with 0 where they are not finite: those are never drawn again."""
        finite = np.isfinite(priorities)
        if finite.all():
            return priorities
        unusable = np.unique(keys[~finite])
        self.num_unusable += len(unusable)
        named = unusable[:8].tolist()
        logger.warning("%d sampled keys give no finite errors and get priority 0: %s", len(unusable), named)
        return np.where(finite, priorities, np.float32(0))
