"""Batches of whole unrolls as an actor-critic learner takes them: joined, with their history, with results by row."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from apexrl.agents.contract import Batches, UnrollBatch
from apexrl.agents.recurrence import LAST_ACTION, LAST_REWARD, STATE
from apexrl.agents.replaying.mix import Part, Selection
from apexrl.losses.relevance import random_projection, unroll_divergence, unroll_features
from apexrl.networks.actor_critic import ActorCriticOutput
from apexrl.networks.recurrent import History

FIRST_EXTRAS = (LAST_ACTION, LAST_REWARD, STATE)  # of an unroll's first observation


def joined(batches: Sequence[UnrollBatch]) -> UnrollBatch:
    """Returns several batches of unrolls as one, the rows of the first one first."""
    if len(batches) == 1:
        return batches[0]
    *steps, extras, weights = zip(*batches, strict=True)
    observation, action, reward, discount, start = (torch.cat(tensors, 1) for tensors in steps)
    together = {name: torch.cat([own[name] for own in extras], 0 if name in FIRST_EXTRAS else 1) for name in extras[0]}
    return UnrollBatch(observation, action, reward, discount, start, together, torch.cat(weights))


def history_of(batch: UnrollBatch) -> History | None:
    """Returns the past of each observation, for an LSTM; None where the log holds no state of one."""
    if STATE not in batch.extras:
        return None
    last_action, last_reward, core_state = (batch.extras[name] for name in FIRST_EXTRAS)
    actions = torch.cat([last_action.long().unsqueeze(0), batch.action])
    rewards = torch.cat([last_reward.unsqueeze(0), batch.reward])
    return History(batch.start, actions, rewards, core_state.float())


class RowResults:
    """Those results of each unroll that the selection and the metrics need."""

    def __init__(self, parts: Sequence[Part], selections: Collection[Selection], num_features: int, device: torch.device
                 ):  # fmt: skip
        """Takes the parts of a mix, and the selections of some of them."""
        self._parts = parts
        self._has_distance = any(part.overwrites_worst for part in parts) or any(s.distance == "kl" for s in selections)
        self.projection: Tensor | None = None  # [F, n]; None where no features are compared
        if any(selection.distance != "kl" for selection in selections):
            self.projection = random_projection(num_features).to(device)

    def of(self, batches: Batches, output: ActorCriticOutput, behavior: Tensor, valid: Tensor, rejected: Tensor | None
           ) -> dict[str, dict[str, Tensor]]:  # fmt: skip
        """Returns results by table and name of the rows of all parts, in their order.

        Args:
          output: of the T + 1 observations of the joined batch; behavior: [T, B, A], valid: [T, B].
          rejected: [T, B] bool; None where there is no trust region.
        """
        results = {}
        if self.projection is not None:
            results["feature"] = unroll_features(output.features[:-1].detach(), valid, self.projection)
        if self._has_distance:
            results["distance"] = unroll_divergence(behavior, output.logits[:-1].detach(), valid)
        if rejected is not None:
            results["rejected_share"] = (rejected & valid).sum(dim=0) / valid.sum(dim=0).clamp(min=1)
        names = [part.name for part in self._parts]
        sizes = [len(batches[name].weight) for name in names]
        split = {key: rows.split(sizes) for key, rows in results.items()}
        return {name: {key: rows[i] for key, rows in split.items()} for i, name in enumerate(names)} if split else {}
