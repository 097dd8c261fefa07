"""`FrameLayout`: how frames and stacks of frames lie in memory, and how the first layer of a network takes them.

Gray screens lie in blocks of 4x4 pixels. An 8x8 convolution with stride 4 over a screen is a 2x2 convolution with
stride 1 over its blocks: the same sums, in an order that CPUs and tensor cores like better (measured:
docs/log/learner.md). All other frames lie in memory as the environment gives them. Pure functions of tensors.
"""

import dataclasses
import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from apexrl.types import EnvironmentSpec

BLOCK = 4  # pixels: the stride of DQN's first convolution
SMALLEST_SCREEN = 36  # pixels that the three convolutions of DQN need


@dataclasses.dataclass(frozen=True)
class FrameLayout:
    """The memory layout of the frames of one environment: stored, stacked, in a ring, and as a network's input."""

    frame_shape: tuple[int, ...]
    dtype: torch.dtype  # the type of a stored frame
    stacked_frames: int  # H
    in_blocks: bool
    mask_size: int = 0  # numbers at the end of a frame that say which actions are allowed

    @classmethod
    def of(cls, spec: EnvironmentSpec) -> "FrameLayout":
        """Returns the layout of a spec's frames: gray screens in blocks, the others as they come."""
        shape = spec.frame_shape
        in_blocks = (
            spec.frame_dtype == "uint8"
            and len(shape) == 2
            and min(shape) >= SMALLEST_SCREEN
            and not any(size % BLOCK for size in shape)
        )
        return cls(shape, getattr(torch, spec.frame_dtype), spec.stacked_frames, in_blocks, spec.mask_size)

    @functools.cached_property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of a stored frame: [h/4, w/4, 16] in blocks, else [*frame]."""
        if not self.in_blocks:
            return self.frame_shape
        height, width = self.frame_shape
        return (height // BLOCK, width // BLOCK, BLOCK * BLOCK)

    @property
    def stride(self) -> int:
        """Stride of DQN's first convolution over prepared stacks; `kernel` gives its weights."""
        return 1 if self.in_blocks else BLOCK

    def store(self, frames: Tensor) -> Tensor:
        """Returns frames [N, *frame] as stored frames [N, *stored]; the frames themselves where nothing differs."""
        if not self.in_blocks:
            return frames
        words = self._words_in_blocks(frames).contiguous()
        return words.view(torch.uint8).view(-1, *self.stored_shape)

    def store_in(self, memory: Tensor, frames: Tensor) -> None:
        """Writes frames [N, *frame] in blocks to memory [N, words], the bytes of stored frames."""
        words = self._words_in_blocks(frames)
        memory.view(torch.int32).view(words.shape).copy_(words)

    def store_stacks(self, observations: Tensor) -> Tensor:
        """Returns plain observations [B, H, *frame] as stacks of stored frames [B, H, *stored]."""
        return self.store(observations.flatten(0, 1)).unflatten(0, observations.shape[:2])

    def as_frames(self, memory: Tensor) -> Tensor:
        """Returns a view of memory [.., words], the bytes of stored frames, as frames [.., *stored]."""
        return memory.view(self.dtype).view(*memory.shape[:-1], *self.stored_shape)

    def prepare(self, stacks: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns stacks [B, H, *stored] as the input of a network's first layer.

        Returns: images [B, channels, height, width], or [B, numbers] of frames that are vectors.
        """
        if self.in_blocks:
            return as_channels(_stacked_blocks(stacks).to(dtype))
        if len(self.frame_shape) == 3:
            stacks = stacks.permute(0, 1, 4, 2, 3).flatten(1, 2)  # colours become channels
        elif len(self.frame_shape) < 2:
            stacks = stacks.flatten(1)
        return stacks.to(dtype)

    def kernel(self, weight: Tensor) -> Tensor:
        """Returns the weights [C, H, 8, 8] of DQN's first convolution as those over prepared stacks.

        Returns: [C, 16 H, 2, 2] over blocks; the weights themselves over other frames.
        """
        if not self.in_blocks:
            return weight
        kernel = weight.unflatten(3, (2, BLOCK)).unflatten(2, (2, BLOCK))  # [C, H, 2, 4, 2, 4]
        return kernel.permute(0, 1, 3, 5, 2, 4).flatten(1, 3)

    def pixels(self, prepared: Tensor) -> Tensor:
        """Returns prepared stacks of pictures as images [B, channels, height, width] of single pixels."""
        return F.pixel_shuffle(prepared, BLOCK) if self.in_blocks else prepared

    @property
    def ring_axis(self) -> int:
        """The axis of a ring that counts its H frames: the one where the first layer takes them."""
        return 3 if self.in_blocks else 1

    def ring(self, num_envs: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns zeros for the last H frames of E environments; frames in blocks lie there in the network's type."""
        shape = [num_envs, *self.stored_shape]
        shape.insert(self.ring_axis, self.stacked_frames)
        return torch.zeros(shape, dtype=dtype if self.in_blocks else self.dtype, device=device)

    def in_order(self, ring: Tensor, newest: int) -> Tensor:
        """Returns the stacks [E, H, *stored] of a ring, oldest frame first, from the position of the newest."""
        return ring.roll(-1 - newest, self.ring_axis).movedim(self.ring_axis, 1)

    def prepare_ring(self, ring: Tensor, newest: int, dtype: torch.dtype) -> Tensor:
        """Returns the input of the first layer, for the kernel that `turned_kernels` gives for the newest position."""
        if self.in_blocks:
            return as_channels(ring).to(dtype)
        return self.prepare(self.in_order(ring, newest), dtype)

    def turned_kernels(self, kernel: Tensor) -> list[Tensor]:
        """Returns the first layer's kernel for each ring position [H] of the newest frame.

        A ring in blocks keeps its frames in their places, and the kernel turns. Other rings are put in order, and one
        kernel serves all positions.
        """
        if not self.in_blocks:
            return [kernel] * self.stacked_frames
        # [C, H, 16, 2, 2] over blocks or [C, H, 1, 3, 3] over pixels, oldest frame first
        by_frame = kernel.unflatten(1, (self.stacked_frames, -1))
        turned = (by_frame.roll(1 + newest, 1).flatten(1, 2) for newest in range(self.stacked_frames))
        return [kernel.contiguous(memory_format=torch.channels_last) for kernel in turned]

    def _words_in_blocks(self, frames: Tensor) -> Tensor:
        """Returns a view of frames [N, *frame] as [N, h/4, w/4, 4] int32: four pixels of a row move as one word."""
        height, width, _ = self.stored_shape
        return frames.contiguous().view(torch.int32).view(-1, height, BLOCK, width).transpose(2, 3)


def as_channels(blocks: Tensor) -> Tensor:
    """Returns blocks [B, h/4, w/4, H, 16] as images of 16 H channels, which lie together in memory (channels-last)."""
    return blocks.flatten(3).permute(0, 3, 1, 2)


def _stacked_blocks(stacks: Tensor) -> Tensor:
    """Returns stacks uint8 [B, H, h/4, w/4, 16] as [B, h/4, w/4, H, 16]. A block of 16 bytes moves as one number."""
    batch, _, height, width, pixels = stacks.shape
    moved = stacks.view(torch.complex128).squeeze(-1).permute(0, 2, 3, 1).contiguous()
    return moved.flatten().view(torch.uint8).view(batch, height, width, -1, pixels)
