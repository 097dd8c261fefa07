"""The rows of a batch with the results of a network, the targets of its policy, and what is told of them."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from apexrl.agents.contract import Batches, UnrollBatch
from apexrl.bounds import range_of
from apexrl.losses import categorical, gaussian
from apexrl.losses.vtrace import VTrace
from apexrl.networks.actor_critic import ActorCriticOutput
from apexrl.types import EnvironmentSpec

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


class Policies(NamedTuple):
    """A kind of policies, each given by its `logits` [..]: what a network's head gives and the log holds."""

    log_probs: Callable[[Tensor, Tensor], Tensor]  # [..] of logits, and of the actions that the log holds
    entropy: Callable[[Tensor], Tensor]  # [..]
    shown: Callable[[Tensor], Tensor]  # [.., n]: numbers of which people see the means
    shown_names: tuple[str, ...]  # of those


def policies_of(spec: EnvironmentSpec, device: torch.device) -> Policies:
    """Returns the policies over the actions of a spec: several of them, or vectors by Gaussians."""
    if spec.num_actions:
        names = spec.action_names or tuple(map(str, range(spec.num_actions)))
        shown = tuple(f"probability_{name}" for name in names)
        return Policies(
            categorical.action_log_probs, categorical.entropy, lambda logits: categorical.log_probs(logits).exp(), shown
        )
    ranges = *range_of(spec.action_bounds), *zip(*spec.action_bounds, strict=True)
    center, reach, low, high = (torch.tensor(numbers, device=device) for numbers in ranges)

    def log_probs(moments: Tensor, actions: Tensor) -> Tensor:
        at_bound = (actions <= low) | (actions >= high)
        return gaussian.action_log_probs(moments, (actions - center) / reach, at_bound)

    return Policies(
        log_probs,
        gaussian.entropy,
        lambda moments: gaussian.deviations(moments).mean(dim=-1, keepdim=True),
        ("deviation",),
    )


@torch.no_grad()
def metrics_of(real: Tensor, logits: Tensor, values: Tensor, log_rhos: Tensor, targets: VTrace, policies: Policies
               ) -> dict[str, Tensor]:  # fmt: skip
    """Returns means over the real steps [T, B] of a batch, those that are no resets and do not only fill it."""
    share = real / real.sum().clamp(min=1)

    def mean(numbers: Tensor) -> Tensor:
        return (share * numbers.masked_fill(~real, 0)).sum()

    shown = (share.unsqueeze(-1) * policies.shown(logits)).sum(dim=(0, 1))
    return {
        "td_error": mean(targets.errors.abs()),
        "value_mean": mean(values),
        "entropy": mean(policies.entropy(logits)),
        "importance_ratio": mean(log_rhos.exp().clamp(max=MOST_SHOWN_RATIO)),
        "rejected_share": mean((~targets.learned).float()),
    } | dict(zip(policies.shown_names, shown.unbind(), strict=True))
