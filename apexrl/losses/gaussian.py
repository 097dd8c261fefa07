"""Gaussian policies over vectors of numbers, each of which is clipped to -1 to 1 before it is taken as an action.

A policy is given by its moments [..., 2 size]: means, then logarithms of deviations. An action at a bound stands for
all draws beyond it, so its probability is that of the tail. Source: clipped action policy gradients, arXiv:1802.07564.
"""

import math
from typing import Any

import torch
from torch import Tensor

LEAST_LOG_DEVIATION, MOST_LOG_DEVIATION = -5.0, 2.0


def action_log_probs(moments: Tensor, actions: Tensor, at_bound: Tensor | None = None) -> Tensor:
    """Returns the log-probabilities [...] of actions [..., size] from -1 to 1: a density, or tails at bounds.

    Args:
      at_bound: [..., size] bool, of actions that were scaled, which may miss -1 and 1 by their rounding.
    """
    if moments.shape[:-1] != actions.shape[:-1] or moments.shape[-1] != 2 * actions.shape[-1]:
        raise ValueError(f"moments {tuple(moments.shape)} are not those of actions {tuple(actions.shape)}")
    means, logs = _split(moments)
    deviations = logs.exp()
    density = -0.5 * ((actions - means) / deviations).square() - logs - 0.5 * math.log(2 * math.pi)
    tail = torch.special.log_ndtr((actions.sign() * means - 1) / deviations)
    at_bound = actions.abs() >= 1 if at_bound is None else at_bound
    return torch.where(at_bound, tail, density).sum(dim=-1)


def entropy(moments: Tensor) -> Tensor:
    """Returns the entropies [...] of policies before their draws are clipped."""
    _, logs = _split(moments)
    return (logs + 0.5 * math.log(2 * math.pi * math.e)).sum(dim=-1)


def deviations(moments: Tensor) -> Tensor:
    """Returns the deviations [..., size] of policies."""
    return _split(moments)[1].exp()


class _Bounded(torch.autograd.Function):
    """Logarithms of deviations cut to their bounds. Beyond a bound a gradient passes that leads back.

    A clamp alone would have none there, and a deviation that no observation changes would stay beyond for ever.
    """

    @staticmethod
    def forward(ctx: Any, logs: Tensor) -> Tensor:
        ctx.save_for_backward(logs)
        return logs.clamp(LEAST_LOG_DEVIATION, MOST_LOG_DEVIATION)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (logs,) = ctx.saved_tensors
        leads_on = ((logs > MOST_LOG_DEVIATION) & (gradient < 0)) | ((logs < LEAST_LOG_DEVIATION) & (gradient > 0))
        return gradient.masked_fill(leads_on, 0.0)


def _split(moments: Tensor) -> tuple[Tensor, Tensor]:
    means, logs = moments.chunk(2, dim=-1)
    return means, _Bounded.apply(logs)
