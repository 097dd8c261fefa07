"""The rule by which frames become stacks, for actors and for learners.

The rule: an observation is a stack of H frames. The frame j steps back is visible unless the observation's episode
began after it; a frame that is not visible is zeros. So the first observation of an episode shows one frame.

Two forms of the rule:
* `FrameStack` applies it as frames come: an actor forgets all older frames where an episode begins.
* `frame_ages` and `frame_numbers` apply it afterwards: a learner looks frames up by position.
"""

import numpy as np
import torch
from torch import Tensor

from apexrl.networks.frame_layout import FrameLayout


class FrameStack:
    """The last H frames of E environments, in a ring: only the newest frame is written at each step."""

    def __init__(self, layout: FrameLayout, num_envs: int, dtype: torch.dtype, device: torch.device):
        """Begins with no frame seen; `dtype` is the type in which the network computes."""
        self.newest = layout.stacked_frames - 1  # position in the ring
        self.ring = layout.ring(num_envs, dtype, device)
        self.captured: object = None  # the calls that a policy captured for this stack on a GPU
        self._layout = layout

    def advance(self) -> None:
        """Makes the oldest position the one of the newest frame, for the `write` that follows."""
        self.newest = (self.newest + 1) % self._layout.stacked_frames

    def write(self, frames: Tensor, starts: Tensor) -> None:
        """Puts frames [E, *frame] at the newest position; where starts [E], forgets all older frames."""
        if self.ring.device.type != "cpu" or bool(starts.any()):
            self.ring.masked_fill_(starts.view(-1, *[1] * (self.ring.dim() - 1)), 0)
        self.ring.select(self._layout.ring_axis, self.newest).copy_(self._layout.store(frames))

    def in_order(self) -> Tensor:
        """Returns the stacks [E, H, *stored], oldest frame first."""
        return self._layout.in_order(self.ring, self.newest)

    def network_input(self, dtype: torch.dtype) -> Tensor:
        """Returns the input of the first layer, whose kernel must be the one turned to the newest position."""
        return self._layout.prepare_ring(self.ring, self.newest, dtype)


def gather_stacks(
    frames: Tensor, newest: Tensor, ages: Tensor, zero_frame: int, backwards: Tensor, out: Tensor | None = None
) -> Tensor:
    """Returns stacks [.., H, words], oldest frame first, out of a flat memory of frames.

    Args:
      frames: [positions, words]; the frames of one stream lie one after the other.
      newest: [..] int64, the position of each stack's newest frame.
      ages: [..] integers, the number of older frames that each stack shows: see `frame_ages`.
      zero_frame: position of a frame of zeros.
      backwards: [H] integers H - 1 .. 0, the steps back of each place in a stack.
      out: [stacks * H, words], the memory of the result; new memory when None.
    """
    positions = newest.unsqueeze(-1) - backwards  # [.., H]
    positions = positions.masked_fill(backwards > ages.unsqueeze(-1), zero_frame)
    stacks = torch.index_select(frames, 0, positions.flatten(), out=out)
    return stacks.view(*positions.shape, frames.shape[1])


def frame_ages(starts: np.ndarray, stacked_frames: int) -> np.ndarray:
    """Returns the number of older frames that each observation of an unroll shows, at most H - 1.

    The H - 1 frames before an unroll are zeros already where the rule hides them: its builder saw to it.

    Args:
      starts: [T + 1] bool, whether the newest frame of an observation begins an episode.
    Returns: [T + 1] int64.
    """
    position = np.arange(len(starts))
    latest_start = np.maximum.accumulate(np.where(starts, position, -stacked_frames))
    return np.minimum(position - latest_start, stacked_frames - 1)


def frame_numbers(starts: np.ndarray, stacked_frames: int, first_frame: int, zero_frame: int) -> np.ndarray:
    """Returns the numbers [T + 1, H] of the frames that each observation of an unroll shows, oldest first.

    Args:
      starts: [T + 1] bool, whether the newest frame of an observation begins an episode.
      first_frame: number of the unroll's first frame; the others follow it.
      zero_frame: number of a frame of zeros, which is shown in the place of a hidden one.
    """
    backwards = np.arange(stacked_frames - 1, -1, -1)
    newest = first_frame + stacked_frames - 1 + np.arange(len(starts))
    is_hidden = backwards > frame_ages(starts, stacked_frames)[:, None]
    return np.where(is_hidden, zero_frame, newest[:, None] - backwards)
