"""The learner's device as its threads share it: one order of work, memory on its way there, results on their way back.

On a GPU all work goes over one CUDA stream. It is none that waits for the legacy default stream, so whatever touches
the learner's tensors has to take its turn here: network, optimizer, frame store, checkpoints. On a CPU work is done
when the call returns, and nothing of this costs anything.
"""

import collections
import contextlib
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


class Mark(Protocol):
    """A point in the order of work; a CUDA event is one."""

    def query(self) -> bool:
        """Returns whether all work before it is done."""
        ...


class _Done:
    def query(self) -> bool:
        return True


DONE: Mark = _Done()


def wait(mark: Mark) -> None:
    """Returns when all work before the mark is done.

    Raises: ApexError when the device does not get there in time.
    """
    deadline = time.monotonic() + MAX_WAIT_SECONDS
    while not mark.query():
        if time.monotonic() > deadline:
            raise ApexError(f"the GPU did not finish its work in {MAX_WAIT_SECONDS:.0f} s: look at nvidia-smi")
        time.sleep(POLL_SECONDS)


class Lane:
    """The order in which the learner's threads give work to its device: a CUDA stream, and a lock around it."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._lock = threading.RLock()

    @property
    def depth(self) -> int:
        """Updates that may be on the way; 0 where each is done when its call returns."""
        return 0 if self.stream is None else MOST_IN_FLIGHT

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """What is given to the device inside is one piece for all threads. Hold it for the time of a launch."""
        on_stream = contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream)
        with self._lock, on_stream:
            yield

    def mark(self) -> Mark:
        """Returns the point in the order where we are now."""
        if self.stream is None:
            return DONE
        event = torch.cuda.Event()
        event.record(self.stream)
        return event

    def host_memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns zeros in host memory that the device can copy from and to while we go on."""
        return torch.zeros(shape, dtype=dtype, pin_memory=self.stream is not None)

    def fetch(self, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], Mark]:
        """Returns the tensors as they are at this point of the order, good from the mark on: on a CPU no copies."""
        if self.stream is None:
            return tensors, DONE
        with self.turn():
            return {n: tensor.detach().to("cpu", non_blocking=True) for n, tensor in tensors.items()}, self.mark()


class Staging:
    """Pieces of host memory used in turn. One is written again only when the device has copied what was in it."""

    def __init__(self, lane: Lane, num_pieces: int, *tensors: tuple[tuple[int, ...], torch.dtype]):
        """Makes pieces that hold tensors of these shapes and types each."""
        self._lane = lane
        self._pieces = [[lane.host_memory(shape, dtype) for shape, dtype in tensors] for _ in range(num_pieces)]
        self._marks: list[Mark] = [DONE] * num_pieces
        self._next = 0

    def take(self) -> list[Tensor]:
        """Returns the tensors of the next piece, as soon as they may be written."""
        wait(self._marks[self._next])
        return self._pieces[self._next]

    def sent(self) -> None:
        """All copies from the piece taken last have been given to the device."""
        self._marks[self._next] = self._lane.mark()
        self._next = (self._next + 1) % len(self._pieces)


class Arrivals:
    """What the device still owes us, in order, each with what to do when it is there. Owned by one thread."""

    def __init__(self) -> None:
        self._queue: collections.deque[tuple[Mark, Callable[[], None]]] = collections.deque()

    def __len__(self) -> int:
        return len(self._queue)

    def expect(self, mark: Mark, then: Callable[[], None]) -> None:
        """Calls `then` once the mark is reached: now where nothing is owed, else in a later `collect`.

        On a CPU it is always now, so that `then` sees the tensors before the next update changes them in place.
        """
        if not self._queue and mark.query():
            then()
        else:
            self._queue.append((mark, then))

    def collect(self, most: int) -> None:
        """Takes what has arrived, and waits until no more than `most` are missing.

        Raises: ApexError when the device does not get there in time.
        """
        while self._queue and (len(self._queue) > most or self._queue[0][0].query()):
            mark, then = self._queue.popleft()
            wait(mark)
            then()
