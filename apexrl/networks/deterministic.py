"""The network of a deterministic policy over vectors of actions."""

import torch
from torch import Tensor, nn

from apexrl.errors import ConfigError
from apexrl.networks.action_range import RangedModule
from apexrl.networks.config import DeterministicConfig
from apexrl.networks.torsos import FrameNetwork, check_sizes, make_torso
from apexrl.types import EnvironmentSpec


def make_policy(spec: EnvironmentSpec, config: DeterministicConfig) -> "DeterministicPolicy":
    """Returns the policy for the observations and actions of a spec.

    Raises: ConfigError when the shape of the frames is not supported, or a size makes no sense.
    """
    check_sizes(config, *config.channels, config.hidden_size, config.critics)
    if config.atoms and (config.atoms < 2 or config.least_return >= config.most_return):
        raise ConfigError("--atoms have to be 2 at least, from --least-return to a greater --most-return; or give 0")
    return DeterministicPolicy(spec, config)


class DeterministicPolicy(FrameNetwork, RangedModule):
    """An action for each observation, within the bounds of the environment by a tanh.

    Source: arXiv:1509.02971.
    """

    def __init__(self, spec: EnvironmentSpec, config: DeterministicConfig):
        super().__init__(make_torso(spec, config.channels, config.hidden_size, own=config))
        self.action = nn.Linear(self.torso.num_features, len(spec.action_bounds))
        self.take_range(spec)

    def heads(self, features: Tensor) -> Tensor:
        """Returns the actions [B, size] float32 of the torso's features."""
        with torch.autocast(features.device.type, enabled=False):  # bfloat16 would make steps of single actions
            return self.center + self.reach * torch.tanh(self.action(features.float()))
