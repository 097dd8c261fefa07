"""Temporal-difference errors of Q-learning, and the value rescaling that may wrap them. Pure functions of tensors."""

import torch
from torch import Tensor

from apexrl.types import FORBIDDEN

RESCALING = 1e-3  # the share that stays linear, so that the rescaling has an inverse
LEAST_BONUS = -1.0  # l0 of Munchausen reinforcement learning


def rescale(x: Tensor) -> Tensor:
    """Returns h(x) = sign(x) (sqrt(|x| + 1) - 1) + RESCALING x, which shrinks large values.

    Source: arXiv:1805.11593.
    """
    return torch.sign(x) * (torch.sqrt(torch.abs(x) + 1) - 1) + RESCALING * x


def inverse_rescale(x: Tensor) -> Tensor:
    """Returns the x for which `rescale` gives the argument. Computed in float64, as float32 cancels.

    Source: arXiv:1805.11593, proposition A.2.
    """
    y = x.double()
    root = (torch.sqrt(1 + 4 * RESCALING * (torch.abs(y) + 1 + RESCALING)) - 1) / (2 * RESCALING)
    return (torch.sign(y) * (root * root - 1)).to(x.dtype)


def n_step_targets(return_t: Tensor, discount_t: Tensor, value_t: Tensor, *, rescaling: bool = False) -> Tensor:
    """Returns [B] bootstrapped n-step targets, in the space of the network's outputs.

    Args:
      return_t: [B] discounted rewards inside the window.
      discount_t: [B] gamma ** offset, zero where the episode terminated inside the window.
      value_t: [B] the network's value where the window ends.
    """
    if not return_t.shape == discount_t.shape == value_t.shape:
        raise ValueError(f"shapes differ: {return_t.shape}, {discount_t.shape}, {value_t.shape}")
    if not rescaling:
        return return_t + discount_t * value_t
    return rescale(return_t + discount_t * inverse_rescale(value_t))


def huber(errors: Tensor, threshold: float = 1.0) -> Tensor:
    """Returns the Huber loss of each error: quadratic inside the threshold, linear outside."""
    clipped = errors.clamp(-threshold, threshold)
    return clipped * (errors - 0.5 * clipped)


def huber_gradient(q_tm1: Tensor, action_tm1: Tensor, errors: Tensor, weight: Tensor, threshold: float = 1.0) -> Tensor:
    """Returns [B, A]: the gradient of the sum of weight * huber(errors) by the online values `q_tm1`.

    A row's error is its target minus Q(s, a) of the action taken, so its derivative by Q(s, a) is -1, and by the other
    values 0. The derivative of the Huber loss is the error, clipped at the threshold. The chain rule gives

        -weight * clip(error, -threshold, threshold)   at the action taken, 0 elsewhere.

    Args:
      action_tm1: [B] int64 actions taken; errors: [B], target minus value; weight: [B].
    """
    slopes = -weight * errors.clamp(-threshold, threshold)
    return torch.zeros_like(q_tm1).scatter_(1, action_tm1.unsqueeze(1), slopes.unsqueeze(1))


def mean_of_allowed(values: Tensor) -> Tensor:
    """Returns [B]: the mean of values [B, A] without those that are FORBIDDEN, up to rounding."""
    allowed = values > FORBIDDEN / 2
    return values.masked_fill(~allowed, 0).sum(dim=1) / allowed.sum(dim=1).clamp(min=1)


def sequence_priorities(errors: Tensor, valid: Tensor, max_share: float) -> Tensor:
    """Returns [B]: a mix of the greatest and the mean absolute error of each sequence.

    Args:
      errors: [T, B], absolute; valid: [T, B] bool, which of them count.
      max_share: of the greatest (R2D2's eta).
    Source: R2D2 (ICLR 2019), section 2.3.
    """
    counted = errors.masked_fill(~valid, 0)
    mean = counted.sum(dim=0) / valid.sum(dim=0).clamp(min=1)
    return max_share * counted.amax(dim=0) + (1 - max_share) * mean


def munchausen_bonus(q_target_tm1: Tensor, action_tm1: Tensor, temperature: float) -> Tensor:
    """Returns [B]: temperature * log pi(action taken), not below LEAST_BONUS, where pi = softmax(q / temperature).

    A share of it is added to the reward.

    Args:
      q_target_tm1: [B, A] target network's values of the observation left.
    Source: Munchausen reinforcement learning (arXiv:2007.14430), equation 4.
    """
    scaled = temperature * (q_target_tm1 / temperature).log_softmax(dim=1)
    return scaled.gather(1, action_tm1.unsqueeze(1)).squeeze(1).clamp(LEAST_BONUS, 0)


def soft_values(returns_t: Tensor, temperature: float) -> Tensor:
    """Returns [B, N]: the value of a policy and its entropy, sum of pi (q - temperature log pi), of each return.

    The policy pi = softmax(q / temperature) is that of the means q.

    Args:
      returns_t: [B, A, N] target network's returns of each action; [B, A, 1] of values alone.
    Source: arXiv:2007.14430, equation 4.
    """
    log_policy = (returns_t.mean(dim=2) / temperature).log_softmax(dim=1).unsqueeze(2)
    return (log_policy.exp() * (returns_t - temperature * log_policy)).sum(dim=1)
