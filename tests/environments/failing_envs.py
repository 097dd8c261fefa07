"""An environment whose copies fail as a test says: `tests.environments.failing_envs:Breakable-v0`."""

import gymnasium
import numpy as np

GAME_STEPS = 6
made: list["Failing"] = []  # all copies in the order of their making, also those that could not be made


class Failing(gymnasium.Env):
    """Shows the number of its copy, a random number of its game, and the step in it.

    Args:
      steps: by copy: the number of its step, over all games, that fails.
      makings: copies that cannot be made. resets: copies whose first reset fails.
    """

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, steps=None, makings=(), resets=(), space=3):
        self.number, self.steps, self.closed = len(made), 0, 0
        made.append(self)
        if self.number in makings:
            raise ConnectionError(f"simulator {self.number} does not come")
        if self.number >= 3:
            self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (space,), np.float32)
        self.fails_at = (steps or {}).get(str(self.number))
        self.fails_to_reset, self.has_failed = self.number in resets, False

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if self.fails_to_reset:
            self.has_failed = True
            raise TimeoutError("no answer")
        self.game, self.t = self.np_random.random(), 0
        return self.look(), {}

    def step(self, action):
        self.steps += 1
        if self.steps == self.fails_at:
            self.has_failed = True
            raise ConnectionError(f"simulator {self.number} is\ngone")
        self.t += 1
        return self.look(), 1.0, self.t == GAME_STEPS, False, {}

    def close(self):
        self.closed += 1
        if self.has_failed:
            raise OSError("the connection is closed already")

    def look(self):
        return np.resize(np.array([self.number, self.game, self.t], np.float32), self.observation_space.shape)


gymnasium.register("Breakable-v0", Failing, disable_env_checker=True)
