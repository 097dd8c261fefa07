"""Actions that are vectors of numbers within bounds: their range, and the nearest ones inside. Loads no torch."""

import numpy as np

from apexrl.unroll import LARGEST_VALUE

Bounds = tuple[tuple[float, float], ...]  # the least and the greatest value of each number


def clipped(actions: np.ndarray, bounds: Bounds) -> np.ndarray:
    """Returns vectors of actions [.., action size] as float32 within their bounds."""
    low, high = np.array(bounds, np.float32).T
    return np.clip(actions, low, high).astype(np.float32)


def range_of(bounds: Bounds) -> tuple[np.ndarray, np.ndarray]:
    """Returns the center and the reach [action size] float32: actions are center + reach * x, where x is -1 to 1."""
    low, high = np.array(bounds, np.float32).T
    return (low + high) / 2, (high - low) / 2


def needed_of(bounds: Bounds) -> str:
    """Returns the kind of bounds that actions need, where networks and logs cannot use these; else an empty string."""
    low, high = np.array(bounds, np.float64).T
    if not (np.isfinite(low) & np.isfinite(high) & (low < high)).all():
        return "finite bounds, the least below the greatest"
    if max(abs(low).max(), abs(high).max()) > LARGEST_VALUE:
        return f"bounds from {-LARGEST_VALUE:g} to {LARGEST_VALUE:g}"
    _, reach = range_of(bounds)
    return "" if (reach > 0).all() else "bounds that differ as floats of 32 bits, too"
