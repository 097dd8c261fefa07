"""The losses of an actor-critic: policy gradient and value. Each is one number a step, until they are summed."""

import torch
from torch import Tensor

from apexrl.losses.categorical import action_log_probs


def policy_gradient_loss(logits: Tensor, actions: Tensor, advantages: Tensor) -> Tensor:
    """Returns -log pi(a | x) times advantage [T, B]; no gradient flows through the advantages.

    Args:
      logits: [T, B, A]; actions: [T, B] int64.
      advantages: [T, B] with their importance ratios.
    """
    return -action_log_probs(logits, actions) * advantages.detach()


def clipped_surrogate_loss(ratios: Tensor, advantages: Tensor, clip: float) -> Tensor:
    """Returns -min(ratio A, clip(ratio, 1 - clip, 1 + clip) A) [T, B]; no gradient flows through the advantages A.

    Args:
      ratios: [T, B] of the policy's probabilities of the actions to those of an older policy.
    Source: arXiv:1707.06347, equation 7.
    """
    advantages = advantages.detach()
    return -torch.minimum(ratios * advantages, ratios.clamp(1 - clip, 1 + clip) * advantages)


def value_loss(values: Tensor, targets: Tensor) -> Tensor:
    """Returns half the squared error [T, B]; no gradient flows through the targets."""
    if values.shape != targets.shape:
        raise ValueError(f"shapes differ: {tuple(values.shape)}, {tuple(targets.shape)}")
    return 0.5 * (targets.detach() - values).square()


def sum_losses(losses: Tensor, mask: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the sum of the losses of the steps that count, and the sum of their weights, which divides it for a mean.

    The steps in the mask count, of rows whose weight is not 0. The sum is IMPALA's. A batch some of whose rows are lost
    gives the others more weight, which keeps the size of the sum and leaves the mean. Where the weights of the steps
    add up to N, RMSProp and Adam make the same updates from both, if the mean has

    * the same learning rate (plain gradient descent: N times the sum's),
    * a gradient clip of 1 / N of the sum's,
    * an epsilon of 1 / N of the sum's, or 1 / N**2 where epsilon is inside the root.

    Args:
      losses: [T, B]; mask: [T, B] bool.
      weight: [B] of the rows; it multiplies their losses.
    Source: arXiv:1802.01561, whose authors sum.
    """
    if not losses.shape == mask.shape or weight.shape != losses.shape[1:]:
        raise ValueError(f"shapes differ: {tuple(losses.shape)}, {tuple(mask.shape)}, {tuple(weight.shape)}")
    return (losses.masked_fill(~mask, 0) * weight).sum(), (mask * weight).sum()


def soft_asymmetric(rewards: Tensor) -> Tensor:
    """Returns rewards between -0.3 and 5: gains count more than losses, and large ones are squashed.

    Source: arXiv:1802.01561, appendix D, 0.3 min(tanh r, 0) + 5 max(tanh r, 0). The authors' code computes
    1.5 tanh(r / 5) and 5 tanh(r / 5) in its place.
    """
    squashed = torch.tanh(rewards)
    return torch.where(squashed < 0, 0.3 * squashed, 5.0 * squashed)
