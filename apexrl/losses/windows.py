"""Windows over the steps of an unroll: the same for the actor's priorities, the learner's batches, and losses.

Loads torch for tensors only: the launcher, and programs that read a log, have arrays.
"""

import importlib
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

if TYPE_CHECKING:
    import torch

A = TypeVar("A", np.ndarray, "torch.Tensor")


def n_step_windows(rewards: A, discounts: A, starts: A, gamma: float, n: int) -> tuple[A, A, A]:
    """Returns the n-step return, the bootstrap discount and the bootstrap offset of each start of an unroll.

    A window ends after n steps, or with the last step of its episode: a terminated one has discount 0, a truncated one
    bootstraps from its final observation. The discount of the environment enters at the step that earned it.

    Args:
      rewards: [T, ...], discounts: [T, ...], starts: [T + 1, ...] as in `Unroll` and `UnrollBatch`; T = K + n. Arrays
        of numpy or tensors, and the result is of their kind.
    Returns: returns [K, ...] float32, discounts [K, ...] float32 (gamma ** offset, or 0), offsets [K, ...] in 1..n.
    Source: arXiv:1803.00933, appendix; truncation as in arXiv:1712.00378.
    """
    kind: Any = np if isinstance(rewards, np.ndarray) else importlib.import_module("torch")
    num_starts = len(rewards) - n
    returns = kind.zeros_like(rewards[:num_starts], dtype=kind.float32)
    bootstrap = kind.ones_like(returns)
    offsets = kind.zeros_like(returns, dtype=kind.int64)
    inside = kind.ones_like(returns, dtype=kind.bool)
    for i in range(n):
        returns += kind.where(inside, bootstrap * rewards[i : i + num_starts], 0)
        bootstrap = kind.where(inside, bootstrap * gamma * discounts[i : i + num_starts], bootstrap)
        offsets += inside
        # The step after the last one of an episode is the reset, and it gives the first frame of the next.
        inside &= (discounts[i : i + num_starts] > 0) & ~starts[i + 2 : i + 2 + num_starts]
    return returns, bootstrap, offsets


def at_window_ends(values: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Returns [K, E, ...]: those of values [T + 1, E, ...] where the windows of each start end, by offsets [K, E]."""
    return values[np.arange(len(offsets))[:, None] + offsets, np.arange(offsets.shape[1])]


def valid_starts(starts: np.ndarray, num_starts: int) -> np.ndarray:
    """Returns [K, ...] bool: False where the step is a reset, whose action the environment ignored."""
    return ~starts[1 : num_starts + 1]
