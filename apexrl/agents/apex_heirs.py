"""Heirs of Ape-X DQN on its actors and its table: quantiles of returns (arXiv:1710.10044), Munchausen targets
(arXiv:2007.14430), and both.

Deviations: returns have n steps, and the log-policy of a Munchausen target is added to the first one's reward alone, as
those of the others are of observations that a transition does not hold. Priorities are errors of the expected return,
which actors know, too.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from apexrl.agents.apex_dqn import ApexLearning, make_actor, make_network
from apexrl.agents.apex_dqn_config import ApexAlgorithm, ApexUpdate
from apexrl.agents.contract import Batches
from apexrl.agents.engine.plain import Losses, Networks, Slope
from apexrl.agents.engine.plain_learner import PlainLearner
from apexrl.losses.quantiles import quantile_huber, quantile_huber_gradient
from apexrl.losses.value_learning import huber, huber_gradient, munchausen_bonus, n_step_targets, soft_values
from apexrl.networks.config import DuelingConfig
from apexrl.types import StreamSpec

__all__ = ["make_actor", "make_learner", "make_network"]


class QuantileLearning(ApexLearning):
    """The losses of a batch by quantiles of returns; of a network without them, by its values as a single one."""

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
        """Returns the returns [B, N] that targets bootstrap from, and what is added to rewards [B]."""
        if self.update.munchausen:
            return from_target
        prepared, returns = from_target
        best = online["q"].values(prepared).argmax(dim=1)  # double Q-learning
        return returns.gather(1, best[:, None, None].expand(-1, 1, returns.shape[2])).squeeze(1), torch.zeros_like(
            returns[:, 0, 0]
        )

    def losses(self, online: Networks, batches: Batches, known: Callable[[], tuple[Tensor, ...]]) -> Losses:
        """Returns weight * quantile Huber loss by its closed-form gradient, and new priorities."""
        batch = batches[self.update.table]
        outputs = self._returns(online["q"], online["q"].prepare(batch.observation))
        returns = outputs.detach()
        next_returns, gained = known()
        of_rows = batch.n_step_return + gained, batch.discount
        rewards, discounts = (numbers.unsqueeze(1).expand_as(next_returns) for numbers in of_rows)
        targets = n_step_targets(rewards, discounts, next_returns, rescaling=self.algorithm.value_rescaling)
        q = returns.mean(dim=2)
        errors = targets.mean(dim=1) - q.gather(1, batch.action.unsqueeze(1)).squeeze(1)
        if not self.network.quantiles:
            losses = huber(errors)
            gradient = huber_gradient(q, batch.action, errors, batch.weight).unsqueeze(2)
        else:
            taken = returns[torch.arange(len(errors), device=errors.device), batch.action]
            losses = quantile_huber(taken, targets)
            gradient = quantile_huber_gradient(returns, batch.action, targets, batch.weight)
        return self.told(Slope(outputs, gradient), batch.weight, losses, errors, q)

    def _returns(self, network: Any, prepared: Tensor) -> Tensor:
        """Returns what a network knows of each action's return [B, A, N]."""
        return network.quantiles(prepared) if self.network.quantiles else network.values(prepared).float().unsqueeze(2)


def make_learner(
    algorithm: ApexAlgorithm, network: DuelingConfig, update: ApexUpdate, spec: StreamSpec, device: torch.device
) -> PlainLearner:
    """Returns the learner that the flags ask for, with new networks."""
    kind = QuantileLearning if network.quantiles or update.munchausen else ApexLearning
    return PlainLearner(kind(algorithm, network, update, spec, device))
