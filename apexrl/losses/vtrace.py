"""V-trace: off-policy targets of the value, and advantages of the policy. Pure functions of tensors, time first."""

from typing import NamedTuple

import torch
from torch import Tensor

from apexrl.losses.returns import discounted_sums


class VTrace(NamedTuple):
    """The targets of T steps of B unrolls. No gradient flows through them."""

    vs: Tensor  # [T, B] targets of the values; the value itself where nothing is learned
    pg_advantages: Tensor  # [T, B] clipped importance ratio times advantage; 0 where nothing is learned
    errors: Tensor  # [T, B] vs - values
    learned: Tensor  # [T, B] bool: the steps with a target; the caller masks its losses by it


@torch.no_grad()
def vtrace(
    log_rhos: Tensor,
    discounts: Tensor,
    rewards: Tensor,
    values: Tensor,
    bootstrap_value: Tensor,
    *,
    valid: Tensor | None = None,
    accept: Tensor | None = None,
    lambda_: float = 1.0,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
    pg_rho_bar: float = 1.0,
) -> VTrace:
    """Returns the V-trace targets and the advantages of the policy gradient.

        rho_t = min(rho_bar, pi(a_t | x_t) / mu(a_t | x_t)),  c_t = lambda min(c_bar, pi(a_t | x_t) / mu(a_t | x_t))
        delta_t = rho_t (r_t + discount_t V(x_{t+1}) - V(x_t))
        v_s = V(x_s) + sum over t >= s of (product over i from s to t - 1 of discount_i c_i) delta_t
        advantage_s = min(pg_rho_bar, pi / mu) (r_s + discount_s (lambda v_{s+1} + (1 - lambda) V(x_{s+1})) - V(x_s))

    With lambda 1 the advantage is the paper's. With another lambda it is, on policy, generalised advantage estimation.

    A step that is not valid, or whose state is not accepted, has rho = c = 0. So it gets no target, and no trace
    crosses it: the step before it bootstraps from its value. That is right at each kind of end:

    * Truncation: the step after the last one is the reset, which is not valid. Its observation is the final one, so
      the last step bootstraps from the value of the final observation.
    * Termination: the discount is 0.
    * The trust region: a trace stops at a rejected state and bootstraps there.

    Args:
      log_rhos: [T, B] log(pi(a | x) / mu(a | x)) of the actions taken; mu is the behaviour policy.
      discounts: [T, B] gamma times the environment's discount: 0 where terminated.
      rewards: [T, B].
      values: [T, B] the learner's values V(x_t); bootstrap_value: [B] V(x_T).
      valid: [T, B] bool; False where the step is a reset, whose action the environment ignored. None: all are valid.
      accept: [T, B] bool; whether the state x_t is inside the trust region. None: all are.
    Raises: ValueError when a shape disagrees, or when rho_bar is below c_bar.
    Source: arXiv:1802.01561, equation 1 and remarks 1 and 2; the trust region arXiv:1909.11583, section 4.
    """
    _check_shapes(values, bootstrap_value, log_rhos, discounts, rewards, valid, accept)
    if rho_bar < c_bar:
        raise ValueError(f"rho_bar {rho_bar} is below c_bar {c_bar}: V-trace need not converge; raise rho_bar")
    learned = torch.ones_like(values, dtype=torch.bool)
    for mask in (valid, accept):
        learned = learned if mask is None else learned & mask
    rhos = log_rhos.exp().masked_fill(~learned, 0)
    next_values = torch.cat([values[1:], bootstrap_value.unsqueeze(0)])
    deltas = rhos.clamp(max=rho_bar) * (rewards + discounts * next_values - values)
    errors = discounted_sums(deltas, discounts * lambda_ * rhos.clamp(max=c_bar))
    next_errors = torch.cat([errors[1:], torch.zeros_like(bootstrap_value).unsqueeze(0)])
    q_estimates = rewards + discounts * (next_values + lambda_ * next_errors)
    return VTrace(values + errors, rhos.clamp(max=pg_rho_bar) * (q_estimates - values), errors, learned)


def _check_shapes(values: Tensor, bootstrap_value: Tensor, *others: Tensor | None) -> None:
    shapes = [tuple(tensor.shape) for tensor in (values, *others) if tensor is not None]
    if values.ndim != 2 or len(set(shapes)) != 1 or bootstrap_value.shape != values.shape[1:]:
        raise ValueError(f"shapes must all be [T, B], and [B] for the bootstrap: {shapes}, {bootstrap_value.shape}")
