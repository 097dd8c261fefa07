"""How screens lie in memory: in blocks of 4x4 pixels, for the first convolution of DQN.

An 8x8 convolution with stride 4 over a screen is a 2x2 convolution with stride 1 over its blocks: the same sums, in an
order that CPUs and tensor cores like better (measured: docs/benchmarks.md). Pure functions of tensors.
"""

import math

import torch
from torch import Tensor

from apexrl.types import StreamSpec

BLOCK = 4
SMALLEST_SCREEN = 36  # pixels that Nature's three convolutions need


def in_blocks(spec: StreamSpec) -> bool:
    """Returns whether the frames of a spec are gray screens that are kept in blocks."""
    shape = spec.frame_shape
    return (
        spec.frame_dtype == "uint8"
        and len(shape) == 2
        and min(shape) >= SMALLEST_SCREEN
        and not any(size % BLOCK for size in shape)
    )


def stored_shape(spec: StreamSpec) -> tuple[int, ...]:
    """Returns the shape in which the frame store keeps a frame: [h/4, w/4, 16] of a screen in blocks."""
    if not in_blocks(spec):
        return spec.frame_shape
    height, width = spec.frame_shape
    return (height // BLOCK, width // BLOCK, BLOCK * BLOCK)


def blocks(frames: Tensor) -> Tensor:
    """uint8 [B, h, w] into [B, h/4, w/4, 16]: the pixels of a block side by side."""
    batch, height, width = frames.shape
    words = frames.contiguous().view(torch.int32).view(batch, height // BLOCK, BLOCK, width // BLOCK)
    words = words.transpose(2, 3).contiguous()  # four pixels of a row move as one word
    return words.view(torch.uint8).view(batch, height // BLOCK, width // BLOCK, BLOCK * BLOCK)


def stacked_blocks(stacks: Tensor) -> Tensor:
    """uint8 [B, H, h/4, w/4, 16] into [B, h/4, w/4, H, 16]: what `channels` takes. A block moves as one number."""
    batch, _, height, width, _ = stacks.shape
    moved = stacks.view(torch.complex128).squeeze(-1).permute(0, 2, 3, 1).contiguous()
    return moved.flatten().view(torch.uint8).view(batch, height, width, -1, BLOCK * BLOCK)


def channels(pixels: Tensor) -> Tensor:
    """[B, h/4, w/4, H, 16] as an image of 16 H channels, which lie together in memory (channels-last)."""
    return pixels.flatten(3).permute(0, 3, 1, 2)


def kernel_over_blocks(weight: Tensor) -> Tensor:
    """The kernel [C, H, 8, 8] of a convolution with stride 4 as that of the one over blocks: [C, 16 H, 2, 2]."""
    num_outputs, stacked = weight.shape[:2]
    kernel = weight.view(num_outputs, stacked, 2, BLOCK, 2, BLOCK).permute(0, 1, 3, 5, 2, 4)
    return kernel.reshape(num_outputs, math.prod((BLOCK, BLOCK, stacked)), 2, 2)
