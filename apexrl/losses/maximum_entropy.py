"""The losses of SAC, and its policy: a Gaussian whose draws a tanh squashes. Pure functions of tensors.

Source: arXiv:1812.05905, with the minimum over critics that its section 6 takes. Actions are those before they are
scaled to the bounds of an environment: -1 to 1.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

LEAST_LOG_DEVIATION, MOST_LOG_DEVIATION = -20.0, 2.0  # of the authors' code


def squashed_draws(moments: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Returns actions [B, size] of tanh(u), where u = mean + deviation * noise, and their log-probabilities [B].

    By equation 21 of the paper, log pi(a) = log N(u) - sum of log(1 - tanh(u)^2), which is computed here as
    2 (log 2 - u - softplus(-2 u)): it does not round to the logarithm of 0.

    Args:
      moments: [B, 2 size]: means, then logarithms of deviations; noise: [B, size], of a standard normal distribution.
    """
    means, logs = moments.chunk(2, dim=1)
    logs = logs.clamp(LEAST_LOG_DEVIATION, MOST_LOG_DEVIATION)
    drawn = means + logs.exp() * noise
    normal = -0.5 * noise.square() - logs - 0.5 * math.log(2 * math.pi)
    squash = 2 * (math.log(2) - drawn - F.softplus(-2 * drawn))
    return torch.tanh(drawn), (normal - squash).sum(dim=1)


def soft_value(values: Tensor, log_probs: Tensor, temperature: Tensor) -> Tensor:
    """Returns [B]: the value of an action and of the entropy of its choice (equation 3).

    Its negative is the policy's loss (equation 9), where the gradient flows through the action.

    Args:
      values: [C, B] of critics, of which the least counts; log_probs: [B]; temperature: scalar.
    """
    return values.min(dim=0).values - temperature * log_probs


def temperature_loss(log_temperature: Tensor, log_probs: Tensor, target_entropy: float) -> Tensor:
    """Returns [B]: minimising it moves the entropy towards its target (equation 18).

    The gradient is by the temperature's logarithm, which replaces it as in the authors' code; none flows through the
    log-probabilities [B].
    """
    return -log_temperature * (log_probs.detach() + target_entropy)
