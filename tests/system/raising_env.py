"""An environment that plays until somebody closes one, and then never again: a look at it is a success."""

from pathlib import Path

import gymnasium
import numpy as np


class RaisingEnv(gymnasium.Env):
    """Registered as Raising-v0."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, marker):
        """Takes the path of a file that tells of the first one that was closed."""
        self.marker = Path(marker)
        self.is_stuck = self.marker.exists()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        if self.is_stuck:
            raise ValueError("the [robot] arm is stuck")
        return np.zeros(2, np.float32), 0.0, False, False, {}

    def close(self):
        self.marker.touch()


gymnasium.register("Raising-v0", RaisingEnv)
