"""The rule by which frames become stacks, for actors and for learners.

The rule: an observation is a stack of H frames. The frame j steps back is visible unless the observation's episode
began after it; a frame that is not visible is zeros. So the first observation of an episode shows one frame.

Two forms of the rule:
* `FrameStack` applies it as frames come: an actor forgets all older frames where an episode begins.
* `frame_numbers` applies it afterwards: a learner looks frames up by their numbers.
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


def stacks_of(frames: np.ndarray, starts: np.ndarray, stacked_frames: int) -> np.ndarray:
    """Returns the observations [T + 1, E, H, *frame] of unrolls: frames [F, E, *frame], starts [T + 1, E] bool."""
    shown = np.concatenate([frames, np.zeros_like(frames[:1])])
    numbers = (frame_numbers(starts[:, i], stacked_frames, 0, len(frames)) for i in range(starts.shape[1]))
    return np.stack([shown[of_stream, i] for i, of_stream in enumerate(numbers)], axis=1)


def frame_numbers(starts: np.ndarray, stacked_frames: int, first_frame: int, zero_frame: int) -> np.ndarray:
    """Returns the numbers [T + 1, H] of the frames that each observation of an unroll shows, oldest first.

    The H - 1 frames before an unroll are zeros already where the rule hides them: its builder saw to it.

    Args:
      starts: [T + 1] bool, whether the newest frame of an observation begins an episode.
      first_frame: number of the unroll's first frame; the others follow it.
      zero_frame: number of a frame of zeros, which is shown in the place of a hidden one.
    """
    position, backwards = np.arange(len(starts)), np.arange(stacked_frames - 1, -1, -1)
    latest_start = np.maximum.accumulate(np.where(starts, position, -stacked_frames))
    is_hidden = backwards > (position - latest_start)[:, None]
    newest = first_frame + stacked_frames - 1 + position
    return np.where(is_hidden, zero_frame, newest[:, None] - backwards)
