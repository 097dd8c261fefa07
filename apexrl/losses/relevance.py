"""Measures of how well experience of a policy mu, which acted, fits the learner's policy pi.

They are pure functions of logits or log-probabilities [..., A]. No gradient flows through them.
`categorical.kl_divergence` compares pi and mu directly.
"""

import math

import torch
from torch import Tensor

from apexrl.losses.categorical import kl_divergence, log_probs


@torch.no_grad()
def implied_policy(behavior_logits: Tensor, target_logits: Tensor, rho_bar: float = 1.0) -> Tensor:
    """Returns the log-probabilities [..., A] of the policy in proportion to min(rho_bar mu, pi).

    V-trace, which clips pi / mu at rho_bar, estimates the values of this policy.

    Source: arXiv:1802.01561, equation 2.
    """
    return log_probs(torch.minimum(log_probs(behavior_logits) + math.log(rho_bar), log_probs(target_logits)))


@torch.no_grad()
def behavior_relevance(behavior_logits: Tensor, target_logits: Tensor, rho_bar: float = 1.0) -> Tensor:
    """Returns KL(pi || implied policy) [...] of each state: 0 where V-trace estimates pi itself.

    It depends on the state alone. A test of the taken action's ratio would bias the estimate.

    Source: arXiv:1909.11583, section 4.
    """
    divergence = kl_divergence(target_logits, implied_policy(behavior_logits, target_logits, rho_bar))
    return divergence.clamp(min=0)  # rounding


@torch.no_grad()
def accepted_states(behavior_logits: Tensor, target_logits: Tensor, threshold: float, rho_bar: float = 1.0) -> Tensor:
    """Returns [...] bool: whether a state is inside the trust region, for `vtrace`.

    Source: arXiv:1909.11583, section 4.2. The paper does not state its threshold.
    """
    return behavior_relevance(behavior_logits, target_logits, rho_bar) < threshold


@torch.no_grad()
def effective_sample_size(log_rhos: Tensor, mask: Tensor) -> Tensor:
    """Returns (sum rho)^2 / (sum rho^2) [B] over the steps in the mask: their number on policy, 0 where none.

    Args:
      log_rhos: [T, B] log(pi(a | x) / mu(a | x)); mask: [T, B] bool.
    """
    chosen = log_rhos.masked_fill(~mask, -torch.inf)
    size = (2 * chosen.logsumexp(dim=0) - (2 * chosen).logsumexp(dim=0)).exp()
    return size.masked_fill(~mask.any(dim=0), 0)
