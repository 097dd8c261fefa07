"""Exact quantities of the short corridor, solved as a small Markov chain: a slow oracle for tests.

The transitions are written here once more, from the book's description. A stationary blind policy is one number: the
probability of right. The time limit is left out: good policies hardly ever reach it.
"""

import itertools
import math
from collections.abc import Callable

import numpy as np

LEFT_TO, RIGHT_TO = [0, 2, 1], [1, 0, 3]  # by state; 3 is the goal
REWARD = -1.0


def transitions(right: float) -> np.ndarray:
    """Returns [3, 3]: the probabilities of the next state, without the goal."""
    chances = np.zeros((3, 4))
    for state in range(3):
        chances[state, LEFT_TO[state]] += 1 - right
        chances[state, RIGHT_TO[state]] += right
    return chances[:, :3]


def values(right: float, gamma: float = 1.0) -> np.ndarray:
    """Returns [3]: the discounted return from each state."""
    return np.linalg.solve(np.eye(3) - gamma * transitions(right), np.full(3, REWARD))


def mean_return(right: float) -> float:
    """Returns the mean return of an episode."""
    return float(values(right)[0])


def best_right() -> float:
    """Returns the probability of right with the greatest mean return."""
    return _root(lambda right: mean_return(right + 1e-6) - mean_return(right - 1e-6))


def best_return_with_memory() -> float:
    """Returns the return of the shortest sequence of actions that leads to the goal. Every start is the same."""
    for length in itertools.count(1):
        for actions in itertools.product((LEFT_TO, RIGHT_TO), repeat=length):
            state = 0
            for move in actions:
                if state == 3:
                    break
                state = move[state]
            if state == 3:
                return length * REWARD
    raise AssertionError


def visits(right: float) -> np.ndarray:
    """Returns [3]: the share of the steps that begin in each state, over many episodes."""
    visits = np.linalg.solve(np.eye(3) - transitions(right).T, np.array([1.0, 0, 0]))
    return visits / visits.sum()


def actor_critic_right(gamma: float, unroll_steps: float) -> float:
    """Returns the probability of right at which actor-critic stands still, when its critic is blind as well.

    Unrolls of K steps are cut from an endless stream. The target of each step holds all rewards up to the end of its
    unroll, and then the critic's value: 1 to K rewards, each number as often. The critic's value is one number, the
    mean of the targets. Both expectations are over the states that the policy visits.

    Args:
      unroll_steps: K; infinity for returns up to the end of the episode.
    """
    return _root(lambda right: policy_gradient(right, gamma, unroll_steps))


def policy_gradient(right: float, gamma: float, unroll_steps: float) -> float:
    """Returns the mean advantage of right over left in the stream of a policy; its sign is the gradient's."""
    chances, share = transitions(right), visits(right)
    if math.isinf(unroll_steps):
        after = [values(right, gamma)]
    else:
        after = _bootstrapped(chances, share, gamma, int(unroll_steps))
    ahead = np.append(np.mean(after, axis=0), 0.0)  # value of the next state; the goal has none
    return gamma * float(share @ (ahead[RIGHT_TO] - ahead[LEFT_TO]))


def _bootstrapped(chances: np.ndarray, share: np.ndarray, gamma: float, unroll_steps: int) -> list[np.ndarray]:
    """Returns the mean targets [3] of 0 to K - 1 rewards, with the value that a blind critic learns."""

    def targets(value: float) -> list[np.ndarray]:
        targets = [np.full(3, value)]
        for _ in range(unroll_steps):
            targets.append(REWARD + gamma * chances @ targets[-1])
        return targets

    def mean_target(value: float) -> float:
        return float(np.mean([share @ target for target in targets(value)[1:]]))

    offset = mean_target(0.0)  # the mean target is linear in the critic's value
    slope = mean_target(1.0) - offset
    return targets(offset / (1 - slope))[:-1]


def _root(falling: Callable[[float], float]) -> float:
    """Returns where a falling function of the probability of right is 0."""
    low, high = 0.3, 0.8
    assert falling(low) > 0 > falling(high)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return low
