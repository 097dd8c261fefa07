"""The rows of a batch with the results of a network, the targets of its policy, and what is told of them."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from apexrl.agents.contract import Batches, UnrollBatch
from apexrl.losses.categorical import entropy, log_probs
from apexrl.losses.vtrace import VTrace
from apexrl.networks.actor_critic import ActorCriticOutput

MOST_SHOWN_RATIO = 100.0  # in a metric's mean


class Rows(NamedTuple):
    """The rows of all parts of a mix, with the results of a network."""

    begun: Batches  # by table, with the states that they begin with
    batch: UnrollBatch  # all of them
    is_new: Tensor  # [B] bool
    output: ActorCriticOutput  # [T + 1, B]


class Traced(NamedTuple):
    """The targets of T steps of B rows, by the policy of one network."""

    targets: VTrace
    log_rhos: Tensor  # [T, B] of its probabilities of the actions taken to the behaviour's
    log_probs: Tensor  # [T, B] of the actions taken
    accept: Tensor | None  # [T, B] bool: the states inside the trust region; None: there is none

    def at(self, rows: Tensor) -> "Traced":
        """Returns those of some rows [b]."""
        targets = VTrace(*(numbers[:, rows] for numbers in self.targets))
        accept = None if self.accept is None else self.accept[:, rows]
        return Traced(targets, self.log_rhos[:, rows], self.log_probs[:, rows], accept)


@torch.no_grad()
def metrics_of(real: Tensor, logits: Tensor, values: Tensor, log_rhos: Tensor, targets: VTrace,
               action_names: Sequence[str]) -> dict[str, Tensor]:  # fmt: skip
    """Returns means over the real steps [T, B] of a batch, those that are no resets and do not only fill it."""
    share = real / real.sum().clamp(min=1)

    def mean(numbers: Tensor) -> Tensor:
        return (share * numbers.masked_fill(~real, 0)).sum()

    probabilities = (share.unsqueeze(-1) * log_probs(logits).exp()).sum(dim=(0, 1))
    return {
        "td_error": mean(targets.errors.abs()),
        "value_mean": mean(values),
        "entropy": mean(entropy(logits)),
        "importance_ratio": mean(log_rhos.exp().clamp(max=MOST_SHOWN_RATIO)),
        "rejected_share": mean((~targets.learned).float()),
    } | {f"probability_{name}": p for name, p in zip(action_names, probabilities.unbind(), strict=True)}
