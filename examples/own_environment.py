"""An environment of one's own: walk along a line of 8 places, from any of them to the last one."""

import gymnasium


class Walk(gymnasium.Env):
    """Each step costs 1; the goal is the last place."""

    observation_space = gymnasium.spaces.Discrete(8)  # a place
    action_space = gymnasium.spaces.Discrete(2)  # to the left, to the right

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = int(self.np_random.integers(7))
        return self.place, {}

    def step(self, action):
        self.place = max(self.place + (1 if action else -1), 0)
        return self.place, -1.0, self.place == 7, False, {}


gymnasium.register("Walk-v0", Walk, max_episode_steps=50)
