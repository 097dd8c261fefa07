"""Dueling Q-networks: a torso, then a value and an advantage of each action."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apexrl.networks.actor_critic import initialize, torso_layers
from apexrl.networks.config import ActorCriticConfig, DuelingConfig, NormalizedConfig
from apexrl.networks.recurrent import History, RecurrentNetwork
from apexrl.networks.torsos import FrameNetwork, Torso, check_sizes, make_torso
from apexrl.types import EnvironmentSpec


def make_network(spec: EnvironmentSpec, config: DuelingConfig) -> "DuelingNetwork":
    """Returns the dueling network for the observations of a spec.

    Raises: ConfigError when the shape of the frames is not supported, or a size makes no sense.
    """
    check_sizes(config, *config.channels, config.hidden_size)
    torso = make_torso(spec, config.channels, config.hidden_size, own=config)
    if config.quantiles:
        return QuantileNetwork(torso, config.hidden_size, spec.num_actions, config.quantiles)
    return DuelingNetwork(torso, config.hidden_size, spec.num_actions)


def make_normalized_network(spec: EnvironmentSpec, config: NormalizedConfig) -> "NormalizedNetwork":
    """Returns the dueling network with normalized layers for the observations of a spec; raises as `make_network`."""
    check_sizes(config, *config.channels, config.hidden_size)
    torso = make_torso(spec, config.channels, config.hidden_size, own=config)
    return NormalizedNetwork(torso, config.hidden_size, spec.num_actions)


class DuelingNetwork(FrameNetwork):
    """Q = V + A - mean(A), each from a hidden layer of its own; the two layers are computed as one.

    Source: arXiv:1511.06581.
    """

    def __init__(self, torso: Torso, hidden_size: int, num_actions: int, outputs: int = 1):
        """Makes a network with so many outputs for each action."""
        super().__init__(torso)
        self.hidden = nn.Linear(torso.num_features, 2 * hidden_size)
        self.value = nn.Linear(hidden_size, outputs)
        self.advantage = nn.Linear(hidden_size, num_actions * outputs)

    def heads(self, features: Tensor) -> Tensor:
        """Returns [B, A] float32 action values of the torso's features."""
        value, advantage = self._streams(features)
        return value + advantage - advantage.mean(dim=1, keepdim=True)

    def compute_in(self, dtype: torch.dtype) -> None:
        """Converts all layers but the last ones, which stay float32."""
        self.torso.to(dtype)
        self.hidden.to(dtype)

    def _streams(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the outputs of the last layers in float32: of the value [B, N], and of the advantages [B, A N]."""
        hidden = self._hidden(features)
        # In bfloat16 values near 1 differ by steps of 0.008, as much as the actions of Pong: the last layer is float32.
        with torch.autocast(hidden.device.type, enabled=False):
            value, advantage = hidden.float().chunk(2, dim=1)
            return self.value(value), self.advantage(advantage)

    def _hidden(self, features: Tensor) -> Tensor:
        """Returns the hidden layer of both streams [B, 2 hidden_size]."""
        return F.relu(self.hidden(features))


class QuantileNetwork(DuelingNetwork):
    """The dueling network with N quantiles of each action's return; actors get their means.

    Source: QR-DQN (arXiv:1710.10044); dueling in each quantile.
    """

    def __init__(self, torso: Torso, hidden_size: int, num_actions: int, num_quantiles: int):
        super().__init__(torso, hidden_size, num_actions, num_quantiles)
        self.num_quantiles = num_quantiles

    def heads(self, features: Tensor) -> Tensor:
        """Returns [B, A] float32: the expectations."""
        return self._quantiles(features).mean(dim=2)

    def quantiles(self, prepared: Tensor) -> Tensor:
        """Returns the quantiles [B, A, N] float32 of prepared stacks."""
        found = self._quantiles(self.torso.features(prepared, self.torso.kernel()))
        return self.masked(found.movedim(2, 0), prepared).movedim(0, 2)

    def _quantiles(self, features: Tensor) -> Tensor:
        value, advantages = self._streams(features)
        advantage = advantages.unflatten(1, (-1, self.num_quantiles))
        return value.unsqueeze(1) + advantage - advantage.mean(dim=1, keepdim=True)


class NormalizedNetwork(DuelingNetwork):
    """The dueling network with LayerNorm of the torso's features, and of each hidden layer: it learns without a target.

    Source: arXiv:2407.04811, which normalizes convolutions, too, and has no dueling heads.
    """

    def __init__(self, torso: Torso, hidden_size: int, num_actions: int):
        super().__init__(torso, hidden_size, num_actions)
        self.of_features = nn.LayerNorm(torso.num_features)
        self.of_streams = nn.GroupNorm(2, 2 * hidden_size)  # of value and advantage apart

    def _hidden(self, features: Tensor) -> Tensor:
        with torch.autocast(features.device.type, enabled=False):
            features = self.of_features(features.float())
        hidden = self.hidden(features.to(self.hidden.weight.dtype))
        with torch.autocast(hidden.device.type, enabled=False):
            return F.relu(self.of_streams(hidden.float()))


class RecurrentDuelingNetwork(RecurrentNetwork):
    """Q = V + A - mean(A) of what an LSTM has seen, each from a hidden layer of its own.

    Source: R2D2 (ICLR 2019).
    """

    def __init__(self, spec: EnvironmentSpec, config: ActorCriticConfig, lstm_size: int):
        super().__init__(spec, config, lstm_size)
        self.streams = nn.Linear(self.core_size, 2 * config.hidden_size)
        self.value = nn.Linear(config.hidden_size, 1)
        self.advantage = nn.Linear(config.hidden_size, spec.num_actions)
        initialize(self.hidden, *torso_layers(self.torso))

    def outputs(self, core: Tensor) -> Tensor:
        """Returns [.., A] action values."""
        value, advantage = self.activation(self.streams(core)).chunk(2, dim=-1)
        advantage = self.advantage(advantage)
        return self.value(value) + advantage - advantage.mean(dim=-1, keepdim=True)

    def unroll(self, observation: Tensor, history: History | None, num_steps: int | None = None) -> "UnrolledValues":
        """Returns values [T + 1, B, A] of whole unrolls; arguments as `core` has them. The state has a gradient."""
        core, state = self.core(observation, history, num_steps)
        assert state is not None
        with torch.autocast(core.device.type, enabled=False):
            return UnrolledValues(self.masked(self.outputs(core), observation[:, :, -1]), state)


class UnrolledValues(NamedTuple):
    """The results for whole unrolls, float32."""

    values: Tensor  # [T + 1, B, A]
    state: Tensor  # [B, 2, lstm_size]
