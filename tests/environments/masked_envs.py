"""Doors of which some are closed: environments with masks of their actions, which note each forbidden one in a file."""

from pathlib import Path

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary

DOORS, ROOMS = 4, 8
PRICES = np.arange(DOORS, dtype=np.float32) / (DOORS - 1)


class Doors(gymnasium.Env):
    """A walk through eight rooms, each with four doors, of which one or more are open, and a reward behind each.

    The best door is closed in half of the rooms: who leaves the mask out gets less. Nothing is open after the end.
    """

    action_space = Discrete(DOORS)

    def __init__(self, notes: str = "", in_info: bool = False, has_picture: bool = False):
        self._notes, self._in_info, self._has_picture = notes, in_info, has_picture
        prices = Box(0, 1, (DOORS,))
        parts = {"action_mask": MultiBinary(DOORS), "prices": prices}
        if has_picture:
            parts["screen"] = Box(0, 255, (16, 16, 3), np.uint8)
        self.observation_space = prices if in_info else Dict(parts)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._room = 0
        return self._entered()

    def step(self, action):
        if not self._mask[action]:
            if self._notes:
                with Path(self._notes).open("a") as notes:
                    notes.write(f"door {action} in room {self._room}, where {self._mask} are open\n")
            raise ValueError(f"door {action} is closed")
        reward = float(self._prices[action])
        self._room += 1
        observation, info = self._entered()
        return observation, reward, self._room == ROOMS, False, info

    def _entered(self):
        self._prices = self.np_random.permutation(PRICES)
        open_doors = self.np_random.permutation(DOORS) < self.np_random.integers(1, DOORS + 1)
        self._mask = (open_doors & (self._room < ROOMS)).astype(np.int8)
        info = {"action_mask": self._mask}
        if self._in_info:
            return self._prices, info
        observation = {"action_mask": self._mask, "prices": self._prices}
        if self._has_picture:
            observation["screen"] = np.full((16, 16, 3), 100, np.uint8)
        return observation, info


class Wrong(gymnasium.Env):
    """Gives a mask, or an observation, that is none."""

    action_space = Discrete(DOORS)

    def __init__(self, mask=(1, 1, 1, 1), after=None, size=DOORS, truncates=False, actions="discrete"):
        self._first, self._after, self._truncates = list(mask), list(after or mask), truncates
        if actions == "vector":
            self.action_space = Box(-1, 1, (2,))
        self.observation_space = Dict({"action_mask": Box(0, 1, (size,)), "place": Discrete(3)})

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._seen(self._first), {}

    def step(self, action):
        return self._seen(self._after), 0.0, False, self._truncates, {}

    def _seen(self, mask):
        return {"action_mask": np.array(mask, np.float32), "place": 1}


gymnasium.register("Doors-v0", Doors)
gymnasium.register("Wrong-v0", Wrong)
