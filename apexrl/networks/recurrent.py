"""Networks with an LSTM: a torso, a hidden layer, perhaps the LSTM, and last layers of a subclass.

Learners call them with whole unrolls. Actors call them through a `Policy`, one step at a time, which also takes the
`memory_of` the environments, and returns [E, X + 2 lstm_size]: the outputs with the new state behind them.
"""

import abc
from typing import NamedTuple

import torch
from torch import Tensor, nn

from apexrl.networks.config import ActorCriticConfig
from apexrl.networks.lstm import EpisodicLSTM
from apexrl.networks.torsos import ACTIVATIONS, FrameNetwork, check_sizes, make_torso
from apexrl.types import EnvironmentSpec


class History(NamedTuple):
    """The past as an LSTM takes it; [..] is [T + 1, B] for a learner and [E] for an actor.

    Where an episode begins nothing of the past counts, so that any numbers may stand there.
    """

    start: Tensor  # [..] bool: the observation begins an episode
    last_action: Tensor  # [..] int64: the action that led to the observation
    last_reward: Tensor  # [..] float32: the reward of that action
    state: Tensor  # [B, 2, lstm_size] float32 before the first observation


class RecurrentNetwork(FrameNetwork):
    """A network that may have an LSTM. The LSTM and the last layers compute in float32."""

    def __init__(self, spec: EnvironmentSpec, config: ActorCriticConfig, lstm_size: int):
        """Makes the network for the observations of a spec, with an LSTM where its size is not 0.

        Raises: ConfigError when frames are of a kind that is not supported, or a size makes no sense.
        """
        size = config.hidden_size
        check_sizes(config, *config.channels, size, *([lstm_size] if lstm_size else []))
        super().__init__(make_torso(spec, config.channels, size, config.torso, config, config.activation))
        self.num_actions, self.activation = spec.num_actions, ACTIVATIONS[config.activation]
        self.hidden = nn.Linear(self.torso.num_features, size)
        self.lstm: EpisodicLSTM | None = None
        self.core_size = size  # numbers that the last layers see
        if lstm_size:
            self.lstm = EpisodicLSTM(size + spec.num_actions + 1, lstm_size)
            self.core_size = lstm_size
            self.memory_size = 2 * lstm_size + spec.num_actions + 1

    @abc.abstractmethod
    def outputs(self, core: Tensor) -> Tensor:
        """Returns [.., X] float32 of what the last layers see [.., core_size] float32."""

    def core(
        self, observation: Tensor, history: History | None = None, num_steps: int | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns what the last layers see of whole unrolls [T + 1, B, core_size], and the LSTM's state.

        Args:
          observation: [T + 1, B, H, *stored]: see `FrameLayout`.
          history: needed with an LSTM, and ignored without.
          num_steps: the returned state is the one after so many observations. After T of them it is the state before
            the last one, with which the stream's next unroll begins. None: after all.
        """
        prepared = self.prepare(observation.flatten(0, 1))
        hidden = self._hidden(self.torso.features(prepared, self.torso.kernel())).unflatten(0, observation.shape[:2])
        if self.lstm is None:
            return hidden, None
        if history is None:
            raise ValueError("a network with an LSTM needs the history of its observations")
        with torch.autocast(hidden.device.type, enabled=False):
            last = last_step(history.start, history.last_action, history.last_reward, self.num_actions)
            inputs = torch.cat([hidden, last], dim=-1)
            return self.lstm.unroll(inputs, history.start, history.state, num_steps)

    def heads(self, features: Tensor) -> Tensor:
        """Returns [B, X] float32 of the torso's features; with an LSTM `step` of episodes that begin here."""
        if self.lstm is not None:
            return self.step(features, features.new_zeros(len(features), self.memory_size, dtype=torch.float32))
        hidden = self._hidden(features)
        with torch.autocast(hidden.device.type, enabled=False):
            return self.outputs(hidden)

    def step(self, features: Tensor, memory: Tensor) -> Tensor:
        """Returns [B, X + 2 lstm_size] float32 of the torso's features and of `memory_of` earlier steps."""
        assert self.lstm is not None
        hidden = self._hidden(features)
        state, last = memory.split([2 * self.lstm.size, self.num_actions + 1], dim=1)
        with torch.autocast(hidden.device.type, enabled=False):
            inputs = torch.cat([hidden, last], dim=1)
            after = self.lstm.step(inputs, state.unflatten(1, (2, self.lstm.size)))
            return torch.cat([self.outputs(after[:, 0]), after.flatten(1)], dim=1)

    def compute_in(self, dtype: torch.dtype) -> None:
        """Converts the torso and the hidden layer; the others stay float32."""
        self.torso.to(dtype)
        self.hidden.to(dtype)

    def _hidden(self, features: Tensor) -> Tensor:
        """Returns the hidden layer [B, hidden_size] in float32."""
        return self.activation(self.hidden(features)).float()


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
