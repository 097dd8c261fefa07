"""Measures of how well experience of a policy mu, which acted, fits the learner's policy pi.

They are pure functions of logits or log-probabilities [..., A], or of a network's features [..., F]. No gradient flows
through them. `categorical.kl_divergence` compares pi and mu directly.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from apexrl.losses.categorical import kl_divergence, log_probs

PROJECTED = 32  # numbers that a feature is projected to
LEAST_NORM = 1e-8


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
def unroll_divergence(behavior_logits: Tensor, target_logits: Tensor, mask: Tensor) -> Tensor:
    """Returns KL(pi || mu) [B], summed over the steps in the mask [T, B] of each unroll; the logits are [T, B, A]."""
    return kl_divergence(target_logits, behavior_logits).masked_fill(~mask, 0).sum(dim=0).clamp(min=0)


def relevance(distances: Tensor) -> Tensor:
    """Returns priorities [B] in (0, 1] that fall with distances [B] from 0 on: 1 for an unroll of the policy itself."""
    return 1 / (1 + distances)


def random_projection(num_features: int) -> Tensor:
    """Returns a random matrix [num_features, PROJECTED], always the same, which keeps lengths and angles on average.

    Nothing is learned here. Source: Johnson and Lindenstrauss, 1984.
    """
    generator = torch.Generator().manual_seed(0)
    return torch.randn(num_features, PROJECTED, generator=generator) / math.sqrt(PROJECTED)


@torch.no_grad()
def unroll_features(features: Tensor, mask: Tensor, projection: Tensor) -> Tensor:
    """Returns the mean feature [B, n] of each unroll over the steps in the mask [T, B]; 0 where none is.

    Features [T, B, F] are normalised by layer first, so that their scale, which grows in training, does not count.
    """
    normalised = F.layer_norm(features, features.shape[-1:]).masked_fill(~mask.unsqueeze(-1), 0)
    return normalised.sum(dim=0) / mask.sum(dim=0).clamp(min=1).unsqueeze(-1) @ projection


@torch.no_grad()
def feature_distances(features: Tensor, others: Tensor, measure: Literal["l2", "cosine"]) -> Tensor:
    """Returns the distances [B] of features [B, n] from others [B, n] or [n]; `cosine` is 1 - the cosine.

    They are at least 0, and exactly 0 for equal features, whatever the rounding of the cosine.
    """
    if measure == "l2":
        return (features - others).norm(dim=-1)
    distances = 1 - F.cosine_similarity(features, others.expand_as(features), dim=-1, eps=LEAST_NORM)
    return distances.clamp(min=0).masked_fill((features == others).all(dim=-1), 0)
