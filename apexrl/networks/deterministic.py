"""Networks for vectors of actions: a policy that chooses one, and critics that value it."""

import torch
from torch import Tensor, nn

from apexrl.networks.config import DeterministicConfig
from apexrl.networks.frame_layout import FrameLayout
from apexrl.networks.torsos import FrameNetwork, check_sizes, make_torso
from apexrl.types import EnvironmentSpec


def make_policy(spec: EnvironmentSpec, config: DeterministicConfig) -> "DeterministicPolicy":
    """Returns the policy for the observations and actions of a spec.

    Raises: ConfigError when the shape of the frames is not supported, or a size makes no sense.
    """
    check_sizes(config, *config.channels, config.hidden_size, config.critics)
    return DeterministicPolicy(spec, config)


class DeterministicPolicy(FrameNetwork):
    """An action for each observation, within the bounds of the environment by a tanh.

    Source: arXiv:1509.02971.
    """

    center: Tensor
    reach: Tensor

    def __init__(self, spec: EnvironmentSpec, config: DeterministicConfig):
        super().__init__(make_torso(spec, config.channels, config.hidden_size))
        low, high = torch.tensor(spec.action_bounds).T
        self.action = nn.Linear(self.torso.num_features, len(low))
        self.register_buffer("center", (low + high) / 2, persistent=False)
        self.register_buffer("reach", (high - low) / 2, persistent=False)

    def heads(self, features: Tensor) -> Tensor:
        """Returns the actions [B, size] float32 of the torso's features."""
        with torch.autocast(features.device.type, enabled=False):  # bfloat16 would make steps of single actions
            return self.center + self.reach * torch.tanh(self.action(features.float()))


class Critics(nn.Module):
    """One value of each action, or more of them by networks of their own."""

    def __init__(self, spec: EnvironmentSpec, config: DeterministicConfig):
        super().__init__()
        self.each = nn.ModuleList(Critic(spec, config) for _ in range(config.critics))

    def forward(self, observations: Tensor, actions: Tensor) -> Tensor:
        """Returns the values [C, B] of actions [B, size] at stacks [B, H, *stored]."""
        return torch.stack([critic(observations, actions) for critic in self.each])


class Critic(nn.Module):
    """The value of an action, which joins the observation where it is a vector, or else the features of pictures."""

    center: Tensor
    reach: Tensor

    def __init__(self, spec: EnvironmentSpec, config: DeterministicConfig):
        super().__init__()
        self.layout, size = FrameLayout.of(spec), config.hidden_size
        is_vector, num_numbers = len(spec.frame_shape) <= 1, spec.stacked_frames * spec.frame_size
        self.torso = None if is_vector else make_torso(spec, config.channels, size)
        num_features = num_numbers if self.torso is None else self.torso.num_features
        low, high = torch.tensor(spec.action_bounds).T
        self.register_buffer("center", (low + high) / 2, persistent=False)
        self.register_buffer("reach", (high - low) / 2, persistent=False)
        layers: list[nn.Module] = []
        for inputs in (num_features + len(low), size):
            layers += [nn.Linear(inputs, size), nn.LayerNorm(size) if config.layer_norm else nn.Identity(), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(size, 1))

    def forward(self, observations: Tensor, actions: Tensor) -> Tensor:
        """Returns the values [B] of actions [B, size] at stacks [B, H, *stored]."""
        features = self.layout.prepare(observations, torch.float32)
        if self.torso is not None:
            features = self.torso.features(features, self.torso.kernel())
        scaled = (actions - self.center) / self.reach  # its layers see -1 to 1
        with torch.autocast(features.device.type, enabled=False):
            values: Tensor = self.layers(torch.cat([features.float(), scaled], dim=1))
        return values.squeeze(1)
