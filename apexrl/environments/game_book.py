"""The games of environments that step together: their returns and lengths."""

import numpy as np


class GameBook:
    """Counts the raw return and the length of each environment's current game. The step after its end is a reset."""

    def __init__(self, num_envs: int):
        self._returns = np.zeros(num_envs)
        self.steps = np.zeros(num_envs, np.int64)
        self.starts = np.zeros(num_envs, bool)  # whose next step is a reset

    def add(self, rewards: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Adds one step. Returns the return [E] and length [E] of the games that it ended, NaN and 0 for the others."""
        self._returns = np.where(self.starts, 0.0, self._returns + rewards)
        self.steps = np.where(self.starts, 0, self.steps + 1)
        self.starts = ends
        return np.where(ends, self._returns, np.nan), np.where(ends, self.steps, 0)
