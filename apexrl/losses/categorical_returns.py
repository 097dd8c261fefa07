"""Distributions of returns over fixed atoms: C51's projection and loss. Pure functions of tensors.

Source: arXiv:1707.06887, algorithm 1.
"""

import torch
from torch import Tensor


def projected(support: Tensor, return_t: Tensor, discount_t: Tensor, probabilities_t: Tensor) -> Tensor:
    """Returns [B, N]: the distribution of return + discount * atom, shared out to the atoms nearest to each.

    Args:
      support: [N] atoms, at equal distances; return_t, discount_t: [B], as of n-step returns.
      probabilities_t: [B, N] of the atoms where the window ends.
    """
    last = len(support) - 1
    moved = (return_t.unsqueeze(1) + discount_t.unsqueeze(1) * support).clamp(support[0], support[-1])
    places = ((moved - support[0]) * (last / (support[-1] - support[0]))).clamp(0, last)
    below = places.floor()
    above, lower = places - below, below.long()  # what goes to the atom above, and the atom below
    found = torch.zeros_like(probabilities_t).scatter_add_(1, lower, probabilities_t * (1 - above))
    return found.scatter_add_(1, (lower + 1).clamp(max=last), probabilities_t * above)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns [...]: the loss of distributions by their logits [..., N] next to targets [..., N]."""
    return -(targets.detach() * logits.log_softmax(dim=-1)).sum(dim=-1)
