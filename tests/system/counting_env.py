"""An environment whose observation is the number of steps that were taken in it, since ever."""

import gymnasium
import numpy as np


class Counting(gymnasium.Env):
    """Episodes of 7 steps, every third one truncated. Observations are [episode's first frame?, count]."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, render_mode=None):
        self.count = 0
        self.episode = 0
        self.in_episode = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode += 1
        self.in_episode = 0
        self.count += 1
        return np.array([1, self.count], np.float32), {}

    def step(self, action):
        self.count += 1
        self.in_episode += 1
        ends = self.in_episode == 7
        truncated = ends and self.episode % 3 == 0
        return np.array([0, self.count], np.float32), float(self.count % 5), ends and not truncated, truncated, {}


gymnasium.register("Counting-v0", entry_point=Counting)
