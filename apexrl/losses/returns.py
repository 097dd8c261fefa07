"""Returns over whole unrolls, time first. Pure functions of tensors."""

import torch
from torch import Tensor


@torch.no_grad()
def lambda_returns(rewards: Tensor, discounts: Tensor, next_values: Tensor, starts: Tensor, lambda_: float) -> Tensor:
    """Returns the lambda returns [T, B] of steps in order.

        G_t = r_t + discount_t ((1 - lambda) V_{t+1} + lambda G_{t+1})

    A return ends with its episode, and with the unroll: the last step bootstraps from the value of the observation that
    it led to. A terminated one has discount 0. Where step t is a reset, whose action the environment ignored, G_t means
    nothing, and no return goes through it.

    Args:
      rewards: [T, B]; discounts: [T, B] gamma times the environment's discount.
      next_values: [T, B] values of the observations that the steps led to.
      starts: [T + 1, B] bool, as in `UnrollBatch`: an observation begins an episode.
      lambda_: 0 gives one-step returns, 1 those of whole episodes.
    Raises: ValueError when a shape disagrees.
    Source: Q(lambda) as in arXiv:2407.04811, with the greatest action values as next_values.
    """
    shapes = [tuple(tensor.shape) for tensor in (rewards, discounts, next_values, starts[1:])]
    if rewards.ndim != 2 or len(set(shapes)) != 1:
        raise ValueError(f"shapes must all be [T, B], and [T + 1, B] for the starts: {shapes}")
    goes_on = torch.cat([~starts[2:], torch.zeros_like(starts[:1])])  # the next step is neither a reset nor missing
    traces = lambda_ * goes_on.to(rewards.dtype)
    return discounted_sums(rewards + discounts * (1 - traces) * next_values, discounts * traces)


def discounted_sums(terms: Tensor, factors: Tensor) -> Tensor:
    """Returns sums [T, B] that obey sum_t = term_t + factor_t sum_{t+1}."""
    total = torch.zeros_like(terms[0])
    sums = []
    for term, factor in zip(reversed(terms.unbind()), reversed(factors.unbind()), strict=True):
        total = torch.addcmul(term, factor, total)
        sums.append(total)
    return torch.stack(sums[::-1])
