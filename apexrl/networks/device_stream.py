"""The learner's device as its threads share it: one order of work, memory on its way there, results on their way back.

All work for a GPU goes through one non-default CUDA stream, which does not synchronise with the default stream. Any
thread that touches the learner's tensors must therefore hold the stream: network, optimizer, unroll store, checkpoints.
Work is captured beside it, so that the capture holds no other thread up.
On a CPU work is done when the call returns, and nothing here costs anything.
"""

import collections
import contextlib
import functools
import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from apexrl.errors import ApexError

MOST_IN_FLIGHT = 4  # updates that a GPU has to do: enough that it never waits for us
MAX_WAIT_SECONDS = 60.0
POLL_SECONDS = 1e-4


class Event(Protocol):
    """A point in the order of work; a CUDA event is one."""

    def query(self) -> bool:
        """Returns whether all work before it is done."""
        ...


class _Done:
    def query(self) -> bool:
        return True


DONE: Event = _Done()


def wait(event: Event, most_seconds: float = MAX_WAIT_SECONDS) -> None:
    """Returns when all work before the event is done.

    Raises: ApexError when the device does not get there in time.
    """
    deadline = time.monotonic() + most_seconds
    while not event.query():
        if time.monotonic() > deadline:
            raise ApexError(f"the GPU did not finish its work in {most_seconds:.0f} s: look at nvidia-smi")
        time.sleep(POLL_SECONDS)


@contextlib.contextmanager
def capture(
    graph: torch.cuda.CUDAGraph, pool: "torch.cuda._POOL_HANDLE | None", stream: torch.cuda.Stream
) -> Iterator[None]:
    """Captures this thread's work in a graph; other threads may go on asking for their events.

    Garbage is not collected meanwhile: where an old graph is among it, its end would spoil the capture.
    """
    gc.collect()
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
            yield
    finally:
        if collects:
            gc.enable()


class DeviceStream:
    """The order in which the learner's threads give work to its device: a CUDA stream, and a lock around it.

    Whoever takes both locks takes that of the memory first.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.cuda = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._lock = threading.RLock()
        self._memory_lock = threading.RLock()

    @property
    def depth(self) -> int:
        """Updates that may be on the way; 0 where each is done when its call returns."""
        return 0 if self.cuda is None else MOST_IN_FLIGHT

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Enqueues work atomically: no other thread's work comes between. Hold it only while launching."""
        on_stream = contextlib.nullcontext() if self.cuda is None else torch.cuda.stream(self.cuda)
        with self._lock, on_stream:
            yield

    @contextlib.contextmanager
    def memory_kept(self) -> Iterator[None]:
        """Lets nobody else give memory back that captured work reads, nor capture such work."""
        with self._memory_lock:
            yield

    @contextlib.contextmanager
    def aside(self) -> Iterator[torch.cuda.Stream | None]:
        """Lets this thread work between all work so far and all that comes later, on another stream: to capture it.

        Other threads may give work to ours meanwhile, which is not ordered with this. The memory is kept.

        Yields: the other stream, always the same, because libraries keep memory for each; None on a CPU.
        """
        with self._memory_lock:
            if self.cuda is None:
                yield None
                return
            self._side.wait_stream(self.cuda)
            try:
                with torch.cuda.stream(self._side):
                    yield self._side
            finally:
                self.cuda.wait_stream(self._side)

    @functools.cached_property
    def _side(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)

    def event(self) -> Event:
        """Returns the point in the order where we are now."""
        if self.cuda is None:
            return DONE
        event = torch.cuda.Event()
        event.record(self.cuda)
        return event

    def host_memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns zeros in host memory that the device can copy from and to while we go on."""
        return torch.zeros(shape, dtype=dtype, pin_memory=self.cuda is not None)

    def pinned(self, tensor: Tensor) -> Tensor:
        """Returns a tensor of host memory, or a copy of it, that the device can copy from while we go on."""
        return tensor if self.cuda is None or tensor.is_pinned() else tensor.pin_memory()

    def fetch(self, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], Event]:
        """Returns the tensors as they are at this point of the order, good from the event on: on a CPU no copies."""
        if self.cuda is None:
            return tensors, DONE
        with self.exclusive():
            return {n: tensor.detach().to("cpu", non_blocking=True) for n, tensor in tensors.items()}, self.event()


class Staging:
    """Pieces of host memory used in turn. One is written again only when the device has copied its content."""

    def __init__(self, device_stream: DeviceStream, num_pieces: int, *tensors: tuple[tuple[int, ...], torch.dtype]):
        """Makes pieces that hold tensors of these shapes and types each."""
        self._device_stream = device_stream
        self._pieces = [
            [device_stream.host_memory(shape, dtype) for shape, dtype in tensors] for _ in range(num_pieces)
        ]
        self._events: list[Event] = [DONE] * num_pieces
        self._next = 0

    def next_piece(self) -> list[Tensor]:
        """Returns the tensors of the next piece, as soon as they may be written."""
        wait(self._events[self._next])
        return self._pieces[self._next]

    def sent(self) -> None:
        """All copies from the piece given last have been given to the device."""
        self._events[self._next] = self._device_stream.event()
        self._next = (self._next + 1) % len(self._pieces)


class Arrivals:
    """The results that the device still owes us, in order, each with a function to call. Owned by one thread."""

    def __init__(self) -> None:
        self._queue: collections.deque[tuple[Event, Callable[[], None]]] = collections.deque()

    def __len__(self) -> int:
        return len(self._queue)

    def expect(self, event: Event, then: Callable[[], None]) -> None:
        """Calls `then` once the event is reached: now where nothing is owed, else in a later `collect`.

        On a CPU it is always now, so that `then` sees the tensors before the next update changes them in place.
        """
        if not self._queue and event.query():
            then()
        else:
            self._queue.append((event, then))

    def collect(self, most: int) -> None:
        """Handles the events that were reached, and waits until no more than `most` are missing.

        Raises: ApexError when the device does not get there in time.
        """
        while self._queue and (len(self._queue) > most or self._queue[0][0].query()):
            event, then = self._queue.popleft()
            wait(event)
            then()
