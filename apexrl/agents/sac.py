"""SAC: a random policy climbs critics of returns and of its own entropy (arXiv:1812.05905).

With `--critic-norm batch` the critics are CrossQ's (arXiv:1902.05605): they normalize this and the next step as one
batch, and have no targets. Its policy is SAC's here, without batch normalization, so actors need no statistics.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from apexrl.agents.contract import Batches, Exploration, Extras, TransitionBatch
from apexrl.agents.engine.plain import SMALLEST_PRIORITY, Acting, Learning, Losses, Networks, PartOptimizer, Target
from apexrl.agents.engine.plain_actor import actor_of
from apexrl.agents.engine.plain_learner import learner_of
from apexrl.agents.sac_config import SacAlgorithm, SacUpdate
from apexrl.bounds import clipped, range_of
from apexrl.losses.maximum_entropy import (
    LEAST_LOG_DEVIATION,
    MOST_LOG_DEVIATION,
    soft_value,
    squashed_draws,
    temperature_loss,
)
from apexrl.networks.config import GaussianConfig
from apexrl.networks.critics import Critics
from apexrl.networks.temperature import Temperature
from apexrl.networks.vector_policies import GaussianPolicy


class SacActing(Acting):
    """Draws of the policy, all environments alike; in evaluations what the middle of the Gaussian becomes."""

    algorithm: SacAlgorithm

    def explore(self, slots: np.ndarray, ladder_size: int) -> Exploration:
        """Returns the shares [E] of the policy's own deviation: all of it."""
        return np.ones(len(slots))

    def act(self, values: np.ndarray, exploration: Exploration, rng: np.random.Generator) -> tuple[np.ndarray, Extras]:
        """Returns actions [E, size] within the bounds."""
        means, logs = np.split(values, 2, axis=1)
        deviations = np.exp(logs.clip(LEAST_LOG_DEVIATION, MOST_LOG_DEVIATION))
        drawn = means + exploration[:, None] * deviations * rng.standard_normal(means.shape)
        center, reach = range_of(self.spec.action_bounds)
        return clipped(center + reach * np.tanh(drawn), self.spec.action_bounds), {}


class SacLearning(Learning):
    """The critics learn soft returns, the policy climbs the least of them, the temperature steers its entropy."""

    algorithm: SacAlgorithm
    network: GaussianConfig
    update: SacUpdate
    acting = ("policy",)

    @property
    def target(self) -> Target | None:
        """The critics'; none with batch normalization."""
        return None if self.network.critic_norm == "batch" else Target(rate=self.update.target_rate, parts=("critics",))

    @property
    def optimizers(self) -> Mapping[str, PartOptimizer]:
        return dict.fromkeys(("policy", "temperature"), PartOptimizer(period_updates=self.update.policy_period_updates))

    def parts(self) -> dict[str, nn.Module]:
        return {"policy": GaussianPolicy(self.spec, self.network),
                "critics": Critics(self.spec, self.network, self.network.critic_norm),
                "temperature": Temperature(self.update.first_temperature)}  # fmt: skip

    def from_target(self, target: Networks, batches: Batches) -> Any:
        """Returns the target critics: what they value is up to the policy."""
        return target["critics"]

    def from_online(self, online: Networks, batches: Batches, from_target: Any) -> tuple[Tensor, ...]:
        """Returns the policy's next actions [B, size], their log-probabilities and soft values [B], and noise.

        All random numbers of an update are drawn here, in this order. CrossQ's values are 0: `losses` computes them.
        """
        after, policy = batches[self.update.table].next_observation, online["policy"]
        moments = policy(after)
        noises = torch.randn((2, len(moments), moments.shape[1] // 2), device=moments.device)
        actions, log_probs = squashed_draws(moments, noises[0])
        actions = policy.center + policy.reach * actions
        if from_target is None:
            return actions, log_probs, torch.zeros_like(log_probs), noises[1]
        values = soft_value(from_target(after, actions), log_probs, online["temperature"].price)
        return actions, log_probs, values, noises[1]

    def losses(self, online: Networks, batches: Batches, known: Callable[[], tuple[Tensor, ...]]) -> Losses:
        """Returns half the squared errors of the critics, and beside them the losses of policy and temperature."""
        batch, critics = batches[self.update.table], online["critics"]
        here, price = (batch.observation, batch.action), online["temperature"].price
        if self.target is None:
            next_actions, next_log_probs, _, noise = known()
            values, next_values = critics.joint(here, (batch.next_observation, next_actions))
            after = soft_value(next_values.detach(), next_log_probs, price)
        else:
            values = critics(*here)
            _, next_log_probs, after, noise = known()
        errors = batch.n_step_return + batch.discount * after - values  # [C, B]
        surprise = errors.detach().abs().mean(dim=0)
        metrics = {"td_error": surprise, "q_mean": values.detach().mean(dim=0), "q_max": values.detach().amax(dim=0),
                   "entropy": -next_log_probs, "temperature": price}  # fmt: skip
        return Losses({"critics": 0.5 * (batch.weight * errors.square()).sum()}, len(surprise),
                      {self.update.table: surprise + SMALLEST_PRIORITY}, metrics,
                      beside=lambda: self._of_policy(online, batch, noise))  # fmt: skip

    def _of_policy(self, online: Networks, batch: TransitionBatch, noise: Tensor) -> dict[str, Tensor]:
        """Returns the losses of the policy and of the temperature."""
        policy, temperature = online["policy"], online["temperature"]
        actions, log_probs = squashed_draws(policy(batch.observation), noise)
        chosen = online["critics"](batch.observation, policy.center + policy.reach * actions)
        target_entropy = self.numbers["entropy_target"] * actions.shape[1]
        return {
            "policy": -(batch.weight * soft_value(chosen, log_probs, temperature.price)).sum(),
            "temperature": (batch.weight * temperature_loss(temperature.logarithm, log_probs, target_entropy)).sum(),
        }


make_network = GaussianPolicy
make_actor, make_learner = actor_of(SacActing, GaussianConfig, make_network), learner_of(SacLearning)
