"""The network of a Gaussian policy over vectors of actions, which a tanh squashes into their bounds."""

import torch
from torch import Tensor, nn

from apexrl.networks.action_range import RangedModule
from apexrl.networks.config import GaussianConfig
from apexrl.networks.torsos import FrameNetwork, check_sizes, make_torso
from apexrl.types import EnvironmentSpec


def make_policy(spec: EnvironmentSpec, config: GaussianConfig) -> "GaussianPolicy":
    """Returns the policy for the observations and actions of a spec.

    Raises: ConfigError when the shape of the frames is not supported, or a size makes no sense.
    """
    check_sizes(config, *config.channels, config.hidden_size, config.critics)
    return GaussianPolicy(spec, config)


class GaussianPolicy(FrameNetwork, RangedModule):
    """The means of an action's numbers and the logarithms of their deviations, before the tanh.

    Source: SAC, arXiv:1812.05905.
    """

    def __init__(self, spec: EnvironmentSpec, config: GaussianConfig):
        super().__init__(make_torso(spec, config.channels, config.hidden_size, own=config))
        self.moments = nn.Linear(self.torso.num_features, 2 * len(spec.action_bounds))
        self.take_range(spec)

    def heads(self, features: Tensor) -> Tensor:
        """Returns [B, 2 size] float32 of the torso's features: means, then logarithms of deviations."""
        with torch.autocast(features.device.type, enabled=False):
            moments: Tensor = self.moments(features.float())
        return moments
