"""Networks of policies over vectors of actions: deterministic ones, and Gaussians that a tanh squashes into bounds."""

import numpy as np
import torch
from torch import Tensor, nn

from apexrl.errors import ConfigError
from apexrl.networks.action_range import RangedModule
from apexrl.networks.config import DeterministicConfig, GaussianConfig, VectorConfig
from apexrl.networks.critics import Critics
from apexrl.networks.torsos import FrameNetwork, Torso, check_sizes, make_torso
from apexrl.types import EnvironmentSpec


class DeterministicPolicy(FrameNetwork, RangedModule):
    """An action for each observation, within the bounds of the environment by a tanh.

    Source: arXiv:1509.02971.
    """

    def __init__(self, spec: EnvironmentSpec, config: DeterministicConfig):
        """Raises ConfigError when the shape of the frames is not supported, or a size makes no sense."""
        atoms = np.linspace(config.least_return, config.most_return, config.atoms, dtype=np.float32)
        if config.atoms == 1 or not (np.diff(atoms) > 0).all():
            raise ConfigError(
                "--atoms have to be 2 at least, from --least-return to a --most-return so much greater that all of "
                "them differ as floats of 32 bits; or give 0"
            )
        super().__init__(_torso(spec, config))
        self.action = nn.Linear(self.torso.num_features, len(spec.action_bounds))
        self.take_range(spec)
        self.critics: Critics | None = None  # of an actor whose initial priorities are their errors

    def heads(self, features: Tensor) -> Tensor:
        """Returns the actions [B, size] float32 of the torso's features."""
        with torch.autocast(features.device.type, enabled=False):  # bfloat16 would make steps of single actions
            return self.center + self.reach * torch.tanh(self.action(features.float()))


class GaussianPolicy(FrameNetwork, RangedModule):
    """The means of an action's numbers and the logarithms of their deviations, before the tanh.

    Source: SAC, arXiv:1812.05905.
    """

    def __init__(self, spec: EnvironmentSpec, config: GaussianConfig):
        """Raises ConfigError when the shape of the frames is not supported, or a size makes no sense."""
        super().__init__(_torso(spec, config))
        self.moments = nn.Linear(self.torso.num_features, 2 * len(spec.action_bounds))
        self.take_range(spec)

    def heads(self, features: Tensor) -> Tensor:
        """Returns [B, 2 size] float32 of the torso's features: means, then logarithms of deviations."""
        with torch.autocast(features.device.type, enabled=False):
            moments: Tensor = self.moments(features.float())
        return moments


def _torso(spec: EnvironmentSpec, config: VectorConfig) -> Torso:
    check_sizes(config, *config.channels, config.hidden_size, config.critics)
    return make_torso(spec, config.channels, config.hidden_size, own=config)
