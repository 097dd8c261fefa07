"""An environment that can be made and reset, and whose every step raises."""

import gymnasium
import numpy as np


class RaisingEnv(gymnasium.Env):
    """Registered as Raising-v0."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        raise ValueError("the [robot] arm is stuck")


gymnasium.register("Raising-v0", RaisingEnv)
