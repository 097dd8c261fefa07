"""IMPACT, which RLlib calls APPO: IMPALA with a target policy and PPO's clipped surrogate (arXiv:1912.00167).

A target network, which is copied every few updates, gives the targets of V-trace, and the policy that the surrogate
holds on to. The newest unrolls are learned from several times: a uniform table with a capacity is the circular buffer.

Actions may be vectors: a Gaussian whose deviations no observation changes, as PPO has it on MuJoCo. Its draws are
clipped to the bounds of the environment, and the log holds them as they were taken (`losses.gaussian`).

Deviation: values that targets bootstrap from are the target network's, too, so that a draw's are computed once.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from apexrl.agents.contract import Batches, Exploration, Extras, UnrollBatch
from apexrl.agents.engine.minibatches import rows_of, shuffled
from apexrl.agents.engine.plain import Acting, Networks, Target
from apexrl.agents.engine.plain_actor import actor_of
from apexrl.agents.engine.plain_learner import learner_of
from apexrl.agents.impact_config import ImpactAlgorithm, ImpactUpdate, check_vectors, wants
from apexrl.agents.impala import MOST_VALUE, ImpalaActing, ImpalaLearning, make_network, make_rows
from apexrl.agents.replaying.policy_targets import Rows, Traced
from apexrl.bounds import clipped, range_of
from apexrl.losses.gaussian import LEAST_LOG_DEVIATION, MOST_LOG_DEVIATION
from apexrl.losses.policy_gradient import clipped_surrogate_loss
from apexrl.networks.config import ActorCriticConfig
from apexrl.networks.device import in_full_precision
from apexrl.types import StreamSpec

__all__ = ["make_actor", "make_learner", "make_network", "make_rows"]


MOST_LOG_RATIO = 30.0  # of densities, as of probabilities: no ratio overflows


class GaussianActing(Acting):
    """Draws of a Gaussian, and its moments for the log; in evaluations the mean."""

    algorithm: ImpactAlgorithm

    def explore(self, slots: np.ndarray, ladder_size: int) -> Exploration:
        """Returns the shares [E] of the policy's own deviation: all of it."""
        return np.ones(len(slots))

    def act(self, values: np.ndarray, exploration: Exploration, rng: np.random.Generator) -> tuple[np.ndarray, Extras]:
        """Returns actions [E, size] within the bounds, and the extras of the log."""
        moments, value = values[:, :-1], values[:, -1]
        means, logs = np.split(moments, 2, axis=1)
        deviations = np.exp(logs.clip(LEAST_LOG_DEVIATION, MOST_LOG_DEVIATION))
        drawn = means + exploration[:, None] * deviations * rng.standard_normal(means.shape)
        center, reach = range_of(self.spec.action_bounds)
        return clipped(center + reach * drawn, self.spec.action_bounds), {
            "behavior_moments": moments,
            "behavior_value": value.clip(-MOST_VALUE, MOST_VALUE).astype(np.float16),
        }


class ImpactLearning(ImpalaLearning):
    """The losses of IMPALA, but for the policy's."""

    algorithm: ImpactAlgorithm
    update: ImpactUpdate

    def __init__(self, *sections: Any):
        super().__init__(*sections)
        check_vectors(self.update, self.spec)
        self.num_steps = self.update.minibatches

    @property
    def target(self) -> Target:
        return Target(self.update.target_period_updates, parts=("network",))

    def from_target(self, target: Networks, batches: Batches) -> Traced:
        """Returns the targets of the target policy."""
        rows = self.unrolled(target["network"], batches)
        with in_full_precision(self.device):
            return self.traced(rows)

    def minibatches(self, batches: Batches, known: Traced) -> Iterator[tuple[Batches, Traced]]:
        """Yields parts of the batches of all tables, each with its targets."""
        sizes = {want.table: want.num_rows for want in wants(self.algorithm, self.update)}
        orders = (shuffled(size, self.num_steps, 1, self.device) for size in sizes.values())
        for chosen in zip(*orders, strict=True):
            parts, places, first = {}, [], 0
            for (table, size), rows in zip(sizes.items(), chosen, strict=True):
                batch: UnrollBatch = batches[table]
                with_burn_in = torch.cat([rows + before for before in range(0, len(batch.weight), size)])
                parts[table] = rows_of(batch, with_burn_in, self.spec)
                places.append(rows + first)
                first += size
            yield parts, known.at(torch.cat(places))

    def policy_loss(self, rows: Rows, known: Callable[[], Traced]) -> tuple[Tensor, Traced]:
        """Returns the clipped surrogate of the ratio min(actor / target policy, rho bar) * policy / actor."""
        traced = known()
        log_probs = self.policies.log_probs(rows.output.logits[:-1], rows.batch.action)
        actors = traced.log_probs - traced.log_rhos
        of_actors = (log_probs - actors).clamp(max=MOST_LOG_RATIO).exp()
        ratios = (-traced.log_rhos).exp().clamp(max=self.update.target_rho_bar) * of_actors
        loss = clipped_surrogate_loss(ratios, traced.targets.pg_advantages, self.numbers["surrogate_clip"])
        return loss, traced


def acting_of(algorithm: ImpactAlgorithm, spec: StreamSpec) -> Acting:
    """Returns the actor's half for the actions of a spec."""
    return ImpalaActing(algorithm, spec) if spec.num_actions else GaussianActing(algorithm, spec)


make_actor, make_learner = actor_of(acting_of, ActorCriticConfig, make_network), learner_of(ImpactLearning)
