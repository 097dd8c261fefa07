"""Ape-X DQN: n-step double Q-learning with a dueling network and prioritized replay (arXiv:1803.00933).

`ApexActor` is algorithm 1 of the paper without its loop: it chooses actions and computes initial priorities.
`ApexLearner` is algorithm 2 without its loop: it computes the gradients of a batch, and new priorities.
"""

import copy
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from apexrl.agents.apex_dqn_config import ApexAlgorithm, ApexUpdate
from apexrl.agents.cast_copy import CastCopy
from apexrl.agents.contract import Batches, Exploration, Extras, Leave, Observation, Outcome, TransitionBatch
from apexrl.agents.exploration import epsilon_greedy, epsilon_ladder
from apexrl.agents.gradient import Gradient
from apexrl.agents.optimizers import make_optimizer, optimizer_tensors, schedule_rate, step_where_finite
from apexrl.losses.value_learning import double_q_errors, huber, huber_gradient, n_step_targets
from apexrl.losses.windows import n_step_windows
from apexrl.networks.config import DuelingConfig, from_text
from apexrl.networks.device import autocast_for, copied_dtype
from apexrl.networks.dueling import make_network
from apexrl.networks.frame_stack import FrameStack
from apexrl.networks.parameters import Parameters
from apexrl.networks.policy import Policy
from apexrl.types import StreamSpec, StreamUnrolls

SMALLEST_PRIORITY = 1e-6  # a transition without any error can still be drawn; 0 would take it out of the table


class ApexActor:
    """Acts epsilon-greedily with vectors of environments. Owned by one thread."""

    def __init__(self, algorithm: ApexAlgorithm, parameters: Parameters, device: torch.device):
        self._algorithm = algorithm
        self._device = device
        self.header = parameters.header
        self._policy = self._make_policy(parameters)

    def load(self, parameters: Parameters) -> None:
        if parameters.header.network == self.header.network:
            self._policy.load(parameters.tensors)
        else:  # the learner came back with another network
            self._policy = self._make_policy(parameters)
        self.header = parameters.header

    def initial_state(self, num_envs: int) -> FrameStack:
        return self._policy.frame_stack(num_envs)

    def explore(self, slots: np.ndarray, ladder_size: int) -> Exploration:
        """Returns the epsilons [E] of the ladder."""
        return epsilon_ladder(slots, ladder_size, self._algorithm.epsilon_base, self._algorithm.epsilon_exponent)

    def act(
        self, observation: Observation, exploration: Exploration, state: FrameStack, rng: np.random.Generator
    ) -> tuple[np.ndarray, Extras, FrameStack]:
        """Returns epsilon-greedy actions [E]; the values that `priorities` needs; the stack with the new frames."""
        q_values = self._policy.values(observation.frames, observation.starts, state)
        actions = epsilon_greedy(q_values, exploration, rng)
        taken = q_values[np.arange(len(actions)), actions]
        return actions, {"q_taken": taken, "q_max": q_values.max(axis=1)}, state

    def priorities(self, unrolls: StreamUnrolls, extras: Extras) -> np.ndarray:
        """Returns |n-step TD error| [K, E] by the actor's own values."""
        algorithm = self._algorithm
        steps = unrolls.rewards, unrolls.discounts, unrolls.starts
        returns, discounts, offsets = n_step_windows(*steps, algorithm.gamma, algorithm.n_steps)
        num_starts = len(returns)
        ends = np.arange(num_starts)[:, None] + offsets
        bootstrap = np.take_along_axis(extras["q_max"], ends, axis=0)
        tensors = (torch.from_numpy(array) for array in (returns, discounts, bootstrap))
        targets = n_step_targets(*tensors, rescaling=algorithm.value_rescaling).numpy()
        return np.abs(targets - extras["q_taken"][:num_starts]) + SMALLEST_PRIORITY

    def _make_policy(self, parameters: Parameters) -> Policy:
        spec, network = parameters.header.spec, from_text(parameters.header.network, DuelingConfig)
        return Policy(spec, lambda: make_network(spec, network), self._device, parameters.tensors)


class ApexLearner:
    """Updates the online network from batches of transitions; the target network follows it in steps."""

    has_side_work = True

    def __init__(self, algorithm: ApexAlgorithm, network: DuelingConfig, update: ApexUpdate, spec: StreamSpec,
                 device: torch.device):  # fmt: skip
        self._algorithm = algorithm
        self._update = update
        self._has_small_frames = spec.has_small_frames
        self._precision = autocast_for(device, spec)
        self.online = make_network(spec, network).to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self._gradient = Gradient(self.online, is_mean=True)
        dtype = copied_dtype(device, spec)
        self._online_copy, self._target_copy = (CastCopy(net, dtype) for net in (self.online, self.target))
        self._optimizer = make_optimizer(update, self._gradient.parameters)

    @property
    def gradient(self) -> Tensor:
        return self._gradient.buffer

    def use_thread(self, leave: Leave) -> None:
        """Leaves gradients of weights to the thread, where frames are not so small that it costs more than it saves."""
        if not self._has_small_frames:
            self._gradient.use_thread(leave, self._online_copy.network)

    def schedule(self, frames: int, share: float) -> None:
        """Sets the learning rate."""
        schedule_rate(self._optimizer, self._update, share)

    @torch.no_grad()
    def ahead(self, batches: Batches) -> tuple[Tensor, Tensor]:
        """Returns the prepared next observations, and the target network's values of them [B, A]."""
        with self._precision():
            self._target_copy.cast()
            prepared = self.online.prepare(self._batch(batches).next_observation)
            return prepared, self._target_copy.network.values(prepared).float()

    @torch.no_grad()
    def beside(self, batches: Batches, ahead: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Returns the online and the target network's values of the next observations [B, A]."""
        prepared, q_target_t = ahead
        with self._precision():
            return self._online_copy.network.values(prepared).float(), q_target_t

    def gradients(self, batches: Batches, beside: Callable[[], tuple[Tensor, Tensor]]) -> Outcome:
        """Computes the gradients of the mean of weight * Huber(TD error) over the batch."""
        batch, online = self._batch(batches), self._online_copy
        online.cast()
        with self._precision():
            q_tm1 = online.network.values(online.network.prepare(batch.observation)).float()
            q_online_t, q_target_t = beside()
        targets = batch.n_step_return, batch.discount, q_target_t, q_online_t
        q_values = q_tm1.detach()
        errors = double_q_errors(q_values, batch.action, *targets, rescaling=self._algorithm.value_rescaling)
        slopes = huber_gradient(q_values, batch.action, errors, batch.weight)
        self._gradient.compute(q_tm1, len(errors), slopes, online.parameters)
        magnitude = errors.abs()
        metrics = {"loss": (batch.weight * huber(errors)).mean(), "td_error": magnitude,
                   "q_mean": q_values, "q_max": q_values, "importance_weight": batch.weight.mean()}  # fmt: skip
        return Outcome({self._update.table: magnitude + SMALLEST_PRIORITY}, metrics)

    def apply(self) -> dict[str, Tensor]:
        """Clips the gradients and takes the optimizer's step."""
        return {"gradient_norm": step_where_finite(self._optimizer, self._gradient, self._update.max_gradient_norm)}

    def is_refresh_due(self, num_updates: int) -> bool:
        return num_updates % self._update.target_period_updates == 0

    @torch.no_grad()
    def refresh(self) -> None:
        """Copies the online network into the target network."""
        torch._foreach_copy_(list(self.target.parameters()), list(self.online.parameters()))

    def acting_tensors(self) -> dict[str, Tensor]:
        return self.online.state_dict()

    def learning_tensors(self) -> dict[str, Tensor]:
        target = {f"target.{name}": tensor for name, tensor in self.target.state_dict().items()}
        return target | optimizer_tensors(self._optimizer, self._gradient)

    def _batch(self, batches: Batches) -> TransitionBatch:
        batch = batches[self._update.table]
        assert isinstance(batch, TransitionBatch)
        return batch


def check_network(network: DuelingConfig, spec: StreamSpec) -> None:
    """Raises ConfigError when the network does not take the observations."""
    with torch.device("meta"):
        make_network(spec, network)


make_actor, make_learner = ApexActor, ApexLearner
