"""Metrics of training games. Tags are grouped as evaluation/, actor/, replay/, learner/, system/."""

import collections

import numpy as np

from apexrl.types import Episode

EXPLORATION_BANDS = ((0.2, "above_0.2"), (0.05, "0.05_to_0.2"), (0.01, "0.01_to_0.05"), (0.0, "below_0.01"))


def returns_by_exploration(episodes: list[Episode]) -> dict[str, float]:
    """Returns the mean raw return of training games, in all and by band of exploration, and their mean length."""
    if not episodes:
        return {}
    metrics = {
        "actor/return_mean": float(np.mean([e.episode_return for e in episodes])),
        "actor/game_steps": float(np.mean([e.steps for e in episodes])),
    }
    bands = collections.defaultdict(list)
    for episode in episodes:
        band = next(name for floor, name in EXPLORATION_BANDS if episode.exploration >= floor)
        bands[band].append(episode.episode_return)
    return metrics | {f"actor/return_by_exploration/{band}": float(np.mean(values)) for band, values in bands.items()}
