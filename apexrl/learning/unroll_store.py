"""The learner's decoded replica of the experience log: unrolls in a ring, transitions gathered by key.

Each unroll is decoded once, into the ring position number % ring_unrolls; its n-step windows are computed then. A batch
is gathered from keys alone. One thread applies. Where the ring lies on a GPU, batches are gathered there as part of the
update, by the thread that updates: marking a position and copying into it are one turn of the lane, and so are the
check of the keys and the launch of the update.
"""

import collections
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from apexrl.losses.windows import n_step_windows
from apexrl.networks.device_stream import Lane, Staging, wait
from apexrl.networks.screens import blocks, in_blocks, stored_shape
from apexrl.types import StreamSpec, Unroll

DEVICE_RESERVE_BYTES = 2e9  # of a GPU, for networks, optimizer, an update and libraries
STAGED_UNROLLS = 8  # on their way to a GPU


class TransitionBatch(NamedTuple):
    """B transitions, where the frame store lies."""

    observation: Tensor  # [B, H, *frame]; screens in blocks, see `screens.stored_shape`
    action: Tensor  # [B] int64
    n_step_return: Tensor  # [B] float32
    discount: Tensor  # [B] float32: gamma ** offset, 0 where terminated
    next_observation: Tensor  # [B, H, *frame]
    weight: Tensor  # [B] float32
    keys: np.ndarray  # [B] int64


class KeyBatch(NamedTuple):
    """B transitions by name, which the update gathers itself: some may be overwritten by then."""

    store: "FrameStore"
    generation: int  # of the store's content
    keys: np.ndarray  # [B] int64
    weights: np.ndarray  # [B] float32

    def held(self) -> np.ndarray:
        """Returns [B] bool: which are still there; in the turn in which they are gathered."""
        if self.generation != self.store.generation:
            return np.zeros(len(self.keys), bool)
        return self.store.holds(self.keys)


Batch = TransitionBatch | KeyBatch


class FrameStore:
    """A ring of decoded unrolls. An unroll takes F frames; memory is touched only as the ring fills."""

    def __init__(
        self,
        spec: StreamSpec,
        ring_unrolls: int,
        gamma: float,
        device: torch.device,
        num_batches: int,
        lane: Lane | None = None,
    ):
        """Allocates the ring.

        Args:
          device: where the frames lie.
          num_batches: a gathered batch is good until so many more are gathered; then its memory is used again.
          lane: of the device that learns, which may be another one; of `device` when None.
        Raises: torch.OutOfMemoryError or RuntimeError when the device cannot hold it.
        """
        self.spec = spec
        self.ring_unrolls = ring_unrolls
        self.generation = 0
        self.device = device
        self._lane = lane or Lane(device)
        self._gamma = gamma
        self._numbers = np.full(ring_unrolls, -1, np.int64)
        self._room: tuple[int, np.ndarray, np.ndarray] | None = None  # number, frames and row of the unroll to come
        self._zero_frame = ring_unrolls * spec.unroll_frames
        with self._lane.turn():
            self._allocate()
        self._staging = self._make_staging() if device.type == "cuda" else None
        # Batches are gathered into a few buffers in turn: fresh memory for each would cost more than the copy.
        self._buffers: collections.deque[Tensor] = collections.deque(maxlen=2 * num_batches)

    def _allocate(self) -> None:
        spec, device = self.spec, self.device
        frame_bytes, dtype = _frame_bytes(spec), torch.uint8
        for wider in (torch.int64, torch.int32):  # a GPU copies words faster than bytes
            if frame_bytes % wider.itemsize == 0:
                dtype = wider
                break
        # One more frame, of zeros, is what a stack sees in the place of frames from before its episode.
        self._frames = torch.empty((self._zero_frame + 1, frame_bytes // dtype.itemsize), dtype=dtype, device=device)
        self._frames[self._zero_frame] = 0
        # All else of an unroll is one row, so that it is one copy. Zeros: what is gathered from a row that was never
        # written has to lie inside the ring too.
        self._rows = torch.zeros((self.ring_unrolls, _row_size(spec)), dtype=torch.int32, device=device)
        self._backwards = torch.arange(spec.stacked_frames - 1, -1, -1, device=device)  # [H]

    def _make_staging(self) -> Staging:
        frames = (self.spec.unroll_frames, self._frames.shape[1]), self._frames.dtype
        return Staging(self._lane, STAGED_UNROLLS, frames, ((self._rows.shape[1],), torch.int32))

    @property
    def num_bytes(self) -> int:
        """Bytes allocated on the device."""
        return self._frames.nbytes + self._rows.nbytes

    @staticmethod
    def bytes_needed(spec: StreamSpec, ring_unrolls: int) -> int:
        """Returns about how many bytes a frame store takes when it is full."""
        return ring_unrolls * (spec.unroll_frames * _frame_bytes(spec) + 4 * _row_size(spec))

    def holds(self, keys: np.ndarray) -> np.ndarray:
        """Returns [B] bool: whether the unrolls of keys are here."""
        numbers = keys // self.spec.unroll_starts
        return self._numbers[numbers % self.ring_unrolls] == numbers

    def clear(self) -> None:
        """Forgets everything: the log is another one."""
        with self._lane.turn():
            self.generation += 1
            self._numbers[:] = -1

    def release(self) -> None:
        """Forgets everything and gives the memory back, when no update reads it any more."""
        with self._lane.turn():
            self.clear()
            wait(self._lane.mark())
            self._frames = self._rows = torch.empty(0)
            self._staging = None
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def room(self, number: int) -> np.ndarray:
        """Returns where the frames [F, *frame] of an unroll are to be written before `apply`.

        What was at its position is forgotten, even if `apply` is not called after all.
        """
        spec = self.spec
        slot = number % self.ring_unrolls
        with self._lane.turn():
            self._numbers[slot] = -1
        if self._staging is None:
            frames, row = self._frames[self._frames_of(slot)], self._rows[slot]
        else:
            frames, row = self._staging.take()
        shaped = frames.numpy().view(spec.frame_dtype).reshape(spec.unroll_frames, *spec.frame_shape)
        self._room = number, shaped, row.numpy()
        return shaped

    def apply(self, number: int, unroll: Unroll) -> None:
        """Stores an unroll in place of the one that is ring_unrolls older; its frames may lie in `room(number)`."""
        if self._room is None or self._room[0] != number:
            self.room(number)
        assert self._room is not None
        _, frames, row = self._room
        if unroll.frames is not frames:
            np.copyto(frames, unroll.frames)
        self._fill(row, unroll)
        self._room = None
        slot = number % self.ring_unrolls
        place = self._frames[self._frames_of(slot)]
        with self._lane.turn():
            if self._staging is not None:
                staged_frames, staged_row = self._staging.take()
                place.copy_(staged_frames, non_blocking=True)
                self._rows[slot].copy_(staged_row, non_blocking=True)
                self._staging.sent()
            if in_blocks(self.spec):  # once here instead of in every batch
                screens = place.view(torch.uint8).view(-1, *self.spec.frame_shape)
                place.copy_(blocks(screens).flatten(1).view(place.dtype))
            self._numbers[slot] = number

    def batch(self, keys: np.ndarray, weights: np.ndarray) -> Batch | None:
        """Returns the transitions of a sample that are here; None when there is none.

        Where the ring lies on a GPU they are named, not gathered.
        """
        if self._staging is not None:
            return KeyBatch(self, self.generation, keys, weights)
        held = self.holds(keys)
        return self.gather(keys[held], weights[held]) if held.any() else None

    def gather(self, keys: np.ndarray, weights: np.ndarray) -> TransitionBatch:
        """Returns the transitions of keys [B].

        Raises: KeyError when a key's unroll is not held.
        """
        held = self.holds(keys)
        if not held.all():
            raise KeyError(
                f"unrolls {np.unique(keys[~held] // self.spec.unroll_starts)[:5]} are not in the frame store"
            )
        memory = [self._buffer(len(keys) * self.spec.stacked_frames) for _ in range(2)]
        key, weight = (_tensor(array).to(self.device) for array in (keys, weights))
        return self.transitions(key, weight, *memory)._replace(keys=keys)

    def transitions(
        self, key: Tensor, weight: Tensor, memory: Tensor | None = None, next_memory: Tensor | None = None
    ) -> TransitionBatch:
        """Returns the transitions of keys [B] int64 on the device, whatever lies there: only kernels, nothing is read.

        Args:
          memory, next_memory: where observations and next observations are gathered; new memory when None.
        """
        spec = self.spec
        slot = (key // spec.unroll_starts) % self.ring_unrolls
        start = key % spec.unroll_starts
        starts = spec.unroll_starts
        returns, discounts, actions, offsets = (self._rows[slot, start + starts * column] for column in range(4))
        return TransitionBatch(
            self._stack(slot, start, memory),
            actions.long(),
            returns.view(torch.float32),
            discounts.view(torch.float32),
            self._stack(slot, start + offsets, next_memory),
            weight,
            np.empty(0, np.int64),
        )

    def _stack(self, slot: Tensor, position: Tensor, memory: Tensor | None) -> Tensor:
        """Returns the observations [B, H, *frame] at positions of unrolls."""
        spec = self.spec
        newest = slot * spec.unroll_frames + position + spec.stacked_frames - 1
        frame = newest[:, None] - self._backwards  # [B, H]
        ages = self._rows[slot, position + 4 * spec.unroll_starts]
        frame = frame.masked_fill(self._backwards > ages[:, None], self._zero_frame)
        stacks = torch.index_select(self._frames, 0, frame.flatten(), out=memory)
        stacks = stacks.view(getattr(torch, spec.frame_dtype))
        return stacks.view(len(slot), spec.stacked_frames, *stored_shape(spec))

    def _frames_of(self, slot: int) -> slice:
        return slice(slot * self.spec.unroll_frames, (slot + 1) * self.spec.unroll_frames)

    def _fill(self, row: np.ndarray, unroll: Unroll) -> None:
        """Writes returns, discounts, actions and offsets [K] and the ages [T + 1] of an unroll, 4 bytes each."""
        spec = self.spec
        starts = spec.unroll_starts
        windows = n_step_windows(unroll.rewards, unroll.discounts, unroll.starts, self._gamma, spec.n_steps)
        columns = row[: 4 * starts].reshape(4, starts)
        columns[0].view(np.float32)[:], columns[1].view(np.float32)[:], columns[3] = windows
        columns[2] = unroll.actions[:starts]
        row[4 * starts :] = _frame_ages(unroll.starts, spec.stacked_frames)

    def _buffer(self, num_frames: int) -> Tensor:
        """Returns the oldest buffer, or a new one while there are few or when the size of the batch has changed."""
        oldest = self._buffers[0] if len(self._buffers) == self._buffers.maxlen else None
        if oldest is None or len(oldest) != num_frames:
            shape = (num_frames, self._frames.shape[1])
            if self.device.type == "cpu":
                oldest = self._lane.host_memory(shape, self._frames.dtype)
            else:
                oldest = torch.empty(shape, dtype=self._frames.dtype, device=self.device)
        self._buffers.append(oldest)
        return oldest


def _frame_bytes(spec: StreamSpec) -> int:
    return spec.frame_size * np.dtype(spec.frame_dtype).itemsize


def _row_size(spec: StreamSpec) -> int:
    """Numbers that are kept of an unroll beside its frames."""
    return 4 * spec.unroll_starts + spec.unroll_steps + 1


def _frame_ages(starts: np.ndarray, stacked_frames: int) -> np.ndarray:
    """Returns for each observation how many older frames of its stack are of its own episode: at most H - 1."""
    position = np.arange(len(starts))
    # The frames before the unroll were zeroed by its builder where they are not to be seen.
    latest_start = np.maximum.accumulate(np.where(starts, position, -stacked_frames))
    return np.minimum(position - latest_start, stacked_frames - 1)


def _tensor(array: np.ndarray) -> Tensor:
    """A tensor of an array; copies the read-only ones, which torch does not take."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())
