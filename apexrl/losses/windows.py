"""Windows over the steps of an unroll, in numpy: the same for the actor's priorities and the learner's batches."""

import numpy as np


def n_step_windows(
    rewards: np.ndarray, discounts: np.ndarray, starts: np.ndarray, gamma: float, n: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the n-step return, the bootstrap discount and the bootstrap offset of each start of an unroll.

    A window ends after n steps, or with the last step of its episode: a terminated one has discount 0, a truncated one
    bootstraps from its final observation. The discount of the environment enters at the step that earned it.

    Args:
      rewards: [T, ...], discounts: [T, ...], starts: [T + 1, ...] as in `Unroll`; T = K + n.
    Returns: returns [K, ...] float32, discounts [K, ...] float32 (gamma ** offset, or 0), offsets [K, ...] in 1..n.
    Source: arXiv:1803.00933, appendix; truncation as in arXiv:1712.00378.
    """
    num_starts = len(rewards) - n
    shape = (num_starts, *rewards.shape[1:])
    returns = np.zeros(shape, np.float32)
    bootstrap = np.ones(shape, np.float32)
    offsets = np.zeros(shape, np.int64)
    inside = np.ones(shape, bool)
    for i in range(n):
        returns += np.where(inside, bootstrap * rewards[i : i + num_starts], 0)
        bootstrap = np.where(inside, bootstrap * np.float32(gamma) * discounts[i : i + num_starts], bootstrap)
        offsets += inside
        # The step after the last one of an episode is the reset, and it gives the first frame of the next.
        inside &= (discounts[i : i + num_starts] > 0) & ~starts[i + 2 : i + 2 + num_starts]
    return returns, bootstrap, offsets


def valid_starts(starts: np.ndarray, num_starts: int) -> np.ndarray:
    """Returns [K, ...] bool: False where the step is a reset, whose action the environment ignored."""
    return ~starts[1 : num_starts + 1]
