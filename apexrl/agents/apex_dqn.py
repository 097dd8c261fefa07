"""Ape-X DQN: n-step double Q-learning with a dueling network and prioritized replay (arXiv:1803.00933).

By flags with quantiles of returns (arXiv:1710.10044), Munchausen targets (arXiv:2007.14430), or both. Deviations from
these two: returns have n steps, and the log-policy of a Munchausen target is added to the first one's reward alone, as
those of the others are of observations that a transition does not hold. Priorities are errors of the expected return,
which actors know, too.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from apexrl.agents.apex_dqn_config import ApexAlgorithm, ApexUpdate
from apexrl.agents.contract import Batches, Exploration, Extras
from apexrl.agents.engine.plain import SMALLEST_PRIORITY, Acting, Learning, Losses, Networks, Slope, Target
from apexrl.agents.engine.plain_actor import actor_of
from apexrl.agents.engine.plain_learner import learner_of
from apexrl.agents.exploration import epsilon_greedy, epsilon_ladder
from apexrl.losses.quantiles import quantile_huber, quantile_huber_gradient
from apexrl.losses.value_learning import (
    huber,
    huber_gradient,
    mean_of_allowed,
    munchausen_bonus,
    n_step_targets,
    soft_values,
)
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
    """Algorithm 2 of the paper without its loop: the losses of a batch, and new priorities.

    A network without quantiles has its values as a single one.
    """

    algorithm: ApexAlgorithm
    update: ApexUpdate
    network: DuelingConfig
    acting = called_once = ("q",)

    @property
    def target(self) -> Target:
        return Target(self.update.target_period_updates)

    def parts(self) -> dict[str, nn.Module]:
        return {"q": make_network(self.spec, self.network)}

    def from_target(self, target: Networks, batches: Batches) -> Any:
        """Returns the prepared next observations, and the returns of each action there [B, A, N].

        For Munchausen targets, which need no online network: targets but for the reward, [B, N] and [B].
        """
        batch, network = batches[self.update.table], target["q"]
        prepared = network.prepare(batch.next_observation)
        returns = self._returns(network, prepared)
        if not self.update.munchausen:
            return prepared, returns
        temperature = self.update.policy_temperature
        values = soft_values(returns, temperature)
        before = network.values(network.prepare(batch.observation)).float()
        return values, self.update.munchausen * munchausen_bonus(before, batch.action, temperature)

    def from_online(self, online: Networks, batches: Batches, from_target: Any) -> tuple[Tensor, ...]:
        """Returns the returns [B, N] that targets bootstrap from, and if anything is added to rewards, that [B]."""
        if self.update.munchausen:
            return from_target
        prepared, returns = from_target
        best = online["q"].values(prepared).argmax(dim=1)  # double Q-learning
        return (returns.gather(1, best[:, None, None].expand(-1, 1, returns.shape[2])).squeeze(1),)

    def losses(self, online: Networks, batches: Batches, known: Callable[[], tuple[Tensor, ...]]) -> Losses:
        """Returns weight * Huber loss, or that of quantiles, by its closed-form gradient; priorities are the errors."""
        batch = batches[self.update.table]
        outputs = self._returns(online["q"], online["q"].prepare(batch.observation))
        returns = outputs.detach()
        next_returns, *gained = known()
        of_rows = batch.n_step_return + gained[0] if gained else batch.n_step_return, batch.discount
        rewards, discounts = (numbers.unsqueeze(1).expand_as(next_returns) for numbers in of_rows)
        targets = n_step_targets(rewards, discounts, next_returns, rescaling=self.algorithm.value_rescaling)
        is_single = not self.network.quantiles
        q, aim = (returns.squeeze(2), targets.squeeze(1)) if is_single else (returns.mean(dim=2), targets.mean(dim=1))
        errors = aim - q.gather(1, batch.action.unsqueeze(1)).squeeze(1)
        if is_single:
            losses = huber(errors)
            gradient = huber_gradient(q, batch.action, errors, batch.weight).unsqueeze(2)
        else:
            taken = returns[torch.arange(len(errors), device=errors.device), batch.action]
            losses = quantile_huber(taken, targets)
            gradient = quantile_huber_gradient(returns, batch.action, targets, batch.weight)
        magnitude = errors.abs()
        metrics = {"loss": (batch.weight * losses).mean(), "td_error": magnitude, "q_max": q,
                   "q_mean": mean_of_allowed(q) if self.spec.mask_size else q,
                   "importance_weight": batch.weight.mean()}  # fmt: skip
        priorities = {self.update.table: magnitude + SMALLEST_PRIORITY}
        return Losses({"q": Slope(outputs, gradient)}, len(errors), priorities, metrics)

    def _returns(self, network: Any, prepared: Tensor) -> Tensor:
        """Returns what a network knows of each action's return [B, A, N]."""
        return network.quantiles(prepared) if self.network.quantiles else network.values(prepared).float().unsqueeze(2)


make_actor, make_learner = actor_of(ApexActing, DuelingConfig, make_network), learner_of(ApexLearning)
