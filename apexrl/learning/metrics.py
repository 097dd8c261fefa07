"""Metrics of training games. Tags are grouped as evaluation/, actor/, replay/, learner/, system/."""

import collections

import numpy as np

from apexrl.types import Episode

EPSILON_BANDS = ((0.2, "above_0.2"), (0.05, "0.05_to_0.2"), (0.01, "0.01_to_0.05"), (0.0, "below_0.01"))


def returns_by_epsilon(episodes: list[Episode]) -> dict[str, float]:
    """Returns the mean raw return of training games, over all and in bands of epsilon, and their mean length."""
    if not episodes:
        return {}
    figures = {
        "actor/return_mean": float(np.mean([e.episode_return for e in episodes])),
        "actor/game_steps": float(np.mean([e.steps for e in episodes])),
    }
    bands = collections.defaultdict(list)
    for episode in episodes:
        band = next(name for floor, name in EPSILON_BANDS if episode.epsilon >= floor)
        bands[band].append(episode.episode_return)
    return figures | {f"actor/return_by_epsilon/{band}": float(np.mean(values)) for band, values in bands.items()}
