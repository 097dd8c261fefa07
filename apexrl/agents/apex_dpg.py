"""Ape-X DPG: a deterministic policy climbs critics of n-step returns (arXiv:1803.00933, appendix D).

By its flags also TD3 (arXiv:1802.09477): twin critics, a policy that learns at every second update, noise on the target
policy's actions. There targets follow at each update, and not at each of the policy alone.
"""

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from apexrl.agents.apex_dpg_config import DpgAlgorithm, DpgUpdate
from apexrl.agents.contract import Batches, Exploration, Extras
from apexrl.agents.engine.plain import Acting, Learning, Losses, Networks, PartOptimizer, Slope, Target
from apexrl.agents.engine.plain_actor import actor_of
from apexrl.agents.engine.plain_learner import learner_of
from apexrl.agents.exploration import noise_ladder
from apexrl.networks.config import DeterministicConfig
from apexrl.networks.critics import Critics
from apexrl.networks.deterministic import make_policy

SMALLEST_PRIORITY = 1e-6  # a transition without any error can still be drawn


class DpgActing(Acting):
    """The policy's actions, and noise by a ladder over all environments."""

    algorithm: DpgAlgorithm

    def explore(self, slots: np.ndarray, ladder_size: int) -> Exploration:
        """Returns the deviations [E] of the ladder, as shares of half an action's range."""
        return noise_ladder(slots, ladder_size, self.algorithm.noise_least, self.algorithm.noise_most)

    def act(self, values: np.ndarray, exploration: Exploration, rng: np.random.Generator) -> tuple[np.ndarray, Extras]:
        """Returns actions [E, size] within the bounds."""
        low, high = np.array(self.spec.action_bounds, np.float32).T
        noise = exploration[:, None] * (high - low) / 2 * rng.standard_normal(values.shape)
        return (values + noise).clip(low, high).astype(np.float32), {}


class DpgLearning(Learning):
    """The critics learn n-step returns; the policy learns what the first of them values."""

    algorithm: DpgAlgorithm
    update: DpgUpdate
    acting = ("policy",)

    @property
    def target(self) -> Target:
        rate = self.update.target_rate
        return Target(rate=rate) if rate else Target(self.update.target_period_updates)

    @property
    def optimizers(self) -> Mapping[str, PartOptimizer]:
        return {"policy": PartOptimizer(period_updates=self.update.policy_period_updates)}

    def parts(self) -> dict[str, nn.Module]:
        critics = Critics(self.spec, self.network, "layer" if self.network.layer_norm else "none")
        return {"policy": make_policy(self.spec, self.network), "critics": critics}

    def from_target(self, target: Networks, batches: Batches) -> Tensor:
        """Returns the least of the target critics' values [B] of the target policy's next actions."""
        after, policy = batches[self.update.table].next_observation, target["policy"]
        actions = policy(after)
        if self.update.target_noise:
            most, deviation = self.update.target_noise_clip, self.update.target_noise
            noise = (deviation * torch.randn_like(actions)).clamp(-most, most) * policy.reach
            actions = torch.minimum(torch.maximum(actions + noise, policy.center - policy.reach),
                                    policy.center + policy.reach)  # fmt: skip
        return target["critics"](after, actions).min(dim=0).values

    def losses(self, online: Networks, batches: Batches, known: Callable[[], Tensor]) -> Losses:
        """Returns half the squared errors of the critics, the policy's way up the first one, and the errors."""
        batch = batches[self.update.table]
        values = online["critics"](batch.observation, batch.action)
        chosen = online["policy"](batch.observation)
        targets = batch.n_step_return + batch.discount * known()
        errors = targets - values  # [C, B]
        surprise = errors.detach().abs().mean(dim=0)
        metrics = {"td_error": surprise, "q_mean": values.detach().mean(dim=0), "q_max": values.detach().amax(dim=0),
                   "action_size": (chosen.detach() / online["policy"].reach).abs().mean(dim=1)}  # fmt: skip
        losses = {
            "policy": Slope(chosen, -batch.weight.unsqueeze(1) * self._slopes(online, batch.observation, chosen)),
            "critics": 0.5 * (batch.weight * errors.square()).sum(),
        }
        return Losses(losses, len(surprise), {self.update.table: surprise + SMALLEST_PRIORITY}, metrics)

    def _slopes(self, online: Networks, observations: Tensor, chosen: Tensor) -> Tensor:
        """Returns the slopes [B, size] of the first critic's values by the actions that the policy chooses."""
        actions = chosen.detach().requires_grad_()
        (slopes,) = torch.autograd.grad(online["critics"].each[0](observations, actions).sum(), actions)
        most = self.update.action_gradient_clip
        return slopes.clamp(-most, most) if most else slopes


make_network = make_policy
make_actor, make_learner = actor_of(DpgActing, DeterministicConfig, make_network), learner_of(DpgLearning)
