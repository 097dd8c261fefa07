"""One update as one unit of work on the learner's device: fixed memory, captured once as a CUDA graph, then replayed.

What enters an update is written into tensors that never move (`Inputs`); what leaves it is copied to the host without
waiting (`Pending`). On a CPU the same code runs, and the work is called where a GPU would replay it.
"""

import contextlib
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from apexrl.errors import ConfigError
from apexrl.learning.unroll_store import Batch, FrameStore, KeyBatch, TransitionBatch
from apexrl.networks.device_stream import Lane, Mark, Staging, wait
from apexrl.networks.screens import stored_shape
from apexrl.types import StreamSpec

logger = logging.getLogger(__name__)

WARM_UPS = 3  # before a capture: libraries choose their algorithms and take their memory


class Pending(NamedTuple):
    """What an update gives back, on its way from the device: to be read from the mark on."""

    keys: np.ndarray  # [M] of the transitions that were updated from
    values: Tensor  # [B + figures] float32 in host memory; the first M are the priorities
    names: tuple[str, ...]  # of the figures
    mark: Mark

    def result(self) -> tuple[np.ndarray, dict[str, float]]:
        """Returns the new priorities [M] and the figures of the update; waits for them if need be.

        Raises: ApexError when the device does not get there in time.
        """
        wait(self.mark)
        values = self.values.numpy()
        figures = values[len(values) - len(self.names) :].tolist()
        return values[: len(self.keys)], dict(zip(self.names, figures, strict=True))


class Inputs(Protocol):
    """Where the batches of an update enter it."""

    def takes(self, batch: Batch) -> bool:
        """Returns whether batches of this kind and from this store enter here."""
        ...

    def load(self, batch: Batch) -> np.ndarray:
        """Gives the copies of a batch to the device; returns the keys [M] of those transitions that are there.

        The other B - M rows get weight 0, and the weights are scaled by B / M: a mean over B rows is then the mean over
        the M real ones, as it is where a smaller batch is gathered.
        """
        ...

    def batch(self) -> TransitionBatch:
        """Returns the tensors [B] that `load` fills, or what the device gathers by them."""
        ...


class KeyInputs:
    """Keys and weights enter; the device gathers from its frame store."""

    def __init__(self, lane: Lane, store: FrameStore, batch_size: int):
        self._store = store
        self._size = batch_size
        # Keys are 8 bytes each, weights 4: one copy brings both.
        self._packed = torch.zeros(3 * batch_size, dtype=torch.int32, device=lane.device)
        self._staging = Staging(lane, lane.depth + 1, ((3 * batch_size,), torch.int32))

    def takes(self, batch: Batch) -> bool:
        return isinstance(batch, KeyBatch) and batch.store is self._store

    def load(self, batch: Batch) -> np.ndarray:
        assert isinstance(batch, KeyBatch)
        held = batch.held()
        keys = batch.keys[held]
        if len(keys):
            (packed,) = self._staging.take()
            keys_here, weights_here = _keys_and_weights(packed, self._size)
            keys_here.numpy()[:] = keys[0]
            keys_here.numpy()[: len(keys)] = keys
            _fill_weights(weights_here.numpy(), batch.weights[held])
            self._packed.copy_(packed, non_blocking=True)
            self._staging.sent()
        return keys

    def batch(self) -> TransitionBatch:
        return self._store.transitions(*_keys_and_weights(self._packed, self._size))


class BatchInputs:
    """Whole batches enter, gathered from a frame store in host memory."""

    def __init__(self, lane: Lane, spec: StreamSpec, batch_size: int):
        self._size = batch_size
        shape, dtype = (2, batch_size, spec.stacked_frames, *stored_shape(spec)), getattr(torch, spec.frame_dtype)
        self._observations = torch.zeros(shape, dtype=dtype, device=lane.device)
        self._numbers = torch.zeros((4, batch_size), dtype=torch.int32, device=lane.device)
        self._staging = Staging(lane, lane.depth + 1, ((4, batch_size), torch.int32))

    def takes(self, batch: Batch) -> bool:
        return isinstance(batch, TransitionBatch)

    def load(self, batch: Batch) -> np.ndarray:
        assert isinstance(batch, TransitionBatch)
        size = len(batch.keys)
        (numbers,) = self._staging.take()
        numbers[0, :size] = batch.action
        numbers[1].view(torch.float32)[:size] = batch.n_step_return
        numbers[2].view(torch.float32)[:size] = batch.discount
        _fill_weights(numbers[3].view(torch.float32).numpy(), batch.weight.numpy())
        self._numbers.copy_(numbers, non_blocking=True)
        self._staging.sent()
        # From pinned memory, which the frame store leaves alone until the update is done.
        self._observations[0, :size].copy_(batch.observation, non_blocking=True)
        self._observations[1, :size].copy_(batch.next_observation, non_blocking=True)
        return batch.keys

    def batch(self) -> TransitionBatch:
        action, *others = self._numbers
        n_step_return, discount, weight = (numbers.view(torch.float32) for numbers in others)
        observation, next_observation = self._observations
        no_keys = np.empty(0, np.int64)
        return TransitionBatch(observation, action.long(), n_step_return, discount, next_observation, weight, no_keys)


class UpdateGraph:
    """An update that is captured when it is made. Owned by the learner's thread."""

    def __init__(
        self,
        lane: Lane,
        inputs: Inputs,
        work: Callable[[TransitionBatch], Tensor],
        names: tuple[str, ...],
        state: Sequence[Tensor],
    ):
        """Runs the work a few times, puts the state back as it was, in place, and captures the work on a GPU.

        Args:
          work: from a batch to [B + figures] float32 on the device: priorities, then figures by `names`.
          state: all tensors that the work changes.
        Raises: ConfigError when the GPU has too little memory.
        """
        self._lane = lane
        self._inputs = inputs
        self._work = work
        self._names = names
        self._graph: torch.cuda.CUDAGraph | None = None
        self._values: Tensor | None = None  # where the graph leaves its result
        try:
            # No other thread may give work to the stream during the capture: it would become a part of the graph.
            started = time.monotonic()
            with lane.turn(), _fastest_convolutions():
                self._warm_up(state)
                if lane.stream is not None:
                    graph = torch.cuda.CUDAGraph()
                    # thread_local: other threads may go on asking for their events.
                    with torch.cuda.graph(graph, stream=lane.stream, capture_error_mode="thread_local"):
                        self._values = work(inputs.batch())
                    self._graph = graph
                    logger.info("the update is captured on %s (%.1f s)", lane.device, time.monotonic() - started)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"{lane.device} has too little memory for an update beside the frames: give a smaller --capacity "
                f"or --batch-size ({error})"
            ) from error

    def takes(self, batch: Batch) -> bool:
        """Returns whether this graph can update from a batch; else another one has to be made."""
        return self._inputs.takes(batch)

    def update(self, batch: Batch) -> Pending | None:
        """Starts an update; returns what will come of it, or None when none of the batch's transitions is left."""
        with self._lane.turn():
            keys = self._inputs.load(batch)
            if not len(keys):
                return None
            if self._graph is None:
                values = self._work(self._inputs.batch())
            else:
                self._graph.replay()
                assert self._values is not None
                values = self._values.to("cpu", non_blocking=True)
            return Pending(keys, values, self._names, self._lane.mark())

    def _warm_up(self, state: Sequence[Tensor]) -> None:
        with torch.no_grad():
            before = [tensor.clone() for tensor in state]
        with warnings.catch_warnings():
            # The optimizer is made to be captured and says so when it is not.
            warnings.filterwarnings("ignore", message=".*capturable=True")
            for _ in range(WARM_UPS):
                self._work(self._inputs.batch())
        with torch.no_grad():
            for tensor, value in zip(state, before, strict=True):
                tensor.copy_(value)


@contextlib.contextmanager
def _fastest_convolutions() -> Iterator[None]:
    """Lets cuDNN measure its algorithms: every update has the same shapes."""
    with torch.backends.cudnn.flags(enabled=True, benchmark=True):
        yield


def _keys_and_weights(packed: Tensor, size: int) -> tuple[Tensor, Tensor]:
    return packed[: 2 * size].view(torch.int64), packed[2 * size :].view(torch.float32)


def _fill_weights(here: np.ndarray, weights: np.ndarray) -> None:
    """Writes weights [M] into [B]; what that means is said at `Inputs.load`."""
    here[: len(weights)] = weights * np.float32(len(here) / len(weights))
    here[len(weights) :] = 0
