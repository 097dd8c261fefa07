"""Actor-critic networks: a torso, a hidden layer, perhaps an LSTM, then the logits of a policy and a value.

Learners call `unroll` with whole unrolls. Actors call the network through a `Policy`, one step at a time:

* without an LSTM, `Policy.values` returns [E, A + 1],
* with an LSTM, `Policy.values` also takes the `memory_of` the environments, and returns [E, A + 1 + 2 lstm_size].

`split` takes both apart.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apexrl.errors import ConfigError
from apexrl.networks.config import ActorCriticConfig
from apexrl.networks.lstm import EpisodicLSTM
from apexrl.networks.torsos import FrameNetwork, ResidualTorso, Torso, check_sizes, make_torso
from apexrl.types import EnvironmentSpec


class History(NamedTuple):
    """The past as an LSTM takes it; [..] is [T + 1, B] for a learner and [E] for an actor.

    Where an episode begins nothing of the past counts, so that any numbers may stand there.
    """

    start: Tensor  # [..] bool: the observation begins an episode
    last_action: Tensor  # [..] int64: the action that led to the observation
    last_reward: Tensor  # [..] float32: the reward of that action
    state: Tensor  # [B, 2, lstm_size] float32 before the first observation


class ActorCriticOutput(NamedTuple):
    """The results for observations [..], all float32."""

    logits: Tensor  # [.., A] of the policy
    values: Tensor  # [..]
    state: Tensor | None  # [B, 2, lstm_size], without gradient; None without an LSTM
    features: Tensor | None = None  # [.., size] that the last layers see; None in an actor


def make_network(spec: EnvironmentSpec, config: ActorCriticConfig, lstm_size: int = 0) -> "ActorCriticNetwork":
    """Returns the actor-critic network for the observations of a spec, with an LSTM where its size is not 0.

    Raises: ConfigError when actions or frames are of a kind that is not supported, or a size makes no sense.
    """
    if not spec.num_actions:
        raise ConfigError(f"{spec.env} has actions that are vectors: this network chooses among discrete actions")
    check_sizes(config, *config.channels, config.hidden_size, *([lstm_size] if lstm_size else []))
    torso = make_torso(spec, config.channels, config.hidden_size, config.torso)
    return ActorCriticNetwork(torso, config.hidden_size, spec.num_actions, lstm_size)


class ActorCriticNetwork(FrameNetwork):
    """Logits of a policy and a value of each observation. The LSTM and the last layers compute in float32.

    Source: arXiv:1802.01561, figure 3.
    """

    def __init__(self, torso: Torso, hidden_size: int, num_actions: int, lstm_size: int):
        super().__init__(torso)
        self.num_actions = num_actions
        self.hidden = nn.Linear(torso.num_features, hidden_size)
        self.lstm: EpisodicLSTM | None = None
        size = hidden_size
        if lstm_size:
            self.lstm = EpisodicLSTM(size + num_actions + 1, lstm_size)
            size = lstm_size
            self.memory_size = 2 * size + self.num_actions + 1
        self.policy = nn.Linear(size, self.num_actions)
        self.value = nn.Linear(size, 1)
        initialize(self.hidden, *torso_layers(torso))
        initialize(self.policy, gain=0.01)
        initialize(self.value, gain=1.0)

    def unroll(
        self, observation: Tensor, history: History | None = None, num_steps: int | None = None
    ) -> ActorCriticOutput:
        """Returns logits [T + 1, B, A] and values [T + 1, B] of whole unrolls, time first.

        Args:
          observation: [T + 1, B, H, *stored]: see `FrameLayout`.
          history: needed with an LSTM, and ignored without.
          num_steps: the returned state is the one after so many observations. After T of them it is the state before
            the last one, with which the stream's next unroll begins. None: after all.
        """
        prepared = self.prepare(observation.flatten(0, 1))
        hidden = self._hidden(self.torso.features(prepared, self.torso.kernel())).unflatten(0, observation.shape[:2])
        state = None
        with torch.autocast(hidden.device.type, enabled=False):
            if self.lstm is not None:
                if history is None:
                    raise ValueError("a network with an LSTM needs the history of its observations")
                last = last_step(history.start, history.last_action, history.last_reward, self.num_actions)
                inputs = torch.cat([hidden, last], dim=-1)
                hidden, state = self.lstm.unroll(inputs, history.start, history.state, num_steps)
            return ActorCriticOutput(self.policy(hidden), self.value(hidden).squeeze(-1), state, hidden)

    def heads(self, features: Tensor) -> Tensor:
        """Returns [B, A + 1] float32 of the torso's features; with an LSTM `step` of episodes that begin here."""
        if self.lstm is not None:
            return self.step(features, features.new_zeros(len(features), self.memory_size, dtype=torch.float32))
        hidden = self._hidden(features)
        with torch.autocast(hidden.device.type, enabled=False):
            return torch.cat([self.policy(hidden), self.value(hidden)], dim=1)

    def step(self, features: Tensor, memory: Tensor) -> Tensor:
        """Returns [B, A + 1 + 2 lstm_size] float32 of the torso's features and of `memory_of` earlier steps."""
        assert self.lstm is not None
        hidden = self._hidden(features)
        state, last = memory.split([2 * self.lstm.size, self.num_actions + 1], dim=1)
        with torch.autocast(hidden.device.type, enabled=False):
            inputs = torch.cat([hidden, last], dim=1)
            after = self.lstm.step(inputs, state.unflatten(1, (2, self.lstm.size)))
            output = after[:, 0]
            return torch.cat([self.policy(output), self.value(output), after.flatten(1)], dim=1)

    def compute_in(self, dtype: torch.dtype) -> None:
        """Converts the torso and the hidden layer; the others stay float32."""
        self.torso.to(dtype)
        self.hidden.to(dtype)

    def _hidden(self, features: Tensor) -> Tensor:
        """Returns the hidden layer [B, hidden_size] in float32."""
        return F.relu(self.hidden(features)).float()


def torso_layers(torso: Torso) -> list[nn.Module]:
    """Returns the layers of a torso that are followed by a ReLU; a residual torso adds its layers up instead."""
    if isinstance(torso, ResidualTorso) or not isinstance(torso, nn.Module):
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


def memory_of(history: History, num_actions: int) -> Tensor:
    """Returns the past of E environments as one array [E, memory_size], for `Policy.values`."""
    state = history.state.flatten(1).masked_fill(history.start.unsqueeze(1), 0)
    return torch.cat([state, last_step(history.start, history.last_action, history.last_reward, num_actions)], dim=1)


def last_step(start: Tensor, last_action: Tensor, last_reward: Tensor, num_actions: int) -> Tensor:
    """Returns [.., A + 1]: the last action as a one-hot vector, and the last reward clipped to [-1, 1].

    Where an episode begins both are zeros. Source: arXiv:1802.01561, figure 3 and appendix.
    """
    actions = torch.arange(num_actions, device=last_action.device)
    one_hot = (last_action.unsqueeze(-1) == actions).float()
    reward = last_reward.clamp(-1, 1).unsqueeze(-1)
    return torch.cat([one_hot, reward], dim=-1).masked_fill(start.unsqueeze(-1), 0)


def split(values: Tensor, num_actions: int) -> ActorCriticOutput:
    """Returns the parts of the result [E, X] of `Policy.values`; views of it."""
    state = values[:, num_actions + 1 :]
    recurrent = state.shape[1] > 0
    parts = values[:, :num_actions], values[:, num_actions]
    return ActorCriticOutput(*parts, state.unflatten(1, (2, -1)) if recurrent else None)
