"""`Normalizer`: observations and rewards in the measure of a run, whose means and deviations are among its parameters.

The learner fills it (`learning.experience.run_moments`), and applies it to batches. Whoever acts applies it in front of
the network (`torsos.FrameNetwork.normalized`), and finds it by the names of its tensors.
"""

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor, nn

N = TypeVar("N", bound=nn.Module)
PREFIX = "normalizer."  # begins the names of its tensors among those for acting; they travel in float32
MOST = 10.0  # deviations, to which observations are cut (OpenAI baselines' VecNormalize)


class Normalizer(nn.Module):
    """Observations less their mean, in deviations; and rewards in deviations of their discounted sum."""

    mean: Tensor | None
    scale: Tensor | None
    reward_scale: Tensor | None

    def __init__(self, frame_shape: tuple[int, ...], names: Iterable[str]):
        """Makes one that changes nothing but extremes.

        Args:
          frame_shape: of vectors.
          names: of its buffers: mean and scale, reward_scale, or all three.
        """
        super().__init__()
        shapes = {"mean": frame_shape, "scale": frame_shape, "reward_scale": ()}
        for name, shape in shapes.items():
            first = torch.zeros(shape) if name == "mean" else torch.ones(shape)
            self.register_buffer(name, first if name in names else None)

    def forward(self, frames: Tensor) -> Tensor:
        """Returns frames [.., *frame] float32, those that a stack does not show as zeros included."""
        if self.mean is None or self.scale is None:
            return frames
        return ((frames - self.mean) * self.scale).clamp(-MOST, MOST)

    def prepared(self, stacks: Tensor) -> Tensor:
        """Returns stacks [B, H * numbers], as a network's first layer takes them."""
        return stacks if self.mean is None else self(stacks.unflatten(1, (-1, *self.mean.shape))).flatten(1)

    def rewards(self, rewards: Tensor) -> Tensor:
        """Returns rewards, or sums of them."""
        return rewards if self.reward_scale is None else rewards * self.reward_scale


def with_normalizer(make: Callable[[], N], frame_shape: tuple[int, ...], names: Iterable[str]) -> Callable[[], N]:
    """Returns a maker of networks that have the normalizer of parameters of these names, if any."""
    own = {name.removeprefix(PREFIX) for name in names if name.startswith(PREFIX)}

    def made() -> N:
        network = make()
        if own and getattr(network, "normalizer", network) is None:
            network.normalizer = Normalizer(frame_shape, own)
        return network

    return made if own else make
