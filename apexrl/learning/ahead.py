"""The values of the next observations, computed in a thread beside the rest of an update: for a CPU with a free core.

An update is five parts of about the same length: the online network's pass over the observations left, two for its
backward pass, and one of each network over the next observations. Those last two are done here, the target network's a
batch ahead, so that three remain. The numbers are the same, as the target network does not change between its copies.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from apexrl.learning.unroll_store import TransitionBatch
from apexrl.networks.dueling import DuelingNetwork

PATIENCE_SECONDS = 120.0


class NextValues:
    """Owns the thread. Called by the learner's thread only, which owns the networks and tells when they change."""

    def __init__(self, online: DuelingNetwork, target: DuelingNetwork, precision: Callable[[], torch.autocast]):
        self._online = online
        self._target = target
        self._precision = precision
        self._thread = ThreadPoolExecutor(1, "next-values")
        self._ahead: tuple[TransitionBatch | None, Future[tuple[Tensor, Tensor]] | None] = (None, None)

    def begin(self, batch: TransitionBatch, upcoming: TransitionBatch | None) -> Callable[[], tuple[Tensor, Tensor]]:
        """Begins with a batch, and then with the one to come; returns what waits for the batch's values.

        Those are online and target, [B, A] float32. Call it before the online network is changed.
        """
        known, ahead = self._ahead
        if known is not batch or ahead is None:
            ahead = self._thread.submit(self._of_target, batch)
        online = self._thread.submit(self._of_online, ahead)
        self._ahead = (upcoming, None if upcoming is None else self._thread.submit(self._of_target, upcoming))
        return lambda: (online.result(PATIENCE_SECONDS), ahead.result(PATIENCE_SECONDS)[1])

    def forget(self) -> None:
        """Call it before the target network is changed: what it said of a batch to come does not count any more."""
        if self._ahead[1] is not None:
            self._ahead[1].result(PATIENCE_SECONDS)
        self._ahead = (None, None)

    def _of_target(self, batch: TransitionBatch) -> tuple[Tensor, Tensor]:
        with torch.no_grad(), self._precision():
            prepared = self._online.prepare(batch.next_observation)
            return prepared, self._target.values(prepared).float()

    def _of_online(self, ahead: Future[tuple[Tensor, Tensor]]) -> Tensor:
        with torch.no_grad(), self._precision():
            return self._online.values(ahead.result(PATIENCE_SECONDS)[0]).float()
