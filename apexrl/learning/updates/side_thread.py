"""A second thread for updates on a CPU: it computes some parts of an update while another core computes the rest.

An update of Ape-X is five passes of about the same length: the online network's pass over the observations left, two
for its backward pass, and one of each network over the next observations. The last two are side work: the online
network's during `gradients`, and the target network's a draw ahead, as only `copy_target` changes it. Between them the
thread takes the gradients of weights, one of the two backward passes.
"""

import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from apexrl.agents.contract import Batches, Learner
from apexrl.learning.experience.draw import Draw

PATIENCE_SECONDS = 120.0


class SideThread:
    """Owns the thread. Called by the learner's thread only, which tells it when the target is copied."""

    def __init__(self, learner: Learner):
        self._learner = learner
        self._thread = ThreadPoolExecutor(1, "side-work")
        learner.use_thread(self.spawn)
        self._upcoming: tuple[Draw | None, Future[Any] | None] = (None, None)  # the draw to come, computed ahead

    def spawn(self, work: Callable[[], None]) -> Callable[[], None]:
        """See `agents.contract.Spawn`."""
        left = self._thread.submit(work)

        def end() -> None:
            if left.cancel():
                work()
            else:
                _result_of(left)

        return end

    def begin(self, draw: Draw) -> Callable[[], Any]:
        """Begins the side work of a draw.

        Returns: a function that waits for the result of `Learner.from_online`. Call it before `Learner.apply`.
        """
        batches = draw.batches()
        announced, from_target = self._upcoming
        if announced is not draw or from_target is None:
            from_target = self._thread.submit(self._learner.from_target, batches)
        known = self._thread.submit(self._from_online, batches, from_target)
        self._upcoming = (None, None)
        return lambda: _result_of(known)

    def look_ahead(self, upcoming: Draw | None) -> None:
        """Begins what can be done ahead of the draw that comes next, where it is known."""
        if upcoming is not None and upcoming.is_gathered:
            self._upcoming = (upcoming, self._thread.submit(self._learner.from_target, upcoming.batches()))

    def forget(self) -> None:
        """Drops the work done ahead. Call it before the learner's tensors change outside of an update."""
        if self._upcoming[1] is not None:
            _result_of(self._upcoming[1])
        self._upcoming = (None, None)

    def _from_online(self, batches: Batches, from_target: Future[Any]) -> Any:
        return self._learner.from_online(batches, _result_of(from_target))


def _result_of(work: Future[Any]) -> Any:
    """Waits for the result; a second time, because the first time may be up while this process was stopped itself."""
    with contextlib.suppress(TimeoutError):
        work.exception(PATIENCE_SECONDS)
    return work.result(PATIENCE_SECONDS)
