"""Categorical policies over A actions, given by logits. Every function normalises them first.

Log-probabilities are logits too, so an argument may hold either, in half precision too.
"""

import torch
from torch import Tensor


def log_probs(logits: Tensor) -> Tensor:
    """Returns normalised log-probabilities [..., A], at least in float32."""
    return torch.log_softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def action_log_probs(logits: Tensor, actions: Tensor) -> Tensor:
    """Returns the log-probabilities [...] of actions [...] int64 under policies [..., A]."""
    if logits.shape[:-1] != actions.shape:
        raise ValueError(f"logits {tuple(logits.shape)} need one action a policy, not {tuple(actions.shape)}")
    return log_probs(logits).gather(-1, actions.unsqueeze(-1)).squeeze(-1)


def entropy(logits: Tensor) -> Tensor:
    """Returns the entropy [...] of policies [..., A]."""
    log_pi = log_probs(logits)
    return -_expectation(log_pi, log_pi)


def kl_divergence(logits_p: Tensor, logits_q: Tensor) -> Tensor:
    """Returns KL(p || q) [...] of policies [..., A]; infinite where q excludes an action that p may take."""
    if logits_p.shape != logits_q.shape:
        raise ValueError(f"policies differ in shape: {tuple(logits_p.shape)}, {tuple(logits_q.shape)}")
    log_p = log_probs(logits_p)
    return _expectation(log_p, log_p - log_probs(logits_q))


def _expectation(log_p: Tensor, x: Tensor) -> Tensor:
    """Returns the sum of p * x over actions; an action that p never takes adds nothing, whatever its x."""
    return (log_p.exp() * x.masked_fill(log_p == -torch.inf, 0)).sum(dim=-1)
