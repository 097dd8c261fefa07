"""The learner's decoded replica of the experience log: frames on the learner's device, gathered by key.

Each unroll is decoded once, into the ring position number % ring_unrolls; its n-step windows are computed then. A batch
is gathered from keys alone. Owned by one thread: apply and gather must happen in the order in which the log sent them.
"""

import collections
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from apexrl.types import StreamSpec, Unroll
from apexrl.unroll import n_step_windows


class TransitionBatch(NamedTuple):
    """B transitions, on the frame store's device."""

    observation: Tensor  # [B, H, *frame] as stored
    action: Tensor  # [B] int64
    n_step_return: Tensor  # [B] float32
    discount: Tensor  # [B] float32: gamma ** offset, 0 where terminated
    next_observation: Tensor  # [B, H, *frame]
    weight: Tensor  # [B] float32
    keys: np.ndarray  # [B] int64


class FrameStore:
    """A ring of decoded unrolls. An unroll takes F frames; memory is touched only as the ring fills."""

    def __init__(self, spec: StreamSpec, ring_unrolls: int, gamma: float, device: torch.device, num_batches: int):
        """Allocates the ring.

        Args:
          num_batches: a gathered batch is good until so many more are gathered; then its memory is used again.
        Raises: torch.OutOfMemoryError or RuntimeError when the device cannot hold it.
        """
        self.spec = spec
        self._device = device
        self._gamma = gamma
        self.ring_unrolls = ring_unrolls
        self._numbers = np.full(ring_unrolls, -1, np.int64)
        self._room: np.ndarray | None = None  # of the unroll to be applied next
        dtype = getattr(torch, spec.frame_dtype)
        num_frames = ring_unrolls * spec.unroll_frames
        # One more frame, of zeros, is what a stack sees in the place of frames from before its episode.
        self._frames = torch.empty((num_frames + 1, max(spec.frame_size, 1)), dtype=dtype, device=device)
        self._frames[num_frames] = 0
        self._zero_frame = num_frames
        starts = (ring_unrolls, spec.unroll_starts)
        self._actions = torch.empty(starts, dtype=torch.int64, device=device)
        self._returns = torch.empty(starts, dtype=torch.float32, device=device)
        self._discounts = torch.empty(starts, dtype=torch.float32, device=device)
        self._offsets = torch.empty(starts, dtype=torch.int64, device=device)
        # Frames of its own episode behind the newest one, counted up to H - 1.
        self._ages = torch.empty((ring_unrolls, spec.unroll_steps + 1), dtype=torch.int64, device=device)
        # Batches are gathered into a few buffers in turn: fresh memory for each would cost more than the copy.
        self._buffers: collections.deque[Tensor] = collections.deque(maxlen=2 * num_batches)
        self._backwards = torch.arange(spec.stacked_frames - 1, -1, -1, device=device)  # [H]

    @property
    def num_bytes(self) -> int:
        """Bytes allocated on the device."""
        tensors = (self._frames, self._actions, self._returns, self._discounts, self._offsets, self._ages)
        return sum(tensor.nbytes for tensor in tensors)

    @staticmethod
    def bytes_needed(spec: StreamSpec, ring_unrolls: int) -> int:
        """Returns about how many bytes a frame store takes when it is full."""
        frame = spec.frame_size * np.dtype(spec.frame_dtype).itemsize
        return ring_unrolls * (spec.unroll_frames * frame + 24 * spec.unroll_starts + 8 * (spec.unroll_steps + 1))

    def holds(self, keys: np.ndarray) -> np.ndarray:
        """Returns [B] bool: whether the unrolls of keys are here."""
        numbers = keys // self.spec.unroll_starts
        return self._numbers[numbers % self.ring_unrolls] == numbers

    def clear(self) -> None:
        """Forgets everything: the log is another one."""
        self._numbers[:] = -1

    def room(self, number: int) -> np.ndarray | None:
        """Returns where the frames [F, *frame] of an unroll may be written before `apply`; None on a GPU.

        What was there is forgotten, even if `apply` is not called after all.
        """
        if self._device.type != "cpu":
            return None
        spec = self.spec
        slot = number % self.ring_unrolls
        self._numbers[slot] = -1
        frames = self._frames[slot * spec.unroll_frames : (slot + 1) * spec.unroll_frames]
        self._room = frames.numpy().reshape(spec.unroll_frames, *spec.frame_shape)
        return self._room

    def apply(self, number: int, unroll: Unroll) -> None:
        """Stores an unroll in place of the one that is ring_unrolls older; its frames may lie in `room(number)`."""
        spec = self.spec
        slot = number % self.ring_unrolls
        windows = n_step_windows(unroll.rewards, unroll.discounts, unroll.starts, self._gamma, spec.n_steps)
        if unroll.frames is not self._room:
            first = slot * spec.unroll_frames
            frames = np.ascontiguousarray(unroll.frames).reshape(spec.unroll_frames, -1)
            self._frames[first : first + spec.unroll_frames].copy_(_tensor(frames))
        self._room = None
        self._actions[slot].copy_(_tensor(unroll.actions[: spec.unroll_starts]))
        for store, values in zip((self._returns, self._discounts, self._offsets), windows, strict=True):
            store[slot].copy_(_tensor(values))
        self._ages[slot].copy_(_tensor(_frame_ages(unroll.starts, spec.stacked_frames)))
        self._numbers[slot] = number

    def gather(self, keys: np.ndarray, weights: np.ndarray) -> TransitionBatch:
        """Returns the transitions of keys [B].

        Raises: KeyError when a key's unroll is not held.
        """
        spec = self.spec
        held = self.holds(keys)
        if not held.all():
            raise KeyError(f"unrolls {np.unique(keys[~held] // spec.unroll_starts)[:5]} are not in the frame store")
        key = _tensor(keys).to(self._device)
        slot = (key // spec.unroll_starts) % self.ring_unrolls
        start = key % spec.unroll_starts
        offset = self._offsets[slot, start]
        return TransitionBatch(
            self._stack(slot, start),
            self._actions[slot, start],
            self._returns[slot, start],
            self._discounts[slot, start],
            self._stack(slot, start + offset),
            _tensor(weights).to(self._device),
            keys,
        )

    def _stack(self, slot: Tensor, position: Tensor) -> Tensor:
        """Returns the observations [B, H, *frame] at positions of unrolls."""
        spec = self.spec
        newest = slot * spec.unroll_frames + position + spec.stacked_frames - 1
        frame = newest[:, None] - self._backwards  # [B, H]
        unseen = self._backwards > self._ages[slot, position][:, None]
        frame = torch.where(unseen, self._zero_frame, frame)
        stacks = self._buffer(frame.numel())
        torch.index_select(self._frames, 0, frame.flatten(), out=stacks)
        return stacks.view(len(slot), *spec.observation_shape)

    def _buffer(self, num_frames: int) -> Tensor:
        """Returns the oldest buffer, or a new one while there are few or when the size of the batch has changed."""
        oldest = self._buffers[0] if len(self._buffers) == self._buffers.maxlen else None
        if oldest is None or len(oldest) != num_frames:
            oldest = torch.empty((num_frames, self._frames.shape[1]), dtype=self._frames.dtype, device=self._device)
        self._buffers.append(oldest)
        return oldest


def _frame_ages(starts: np.ndarray, stacked_frames: int) -> np.ndarray:
    """Returns for each observation how many older frames of its stack are of its own episode: at most H - 1."""
    position = np.arange(len(starts))
    # The frames before the unroll were zeroed by its builder where they are not to be seen.
    latest_start = np.maximum.accumulate(np.where(starts, position, -stacked_frames))
    return np.minimum(position - latest_start, stacked_frames - 1)


def _tensor(array: np.ndarray) -> Tensor:
    """A tensor of an array; copies the read-only ones, which torch does not take."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())
