"""IMPACT, which RLlib calls APPO: IMPALA with a target policy and PPO's clipped surrogate (arXiv:1912.00167).

A target network, which is copied every few updates, gives the targets of V-trace, and the policy that the surrogate
holds on to. The newest unrolls are learned from several times: a uniform table with a capacity is the circular buffer.

Deviation: values that targets bootstrap from are the target network's, too, so that a draw's are computed once.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from apexrl.agents.contract import Batches
from apexrl.agents.engine.minibatches import shuffled, unroll_rows
from apexrl.agents.engine.plain import Networks, Target
from apexrl.agents.engine.plain_actor import actor_of
from apexrl.agents.engine.plain_learner import learner_of
from apexrl.agents.impact_config import ImpactAlgorithm, ImpactUpdate, wants
from apexrl.agents.impala import ImpalaActing, ImpalaLearning, make_network, make_rows
from apexrl.agents.replaying.policy_targets import Rows, Traced
from apexrl.agents.replaying.replay_states import unrolls_of
from apexrl.agents.replaying.unroll_batches import FIRST_EXTRAS
from apexrl.losses.categorical import action_log_probs
from apexrl.losses.policy_gradient import clipped_surrogate_loss
from apexrl.networks.config import ActorCriticConfig
from apexrl.networks.device import exactly

__all__ = ["make_actor", "make_learner", "make_network", "make_rows"]


class ImpactLearning(ImpalaLearning):
    """The losses of IMPALA, but for the policy's."""

    algorithm: ImpactAlgorithm
    update: ImpactUpdate

    def __init__(self, *sections: Any):
        super().__init__(*sections)
        self.num_steps = self.update.minibatches

    @property
    def target(self) -> Target:
        return Target(self.update.target_period_updates)

    def from_target(self, target: Networks, batches: Batches) -> Traced:
        """Returns the targets of the target policy."""
        rows = self.unrolled(target["network"], batches)
        with exactly(self.device):
            return self.traced(rows)

    def minibatches(self, batches: Batches, known: Traced) -> Iterator[tuple[Batches, Traced]]:
        """Yields parts of the batches of all tables, each with its targets."""
        sizes = {want.table: want.num_rows for want in wants(self.algorithm, self.update)}
        orders = (shuffled(size, self.num_steps, 1, self.device) for size in sizes.values())
        for chosen in zip(*orders, strict=True):
            parts, places, first = {}, [], 0
            for (table, size), rows in zip(sizes.items(), chosen, strict=True):
                batch = unrolls_of(batches, table)
                with_burn_in = torch.cat([rows + before for before in range(0, len(batch.weight), size)])
                parts[table] = unroll_rows(batch, with_burn_in, FIRST_EXTRAS)
                places.append(rows + first)
                first += size
            yield parts, known.at(torch.cat(places))

    def policy_loss(self, rows: Rows, known: Callable[[], Traced]) -> tuple[Tensor, Traced]:
        """Returns the clipped surrogate of the ratio min(actor / target policy, rho bar) * policy / actor."""
        traced = known()
        log_probs = action_log_probs(rows.output.logits[:-1], rows.batch.action)
        actors = traced.log_probs - traced.log_rhos
        ratios = (-traced.log_rhos).exp().clamp(max=self.update.target_rho_bar) * (log_probs - actors).exp()
        loss = clipped_surrogate_loss(ratios, traced.targets.pg_advantages, self.update.surrogate_clip)
        return loss, traced


make_actor, make_learner = actor_of(ImpalaActing, ActorCriticConfig, make_network), learner_of(ImpactLearning)
