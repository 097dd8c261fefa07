"""An environment that raises in each step behind those that a look at it takes."""

import gymnasium
import numpy as np

SOUND_STEPS = 300


class RaisingEnv(gymnasium.Env):
    """Registered as Raising-v0."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        if self.steps <= SOUND_STEPS:
            return np.zeros(2, np.float32), 0.0, False, False, {}
        raise ValueError("the [robot] arm is stuck")


gymnasium.register("Raising-v0", RaisingEnv)
