"""Actor-critic networks: a torso, a hidden layer, perhaps an LSTM, then the logits of a policy and a value.

Learners call `unroll` with whole unrolls. Actors call the network through a `Policy`, one step at a time:

* without an LSTM, `Policy.values` returns [E, A + 1],
* with an LSTM, `Policy.values` also takes the `memory_of` the environments, and returns [E, A + 1 + 2 lstm_size].

Where actions are vectors, a policy is the moments of a Gaussian instead of A logits.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from apexrl.errors import ConfigError
from apexrl.networks.config import FIRST_DEVIATIONS, ActorCriticConfig
from apexrl.networks.own_torso import OwnTorso
from apexrl.networks.recurrent import History, RecurrentNetwork
from apexrl.networks.torsos import ResidualTorso, Torso
from apexrl.types import EnvironmentSpec


class ActorCriticOutput(NamedTuple):
    """The results for the observations [..] of whole unrolls, all float32."""

    logits: Tensor  # [.., A] of the policy, or moments [.., 2 size] of a Gaussian
    values: Tensor  # [..]
    state: Tensor | None  # [B, 2, lstm_size], without gradient; None without an LSTM
    features: Tensor  # [.., size] that the last layers see


class ActorCriticNetwork(RecurrentNetwork):
    """A policy and a value of each observation.

    Source: arXiv:1802.01561, figure 3.
    """

    def __init__(self, spec: EnvironmentSpec, config: ActorCriticConfig, lstm_size: int = 0):
        """Makes the network as `RecurrentNetwork` does.

        Raises: ConfigError as that does, and when a policy over vectors learns nothing from its first deviation.
        """
        if wanted := FIRST_DEVIATIONS.wanted(config.first_deviation):
            raise ConfigError(f"a network of {config} makes no sense: --first-deviation has to be {wanted}")
        super().__init__(spec, config, lstm_size)
        self.policy = (nn.Linear(self.core_size, spec.num_actions) if spec.num_actions
                       else GaussianHead(self.core_size, len(spec.action_bounds), config.first_deviation))  # fmt: skip
        self.value = nn.Linear(self.core_size, 1)
        initialize(self.hidden, *torso_layers(self.torso))
        initialize(self.policy if isinstance(self.policy, nn.Linear) else self.policy.means, gain=0.01)
        initialize(self.value, gain=1.0)

    def outputs(self, core: Tensor) -> Tensor:
        """Returns [.., A + 1]: the logits or moments, and the value."""
        return torch.cat([self.policy(core), self.value(core)], dim=-1)

    def unroll(
        self, observation: Tensor, history: History | None = None, num_steps: int | None = None
    ) -> ActorCriticOutput:
        """Returns logits [T + 1, B, A] and values [T + 1, B] of whole unrolls; arguments as `core` has them."""
        core, state = self.core(observation, history, num_steps)
        with torch.autocast(core.device.type, enabled=False):
            ended = None if state is None else state.detach()
            logits = self.masked(self.policy(core), observation[:, :, -1])
            return ActorCriticOutput(logits, self.value(core).squeeze(-1), ended, core)


class GaussianHead(nn.Module):
    """The moments [.., 2 size] of a Gaussian, whose deviations no observation changes.

    Sources: TRPO (arXiv:1502.05477, appendix D), and PPO of OpenAI's baselines.
    """

    def __init__(self, num_features: int, size: int, first_deviation: float):
        super().__init__()
        self.means = nn.Linear(num_features, size)
        self.log_deviations = nn.Parameter(torch.full((size,), math.log(first_deviation)))

    def forward(self, features: Tensor) -> Tensor:
        """Returns means, then logarithms of deviations."""
        means = self.means(features)
        return torch.cat([means, self.log_deviations.expand_as(means)], dim=-1)


def torso_layers(torso: Torso) -> list[nn.Module]:
    """Returns the layers of a torso that an activation follows: none of a residual or the user's own."""
    if isinstance(torso, ResidualTorso | OwnTorso) or not isinstance(torso, nn.Module):
        return []
    return [layer for layer in torso.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]


@torch.no_grad()
def initialize(*layers: nn.Module, gain: float = 2**0.5) -> None:
    """Gives layers orthogonal weights, and biases of zero.

    torch's own weights make what differs between screens smaller with each layer. In Pong a thousandth of it arrives at
    the value, which learns nothing from it in two million steps; with these weights it does (docs/results). Source: the
    gains of OpenAI's baselines for A2C and PPO; a policy that begins nearly uniform also is arXiv:2006.05990's advice.
    """
    for layer in layers:
        assert isinstance(layer, nn.Conv2d | nn.Linear) and layer.bias is not None
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
