"""One update as one unit of work on the learner's device: fixed memory, captured once as a CUDA graph, then replayed.

Batches enter an update through tensors that never move (`Inputs`). On a CPU the same code runs, and the work is called
where a GPU would replay it.
"""

import contextlib
import logging
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from apexrl.agents.contract import Batch, Batches
from apexrl.errors import ConfigError
from apexrl.learning.experience.draw import Draw, Gathered, SampledKeys, fill
from apexrl.learning.experience.unroll_store import UnrollStore
from apexrl.networks.device_stream import DeviceStream, Staging, capture

logger = logging.getLogger(__name__)

WARM_UPS = 3  # before a capture: libraries choose their algorithms and take their memory


class KeyInputs:
    """Keys and weights enter; the device gathers from its unroll store."""

    def __init__(self, device_stream: DeviceStream, store: UnrollStore, table: str, batch_size: int):
        self._store = store
        self._table = table
        self._size = batch_size
        # Keys are 8 bytes each, weights 4: one copy brings both.
        self._packed = torch.zeros(3 * batch_size, dtype=torch.int32, device=device_stream.device)
        self._staging = Staging(device_stream, device_stream.depth + 1, ((3 * batch_size,), torch.int32))

    def takes(self, sample: SampledKeys | Gathered) -> bool:
        """Returns whether samples of this kind and from this store enter here."""
        return isinstance(sample, SampledKeys) and sample.store is self._store

    def load(self, sample: SampledKeys | Gathered) -> np.ndarray:
        """Enqueues the copies of a sample; returns the keys [M] of those rows that are there."""
        assert isinstance(sample, SampledKeys)
        held = sample.held()
        keys = sample.keys[held]
        if len(keys):
            (packed,) = self._staging.next_piece()
            keys_here, weights_here = self._keys_and_weights(packed)
            fill(keys_here.numpy(), weights_here.numpy(), keys, sample.weights[held])
            self._packed.copy_(packed, non_blocking=True)
            self._staging.sent()
        return keys

    def batch(self) -> Batch:
        """Returns the tensors that `load` fills, or that the device gathers by them."""
        return self._store.batch(self._table, *self._keys_and_weights(self._packed))

    def _keys_and_weights(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        return packed[: 2 * self._size].view(torch.int64), packed[2 * self._size :].view(torch.float32)


class BatchInputs:
    """Whole batches enter, gathered from an unroll store in host memory."""

    def __init__(self, device_stream: DeviceStream, example: Batch):
        self._device_stream = device_stream
        self._here = _mapped(example, lambda tensor: torch.zeros_like(tensor, device=device_stream.device))

    def takes(self, sample: SampledKeys | Gathered) -> bool:
        return isinstance(sample, Gathered) and type(sample.batch) is type(self._here)

    def load(self, sample: SampledKeys | Gathered) -> np.ndarray:
        assert isinstance(sample, Gathered)
        # Observations lie in pinned memory, which the store leaves alone until the update is done. The host's allocator
        # keeps the pinned copies of the others until they are copied.
        for here, there in zip(_tensors(self._here), _tensors(sample.batch), strict=True):
            here.copy_(self._device_stream.pinned(there), non_blocking=True)
        return sample.keys

    def batch(self) -> Batch:
        return self._here


Inputs = KeyInputs | BatchInputs  # the entrance of one table's batches


def inputs_for(store: UnrollStore, device_stream: DeviceStream) -> dict[str, Inputs]:
    """Returns the inputs that full draws from a store enter through, by table."""
    inputs: dict[str, Inputs] = {}
    for table in store.tables:
        size = store.num_rows(table)
        if store.names_samples:
            inputs[table] = KeyInputs(device_stream, store, table, size)
        else:
            keys, weights = torch.zeros(size, dtype=torch.int64), torch.zeros(size)
            inputs[table] = BatchInputs(device_stream, store.batch(table, keys, weights))
    return inputs


def inputs_of(draw: Draw, device_stream: DeviceStream) -> dict[str, Inputs]:
    """Returns the inputs that draws like this one enter through, by table."""
    inputs: dict[str, Inputs] = {}
    for table, sample in draw.samples.items():
        if isinstance(sample, Gathered):
            inputs[table] = BatchInputs(device_stream, sample.batch)
        else:
            assert isinstance(sample.store, UnrollStore)
            size = max(sample.store.num_rows(table), len(sample.keys))
            inputs[table] = KeyInputs(device_stream, sample.store, table, size)
    return inputs


Parts = Generator[None, None, Tensor]  # of an update: it returns one float32 tensor on the device


class Work(NamedTuple):
    """An update in parts, and what no graph can capture between them."""

    parts: Callable[[Batches], Parts]  # from batches by table
    between: Callable[[], None] | None  # None: nothing is between, and all parts are one

    def run(self, batches: Batches) -> Tensor:
        """Does all of it; returns its result."""
        parts = self.parts(batches)
        while (result := advanced(parts)) is None:
            if self.between is not None:
                self.between()
        return result


def advanced(parts: Parts) -> Tensor | None:
    """Does the next part; returns the result after the last one, None before."""
    try:
        next(parts)
    except StopIteration as end:
        return end.value
    return None


class UpdateGraph:
    """An update that is captured when it is made, in one graph or several. Owned by the learner's thread."""

    def __init__(
        self,
        device_stream: DeviceStream,
        inputs: Mapping[str, Inputs],
        work: Work,
        state: Iterable[Tensor],
    ):
        """Runs the work a few times, puts the state back as it was, in place, and captures the work on a GPU.

        The part between is left out: other processes may have part in it. No stream is held: libraries take seconds
        to choose their algorithms. What the work reads of the unroll store is not used, so it may change meanwhile.

        Args:
          state: all tensors that the work changes.
        Raises: ConfigError when the GPU has too little memory.
        """
        self._inputs = inputs
        self._work = work
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._values: Tensor | None = None  # where the last graph leaves its result
        try:
            started = time.monotonic()
            # cuDNN measures its algorithms: every update has the same shapes.
            with device_stream.aside() as stream, torch.backends.cudnn.flags(enabled=True, benchmark=True):
                self._warm_up(list(state))
                if stream is not None:
                    self._capture(stream)
                    logger.info(
                        "the update is captured on %s (%.1f s)", device_stream.device, time.monotonic() - started
                    )
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"{device_stream.device} has too little memory for an update beside the frames: give a smaller "
                f"--capacity or --batch-size ({error})"
            ) from error

    def takes(self, draw: Draw) -> bool:
        """Returns whether this graph can update from a draw; else another one has to be made."""
        return all(self._inputs[table].takes(sample) for table, sample in draw.samples.items())

    def run(self, draw: Draw) -> tuple[dict[str, np.ndarray], Tensor] | None:
        """Starts an update. Hold the device stream.

        Returns: the keys [M] of the rows that are there, by table, and the work's result in host memory, which is still
          on its way. None when nothing is left of a table's sample.
        """
        keys = {table: self._inputs[table].load(sample) for table, sample in draw.samples.items()}
        if not all(len(there) for there in keys.values()):
            return None
        if self._values is None:
            return keys, self._work.run(self._batches())
        self._graphs[0].replay()
        for graph in self._graphs[1:]:
            assert self._work.between is not None
            self._work.between()
            graph.replay()
        return keys, self._values.to("cpu", non_blocking=True)

    def _capture(self, stream: torch.cuda.Stream) -> None:
        work = self._work

        def next_graph() -> contextlib.AbstractContextManager[None]:
            self._graphs.append(torch.cuda.CUDAGraph())
            pool = self._graphs[0].pool() if len(self._graphs) > 1 else None
            return capture(self._graphs[-1], pool, stream)

        with next_graph():
            parts = work.parts(self._batches())
            self._values = Work(lambda _: parts, None).run({}) if work.between is None else advanced(parts)
        while self._values is None:
            with next_graph():
                self._values = advanced(parts)

    def _batches(self) -> dict[str, Batch]:
        return {table: inputs.batch() for table, inputs in self._inputs.items()}

    def _warm_up(self, state: list[Tensor]) -> None:
        with torch.no_grad():
            before = [tensor.clone() for tensor in state]
        with warnings.catch_warnings():
            # The optimizer is made to be captured and says so when it is not.
            warnings.filterwarnings("ignore", message=".*capturable=True")
            for _ in range(WARM_UPS):
                self._work._replace(between=None).run(self._batches())
        with torch.no_grad():
            for tensor, value in zip(state, before, strict=True):
                tensor.copy_(value)


def _mapped(batch: Batch, function: Callable[[Tensor], Tensor]) -> Batch:
    """Returns a batch with every tensor replaced."""
    changed: dict[str, Any] = {
        name: {key: function(tensor) for key, tensor in value.items()} if isinstance(value, dict) else function(value)
        for name, value in batch._asdict().items()
    }
    return batch._replace(**changed)


def _tensors(batch: Batch) -> Iterator[Tensor]:
    """Yields the tensors of a batch, always in the same order."""
    for value in batch:
        if isinstance(value, dict):
            yield from (value[key] for key in sorted(value))
        else:
            yield value
