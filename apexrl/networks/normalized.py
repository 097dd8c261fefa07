"""Dueling Q-networks whose layers behind the torso are normalized, so that they learn without a target network."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apexrl.networks.config import NormalizedConfig
from apexrl.networks.dueling import DuelingNetwork
from apexrl.networks.torsos import Torso, check_sizes, make_torso
from apexrl.types import EnvironmentSpec


def make_network(spec: EnvironmentSpec, config: NormalizedConfig) -> "NormalizedNetwork":
    """Returns the network for the observations of a spec.

    Raises: ConfigError when the shape of the frames is not supported, or a size makes no sense.
    """
    check_sizes(config, *config.channels, config.hidden_size)
    torso = make_torso(spec, config.channels, config.hidden_size, own=config)
    return NormalizedNetwork(torso, config.hidden_size, spec.num_actions)


class NormalizedNetwork(DuelingNetwork):
    """The dueling network with LayerNorm of the torso's features, and of each hidden layer.

    Source: arXiv:2407.04811, which normalizes convolutions, too, and has no dueling heads.
    """

    def __init__(self, torso: Torso, hidden_size: int, num_actions: int):
        super().__init__(torso, hidden_size, num_actions)
        self.of_features = nn.LayerNorm(torso.num_features)
        self.of_streams = nn.GroupNorm(2, 2 * hidden_size)  # of value and advantage apart

    def heads(self, features: Tensor) -> Tensor:
        """Returns [B, A] float32 action values of the torso's features."""
        with torch.autocast(features.device.type, enabled=False):
            features = self.of_features(features.float())
        hidden = self.hidden(features.to(self.hidden.weight.dtype))
        with torch.autocast(hidden.device.type, enabled=False):
            value, advantage = F.relu(self.of_streams(hidden.float())).chunk(2, dim=1)
            advantage = self.advantage(advantage)
            return self.value(value) + advantage - advantage.mean(dim=1, keepdim=True)
