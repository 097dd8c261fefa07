"""Runs the actor's half of a plain algorithm: its network, the stacks of frames, and the state of an LSTM."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from apexrl.agents.contract import Exploration, Extras, Observation
from apexrl.agents.engine.plain import Acting
from apexrl.agents.recurrence import LAST_ACTION, LAST_REWARD, STATE, lstm_size_of
from apexrl.config.sections import NetworkConfig
from apexrl.errors import ApexError
from apexrl.networks.config import from_text
from apexrl.networks.frame_stack import FrameStack
from apexrl.networks.parameters import Parameters
from apexrl.networks.policy import Policy
from apexrl.networks.recurrent import History, memory_of
from apexrl.networks.torsos import FrameNetwork
from apexrl.types import StreamSpec, StreamUnrolls


@dataclasses.dataclass
class ActorState:
    """The state of E environments between two calls of `act`."""

    stack: FrameStack
    core_state: np.ndarray  # [E, 2, lstm_size] float32; lstm_size 0 without an LSTM
    last_action: np.ndarray  # [E] int32


class PlainActor:
    """A `contract.Actor` of an `Acting`. Owned by one thread."""

    def __init__(
        self,
        acting: Acting,
        kind: type[NetworkConfig],
        make_network: Callable[[StreamSpec, Any], FrameNetwork],
        parameters: Parameters,
        device: torch.device,
    ):
        """Makes the network with the parameters.

        Args:
          kind: of the network's configuration.
          make_network: of the algorithm's module.
        Raises: WireError when the parameters are not those of the network that their header describes.
        """
        self._acting, self._make_network, self._kind, self._device = acting, make_network, kind, device
        self._lstm_size = lstm_size_of(acting.spec)
        self._policy = self._make_policy(parameters)
        self._take_header(parameters)

    def load(self, parameters: Parameters) -> None:
        if parameters.header.network == self.header.network:
            self._policy.load(parameters.tensors)
        else:  # the learner came back with another network
            self._policy = self._make_policy(parameters)
        self._take_header(parameters)

    def initial_state(self, num_envs: int) -> ActorState:
        core_state = np.zeros((num_envs, 2, self._lstm_size), np.float32)
        return ActorState(self._policy.frame_stack(num_envs), core_state, np.zeros(num_envs, np.int32))

    def explore(self, slots: np.ndarray, ladder_size: int) -> Exploration:
        return self._acting.explore(slots, ladder_size)

    @property
    def evaluation_exploration(self) -> float:
        return self._acting.evaluation_exploration

    def act(
        self, observation: Observation, exploration: Exploration, state: ActorState, rng: np.random.Generator
    ) -> tuple[np.ndarray, Extras, ActorState]:
        """Returns actions and extras of the algorithm, with those of an LSTM where there is one; and the next state."""
        frames, starts, rewards = observation
        if not self._lstm_size:
            values = self._policy.values(frames, starts, state.stack)
            return *self._chosen(values, exploration, rng), state
        learned = rewards * np.float32(self._policy.reward_scale)  # as the learner sees those of the log
        past = (starts, state.last_action.astype(np.int64), learned, state.core_state)
        memory = memory_of(History(*map(torch.from_numpy, past)), self._acting.spec.num_actions).numpy()
        values, after = np.split(self._policy.values(frames, starts, state.stack, memory), [-2 * self._lstm_size], 1)
        actions, extras = self._chosen(values, exploration, rng)
        own = {STATE: state.core_state.astype(np.float16), LAST_ACTION: state.last_action, LAST_REWARD: rewards}
        return actions, extras | own, ActorState(state.stack, after.reshape(state.core_state.shape), actions)

    def priorities(self, unrolls: StreamUnrolls, extras: Extras) -> np.ndarray | None:
        if (scale := self._policy.reward_scale) != 1:
            unrolls = unrolls._replace(rewards=unrolls.rewards * np.float32(scale))
        return self._acting.priorities(unrolls, extras)

    def _chosen(self, values: np.ndarray, exploration: Exploration, rng: np.random.Generator) -> tuple[Any, Extras]:
        found = self._acting.act(values, exploration, rng)
        if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[1], dict):
            raise ApexError(f"`act` gives a {type(found).__name__}: give a tuple of actions, and extras by name")
        return found

    def _take_header(self, parameters: Parameters) -> None:
        self.header, self._acting.params_version = parameters.header, parameters.header.params_version

    def _make_policy(self, parameters: Parameters) -> Policy:
        spec, network = parameters.header.spec, from_text(parameters.header.network, self._kind)
        policy = Policy(spec, lambda: self._make_network(spec, network), self._device, parameters.tensors)
        self._acting.network = policy.network
        return policy


def actor_of(
    acting: Callable[[Any, StreamSpec], Acting],
    kind: type[NetworkConfig],
    make_network: Callable[[StreamSpec, Any], FrameNetwork],
) -> Callable[[Any, Parameters, torch.device], PlainActor]:
    """Returns the `make_actor` of an algorithm's module: see `contract.Implementation`."""
    return lambda algorithm, parameters, device: PlainActor(
        acting(algorithm, parameters.header.spec), kind, make_network, parameters, device
    )
