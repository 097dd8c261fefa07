"""Exploration: the ladders of Ape-X, and epsilon-greedy actions. Pure numpy."""

import numpy as np

from apexrl.types import FORBIDDEN

CHOICES = (1,)  # of a seed: the key of the random numbers that choose actions


def epsilon_ladder(slots: np.ndarray, ladder_size: int, base: float = 0.4, exponent: float = 7.0) -> np.ndarray:
    """Returns the epsilon of each environment slot: base ** (1 + exponent * slot / (ladder_size - 1)).

    Args:
      slots: [E] slots held by the caller, each in [0, ladder_size).
      ladder_size: environment slots of the whole cluster. A ladder of one rung, which the paper leaves undefined,
        gives the epsilon of the middle of a long ladder.
    Raises: ValueError when a slot lies outside the ladder.
    Source: arXiv:1803.00933, section 4.
    """
    return base ** (1.0 + exponent * _positions(slots, ladder_size))


def noise_ladder(slots: np.ndarray, ladder_size: int, least: float, most: float) -> np.ndarray:
    """Returns the deviation [E] of each environment slot's noise: from `least` to `most` by equal factors.

    Where `least` is 0, by equal steps. Raises and rungs are those of `epsilon_ladder`.
    Source: a ladder of noise over actors as in D4PG's experiments of arXiv:1801.00690.
    """
    position = _positions(slots, ladder_size)
    if least == most or not least or not most:
        return least + (most - least) * position
    return least * (most / least) ** position


def _positions(slots: np.ndarray, ladder_size: int) -> np.ndarray:
    """Returns where slots stand on a ladder, 0 to 1."""
    slots = np.asarray(slots)
    if slots.size and not (0 <= slots.min() and slots.max() < ladder_size):
        raise ValueError(f"slots {slots.min()}..{slots.max()} do not fit a ladder of {ladder_size}")
    return slots / (ladder_size - 1) if ladder_size > 1 else np.full(slots.shape, 0.5)


def epsilon_greedy(q_values: np.ndarray, epsilons: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Returns [E] int32 actions: uniform with probability epsilon, else the first of the greatest q_values [E, A].

    Those whose value is FORBIDDEN are not drawn.
    """
    num_streams, num_actions = q_values.shape
    explore = rng.random(num_streams) < epsilons
    allowed = q_values > FORBIDDEN
    if allowed.all():
        uniform = rng.integers(num_actions, size=num_streams)
    else:
        uniform = np.where(allowed, rng.random(q_values.shape), -1).argmax(axis=1)
    return np.where(explore, uniform, q_values.argmax(axis=1)).astype(np.int32)
