"""Quantile regression of returns: QR-DQN's loss, and its gradient in closed form. Pure functions of tensors.

Source: arXiv:1710.10044, with kappa = 1. The loss is a sum over the quantiles that are learned, and a mean over those
of the target.
"""

import torch
from torch import Tensor


def quantile_huber(quantiles: Tensor, targets: Tensor) -> Tensor:
    """Returns [B]: the quantile Huber loss of quantiles [B, N] by samples of their target [B, M]."""
    errors, sides = _errors_and_sides(quantiles, targets)
    clipped = errors.clamp(-1, 1)
    return (sides * clipped * (errors - 0.5 * clipped)).mean(dim=2).sum(dim=1)


def quantile_huber_gradient(quantiles: Tensor, action: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
    """Returns [B, A, N]: the gradient of the sum of weight * loss by the quantiles of all actions.

    The derivative of the loss by quantile i is -mean_j |tau_i - [u_ij < 0]| clip(u_ij, -1, 1), where u_ij is target j
    minus quantile i; other actions than the one taken have none.

    Args:
      quantiles: [B, A, N]; action: [B] int64, the one taken; targets: [B, M]; weight: [B].
    """
    index = action[:, None, None].expand(-1, 1, quantiles.shape[2])
    errors, sides = _errors_and_sides(quantiles.gather(1, index).squeeze(1), targets)
    slopes = -weight.unsqueeze(1) * (sides * errors.clamp(-1, 1)).mean(dim=2)
    return torch.zeros_like(quantiles).scatter_(1, index, slopes.unsqueeze(1))


def _errors_and_sides(quantiles: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the errors [B, N, M], and the weight of each: tau above its quantile, 1 - tau below."""
    count = quantiles.shape[1]
    errors = targets.unsqueeze(1) - quantiles.unsqueeze(2)
    middles = (torch.arange(count, device=quantiles.device, dtype=quantiles.dtype) + 0.5) / count
    return errors, (middles[:, None] - (errors.detach() < 0).to(quantiles.dtype)).abs()
