"""Actions that are vectors of numbers within bounds: their range, and the nearest ones inside. Loads no torch."""

import numpy as np

Bounds = tuple[tuple[float, float], ...]  # the least and the greatest value of each number


def clipped(actions: np.ndarray, bounds: Bounds) -> np.ndarray:
    """Returns vectors of actions [.., action size] as float32 within their bounds."""
    low, high = np.array(bounds, np.float32).T
    return np.clip(actions, low, high).astype(np.float32)


def range_of(bounds: Bounds) -> tuple[np.ndarray, np.ndarray]:
    """Returns the center and the reach [action size] float32: actions are center + reach * x, where x is -1 to 1."""
    low, high = np.array(bounds, np.float32).T
    return (low + high) / 2, (high - low) / 2
