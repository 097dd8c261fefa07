"""Ape-X DPG: a deterministic policy climbs critics of n-step returns (arXiv:1803.00933, appendix D).

By its flags also TD3 (arXiv:1802.09477): twin critics, a policy that learns at every second update, noise on the target
policy's actions. There targets follow at each update, and not at each of the policy alone. And D4PG
(arXiv:1804.08617): critics of the distribution of returns over fixed atoms.
"""

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from apexrl.agents.apex_dpg_config import DpgAlgorithm, DpgUpdate
from apexrl.agents.contract import Batches, Exploration, Extras, TransitionBatch
from apexrl.agents.engine.plain import (
    SMALLEST_PRIORITY,
    Acting,
    Learning,
    Losses,
    Networks,
    PartOptimizer,
    Slope,
    Target,
)
from apexrl.agents.engine.plain_actor import actor_of
from apexrl.agents.engine.plain_learner import learner_of
from apexrl.agents.exploration import noise_ladder
from apexrl.bounds import clipped, range_of
from apexrl.losses.categorical_returns import cross_entropy, projected
from apexrl.losses.windows import at_window_ends, n_step_windows
from apexrl.networks.config import DeterministicConfig
from apexrl.networks.critics import Critics
from apexrl.networks.frame_stack import stacks_of
from apexrl.networks.vector_policies import DeterministicPolicy
from apexrl.types import EnvironmentSpec, StreamUnrolls


class DpgActing(Acting):
    """Random actions before the learner's first update, then the policy's, and noise by a ladder over environments."""

    algorithm: DpgAlgorithm

    def explore(self, slots: np.ndarray, ladder_size: int) -> Exploration:
        """Returns the deviations [E] of the ladder, as shares of half an action's range."""
        return noise_ladder(slots, ladder_size, self.algorithm.noise_least, self.algorithm.noise_most)

    def act(self, values: np.ndarray, exploration: Exploration, rng: np.random.Generator) -> tuple[np.ndarray, Extras]:
        """Returns actions [E, size] within the bounds, and those without noise for `priorities`."""
        center, reach = range_of(self.spec.action_bounds)
        if self.params_version:
            actions = values + exploration[:, None] * reach * rng.standard_normal(values.shape)
        else:  # around what a new policy does, critics know too little to lead it away from the bounds
            drawn = center + reach * rng.uniform(-1, 1, values.shape)
            actions = np.where(exploration[:, None] > 0, drawn, values)
        return clipped(actions, self.spec.action_bounds), {"policy": values}

    def priorities(self, unrolls: StreamUnrolls, extras: Extras) -> np.ndarray | None:
        """Returns |n-step TD error| [K, E] by the actor's own critics, where it has them."""
        critics = self.critics
        if critics is None:
            return None
        steps = unrolls.rewards, unrolls.discounts, unrolls.starts
        returns, discounts, offsets = n_step_windows(*steps, self.algorithm.gamma, self.algorithm.n_steps)
        stacks = stacks_of(unrolls.frames, unrolls.starts, self.spec.stacked_frames)
        outputs = self._outputs(critics, stacks[: len(returns)], unrolls.actions[: len(returns)])
        after = self._outputs(critics, at_window_ends(stacks, offsets), at_window_ends(extras["policy"], offsets))
        returned, discounted = (torch.from_numpy(rows).flatten().to(outputs.device) for rows in (returns, discounts))
        values, least = critics.values_of(outputs), critics.least_of(after)
        errors, _ = _errors(critics, outputs, values, returned, discounted, least)
        return errors.abs().mean(dim=0).view(returns.shape).cpu().numpy() + SMALLEST_PRIORITY

    @property
    def critics(self) -> Critics | None:
        """The actor's copy of the critics; None with equal priorities."""
        assert isinstance(self.network, DeterministicPolicy)
        return self.network.critics

    @torch.no_grad()
    def _outputs(self, critics: Critics, stacks: np.ndarray, actions: np.ndarray) -> Tensor:
        """Returns the critics' outputs [C, K E, N] for actions [K, E, size] at stacks [K, E, H, *frame]."""
        torso, normalizer = self.network.torso, self.network.normalizer
        device = torso.kernel().device
        observations, chosen = (torch.from_numpy(rows).flatten(0, 1).to(device) for rows in (stacks, actions))
        stored = torso.layout.store_stacks(observations)
        return critics.outputs(stored if normalizer is None else normalizer(stored), chosen)


class DpgLearning(Learning):
    """The critics learn n-step returns; the policy learns what the first of them values."""

    algorithm: DpgAlgorithm
    update: DpgUpdate

    @property
    def acting(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("policy", "critics") if self.network.initial_priorities == "critic" else ("policy",)

    @property
    def target(self) -> Target:
        rate = self.update.target_rate
        return Target(rate=rate) if rate else Target(self.update.target_period_updates)

    @property
    def optimizers(self) -> Mapping[str, PartOptimizer]:
        return {"policy": PartOptimizer(period_updates=self.update.policy_period_updates)}

    def parts(self) -> dict[str, nn.Module]:
        return {"policy": DeterministicPolicy(self.spec, self.network), "critics": _critics(self.spec, self.network)}

    def from_target(self, target: Networks, batches: Batches) -> tuple[Tensor, Tensor]:
        """Returns the least of the target critics' values [B] of the target policy's next actions, and their sizes [B].

        With atoms: their probabilities [B, N] by the critic with the least value.
        """
        after, policy, critics = batches[self.update.table].next_observation, target["policy"], target["critics"]
        actions = policy(after)
        sizes = ((actions - policy.center) / policy.reach).abs().mean(dim=1)
        if self.update.target_noise:
            most, deviation = self.update.target_noise_clip, self.update.target_noise
            noise = (deviation * torch.randn_like(actions)).clamp(-most, most) * policy.reach
            actions = torch.minimum(torch.maximum(actions + noise, policy.center - policy.reach),
                                    policy.center + policy.reach)  # fmt: skip
        return critics.least_of(critics.outputs(after, actions)), sizes

    def losses(self, online: Networks, batches: Batches, known: Callable[[], tuple[Tensor, Tensor]]) -> Losses:
        """Returns half the squared errors of the critics, and beside them the policy's way up the first one.

        With atoms: the cross-entropy of the critics, and the errors of their means.
        """
        batch, critics = batches[self.update.table], online["critics"]
        outputs = critics.outputs(batch.observation, batch.action)
        values = critics.values_of(outputs)
        after, sizes = known()
        errors, of_critics = _errors(critics, outputs, values, batch.n_step_return, batch.discount, after)
        surprise = errors.detach().abs().mean(dim=0)
        metrics = {"td_error": surprise, "q_mean": values.detach().mean(dim=0), "q_max": values.detach().amax(dim=0),
                   "action_size": sizes}  # fmt: skip
        return Losses({"critics": (batch.weight * of_critics).sum()}, len(surprise),
                      {self.update.table: surprise + SMALLEST_PRIORITY}, metrics,
                      beside=lambda: self._of_policy(online, batch))  # fmt: skip

    def _of_policy(self, online: Networks, batch: TransitionBatch) -> dict[str, Slope]:
        """Returns the policy's loss, by the slopes of the first critic's values by the actions that it chooses."""
        policy, critics = online["policy"], online["critics"]
        chosen = policy(batch.observation)
        actions = chosen.detach().requires_grad_()
        values = critics.values_of(critics.each[0](batch.observation, actions))
        (slopes,) = torch.autograd.grad(values.sum(), actions)
        if most := self.update.action_gradient_clip:
            slopes = (slopes * policy.reach).clamp(-most, most) / policy.reach
        return {"policy": Slope(chosen, -batch.weight.unsqueeze(1) * slopes)}


def make_network(spec: EnvironmentSpec, network: DeterministicConfig) -> DeterministicPolicy:
    """Returns the policy, and with it the critics of actors that give priorities by them; raises as it does."""
    policy = DeterministicPolicy(spec, network)
    if network.initial_priorities == "critic":
        policy.critics = _critics(spec, network)
    return policy


def _errors(
    critics: Critics, outputs: Tensor, values: Tensor, returns: Tensor, discounts: Tensor, after: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the errors [C, B] of values [C, B], and the losses [C, B] of the outputs [C, B, N] that they are of.

    Args:
      returns, discounts: [B] of n-step windows; after: `Critics.least_of` where they end.
    """
    if critics.support is None:
        errors = returns + discounts * after - values
        return errors, 0.5 * errors.square()
    targets = projected(critics.support, returns, discounts, after)
    return critics.mean_of(targets) - values, cross_entropy(outputs, targets)


def _critics(spec: EnvironmentSpec, network: DeterministicConfig) -> Critics:
    support = torch.linspace(network.least_return, network.most_return, network.atoms) if network.atoms else None
    return Critics(spec, network, "layer" if network.layer_norm else "none", support)


make_actor, make_learner = actor_of(DpgActing, DeterministicConfig, make_network), learner_of(DpgLearning)
