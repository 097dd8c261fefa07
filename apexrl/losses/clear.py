"""CLEAR's cloning losses on replayed steps: the networks stay near those that acted. Pure functions of tensors.

The caller multiplies them by its weights, masks resets and rows that are new, and reduces them. The paper's weights are
0.01 of the policy and 0.005 of the value.
"""

from torch import Tensor

from apexrl.losses.categorical import kl_divergence


def policy_cloning_loss(behavior_logits: Tensor, logits: Tensor) -> Tensor:
    """Returns KL(mu || pi) [T, B] from the policies that acted to the learner's; a gradient flows to the learner's.

    Args:
      behavior_logits: [T, B, A] of mu: logits or log-probabilities; logits: [T, B, A] of pi.
    Source: arXiv:1811.11682, section 3.
    """
    return kl_divergence(behavior_logits.detach(), logits)


def value_cloning_loss(behavior_values: Tensor, values: Tensor) -> Tensor:
    """Returns (V_mu - V)^2 [T, B]; a gradient flows to the learner's values.

    Source: arXiv:1811.11682, section 3.
    """
    if behavior_values.shape != values.shape:
        raise ValueError(f"shapes differ: {tuple(behavior_values.shape)}, {tuple(values.shape)}")
    return (behavior_values.detach().to(values.dtype) - values).square()
