"""Ape-X DQN: n-step double Q-learning with a dueling network and prioritized replay (arXiv:1803.00933)."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from apexrl.agents.apex_dqn_config import ApexAlgorithm, ApexUpdate
from apexrl.agents.contract import Batches, Exploration, Extras
from apexrl.agents.engine.plain import SMALLEST_PRIORITY, Acting, Learning, Losses, Networks, Slope, Target
from apexrl.agents.engine.plain_actor import actor_of
from apexrl.agents.engine.plain_learner import learner_of
from apexrl.agents.exploration import epsilon_greedy, epsilon_ladder
from apexrl.losses.value_learning import double_q_errors, huber, huber_gradient, mean_of_allowed, n_step_targets
from apexrl.losses.windows import at_window_ends, n_step_windows
from apexrl.networks.config import DuelingConfig
from apexrl.networks.dueling import make_network
from apexrl.types import StreamUnrolls


class EpsilonGreedyActing(Acting):
    """The greatest value's action, or with an environment's own epsilon a random one (section 4 of the paper)."""

    def explore(self, slots: np.ndarray, ladder_size: int) -> Exploration:
        """Returns the epsilons [E] of the ladder."""
        return epsilon_ladder(slots, ladder_size, self.algorithm.epsilon_base, self.algorithm.epsilon_exponent)

    @property
    def evaluation_exploration(self) -> float:
        return self.algorithm.evaluation_epsilon

    def act(self, values: np.ndarray, exploration: Exploration, rng: np.random.Generator) -> tuple[np.ndarray, Extras]:
        return epsilon_greedy(values, exploration, rng), {}


class ApexActing(EpsilonGreedyActing):
    """Algorithm 1 of the paper without its loop: it chooses actions and computes initial priorities."""

    algorithm: ApexAlgorithm

    def act(self, values: np.ndarray, exploration: Exploration, rng: np.random.Generator) -> tuple[np.ndarray, Extras]:
        """Returns epsilon-greedy actions [E], and the values that `priorities` needs."""
        actions, _ = super().act(values, exploration, rng)
        return actions, {"q_taken": values[np.arange(len(actions)), actions], "q_max": values.max(axis=1)}

    def priorities(self, unrolls: StreamUnrolls, extras: Extras) -> np.ndarray:
        """Returns |n-step TD error| [K, E] by the actor's own values."""
        steps = unrolls.rewards, unrolls.discounts, unrolls.starts
        returns, discounts, offsets = n_step_windows(*steps, self.algorithm.gamma, self.algorithm.n_steps)
        tensors = map(torch.from_numpy, (returns, discounts, at_window_ends(extras["q_max"], offsets)))
        targets = n_step_targets(*tensors, rescaling=self.algorithm.value_rescaling).numpy()
        return np.abs(targets - extras["q_taken"][: len(returns)]) + SMALLEST_PRIORITY


class ApexLearning(Learning):
    """Algorithm 2 of the paper without its loop: the losses of a batch, and new priorities."""

    algorithm: ApexAlgorithm
    update: ApexUpdate
    acting = called_once = ("q",)

    @property
    def target(self) -> Target:
        return Target(self.update.target_period_updates)

    def parts(self) -> dict[str, nn.Module]:
        return {"q": make_network(self.spec, self.network)}

    def from_target(self, target: Networks, batches: Batches) -> tuple[Tensor, Tensor]:
        """Returns the prepared next observations, and the target network's values of them [B, A]."""
        prepared = target["q"].prepare(batches[self.update.table].next_observation)
        return prepared, target["q"].values(prepared).float()

    def from_online(self, online: Networks, batches: Batches, from_target: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        """Returns the online and the target network's values of the next observations [B, A]."""
        return online["q"].values(from_target[0]).float(), from_target[1]

    def losses(self, online: Networks, batches: Batches, known: Callable[[], tuple[Tensor, Tensor]]) -> Losses:
        """Returns weight * Huber(n-step double-Q error) by its closed-form gradient, and the errors as priorities."""
        batch = batches[self.update.table]
        q_tm1 = online["q"](batch.observation).float()
        q_online_t, q_target_t = known()
        q, targets = q_tm1.detach(), (batch.n_step_return, batch.discount, q_target_t, q_online_t)
        errors = double_q_errors(q, batch.action, *targets, rescaling=self.algorithm.value_rescaling)
        slope = Slope(q_tm1, huber_gradient(q, batch.action, errors, batch.weight))
        return self.told(slope, batch.weight, huber(errors), errors, q)

    def told(self, slope: Slope, weight: Tensor, losses: Tensor, errors: Tensor, q: Tensor) -> Losses:
        """Returns a slope with priorities and metrics: of weights, losses and errors [B], and of values [B, A]."""
        magnitude = errors.abs()
        metrics = {"loss": (weight * losses).mean(), "td_error": magnitude, "q_max": q,
                   "q_mean": mean_of_allowed(q) if self.spec.mask_size else q,
                   "importance_weight": weight.mean()}  # fmt: skip
        return Losses({"q": slope}, len(errors), {self.update.table: magnitude + SMALLEST_PRIORITY}, metrics)


make_actor, make_learner = actor_of(ApexActing, DuelingConfig, make_network), learner_of(ApexLearning)
