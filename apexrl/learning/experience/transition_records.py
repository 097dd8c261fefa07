"""The records of transitions: everything of a transition but its frames, and where those lie, in one row of words.

The records of an unroll are written once, when it is stored. So a batch takes one select of records by their keys, and
one of frames by the numbers in the records.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from apexrl.agents.contract import Transitions
from apexrl.learning.experience.sizes import OBSERVATIONS, record_words
from apexrl.losses.windows import n_step_windows
from apexrl.types import StreamSpec, Unroll


class Columns(NamedTuple):
    """The records of B transitions by column; views of them but for the frame numbers."""

    frame_numbers: Tensor  # [2 * B * H] int32: all observations left, then all next ones, oldest frame first
    action: Tensor  # [B] int32, or [B, action size] float32
    n_step_return: Tensor  # [B] float32
    discount: Tensor  # [B] float32


class TransitionRecords:
    """The layout of a record: 2 H frame numbers, the action, the n-step return and its discount, in 32-bit words."""

    def __init__(self, spec: StreamSpec, view: Transitions):
        """Lays out the records of a view of unrolls, which overlap by its steps at least."""
        self._spec, self._view = spec, view
        self._numbers = OBSERVATIONS * spec.stacked_frames
        self._actions = self._numbers + math.prod(spec.action.shape)
        self.words = record_words(spec)

    def write(self, records: np.ndarray, unroll: Unroll, shown: np.ndarray) -> None:
        """Writes the records [K, words] int32 of an unroll, whose observations show the frames `shown` [T + 1, H]."""
        spec, view = self._spec, self._view
        steps = unroll.rewards, unroll.discounts, unroll.starts
        windows = n_step_windows(*steps, view.gamma, view.n_steps)
        returns, discounts, offsets = (window[: spec.unroll_starts] for window in windows)
        begins = np.arange(spec.unroll_starts)
        half = spec.stacked_frames
        records[:, :half], records[:, half : self._numbers] = shown[begins], shown[begins + offsets]
        actions = records[:, self._numbers : self._actions].view(spec.action.dtype)
        actions[...] = unroll.actions[: len(begins)].reshape(actions.shape)
        records[:, -2:].view(np.float32)[...] = np.stack([returns, discounts], axis=1)

    def columns(self, records: Tensor) -> Columns:
        """Returns the columns of records [B, words]."""
        numbers = records[:, : self._numbers].unflatten(1, (OBSERVATIONS, -1)).transpose(0, 1).flatten()
        actions = records[:, self._numbers : self._actions].view(getattr(torch, self._spec.action.dtype))
        returns, discounts = records[:, -2:].view(torch.float32).unbind(1)
        return Columns(numbers, actions.reshape(len(records), *self._spec.action.shape), returns, discounts)
