"""Dueling Q-networks: a torso, then a value and an advantage of each action."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apexrl.networks.config import DuelingConfig
from apexrl.networks.torsos import FrameNetwork, Torso, check_sizes, make_torso
from apexrl.types import EnvironmentSpec


def make_network(spec: EnvironmentSpec, config: DuelingConfig) -> "DuelingNetwork":
    """Returns the dueling network for the observations of a spec.

    Raises: ConfigError when the shape of the frames is not supported, or a size makes no sense.
    """
    check_sizes(config, *config.channels, config.hidden_size)
    torso = make_torso(spec, config.channels, config.hidden_size)
    return DuelingNetwork(torso, config.hidden_size, spec.num_actions)


class DuelingNetwork(FrameNetwork):
    """Q = V + A - mean(A), each from a hidden layer of its own; the two layers are computed as one.

    Source: arXiv:1511.06581.
    """

    def __init__(self, torso: Torso, hidden_size: int, num_actions: int):
        super().__init__(torso)
        self.hidden = nn.Linear(torso.num_features, 2 * hidden_size)
        self.value = nn.Linear(hidden_size, 1)
        self.advantage = nn.Linear(hidden_size, num_actions)

    def heads(self, features: Tensor) -> Tensor:
        """Returns [B, A] float32 action values of the torso's features."""
        features = F.relu(self.hidden(features))
        # In bfloat16 values near 1 differ by steps of 0.008, as much as the actions of Pong: the last layer is float32.
        with torch.autocast(features.device.type, enabled=False):
            value, advantage = features.float().chunk(2, dim=1)
            advantage = self.advantage(advantage)
            return self.value(value) + advantage - advantage.mean(dim=1, keepdim=True)

    def compute_in(self, dtype: torch.dtype) -> None:
        """Converts all layers but the last ones, which stay float32."""
        self.torso.to(dtype)
        self.hidden.to(dtype)
