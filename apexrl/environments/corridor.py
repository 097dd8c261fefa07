"""The short corridor with switched actions: three states in a row, a goal to the right, and an agent that is blind.

The actions are left and right. The middle state exchanges them, and left in the first state stays there. Every
observation is the same, so a policy without memory is one probability of right. The best one is 2 - sqrt(2) = 0.586,
with a mean return of -11.66. With memory the return is -3: right, left, right.

Source: Sutton and Barto, Reinforcement Learning, second edition, example 13.1.
"""

import gymnasium
import numpy as np

LEFT, RIGHT = 0, 1
GOAL = 3
NEXT_STATES = (  # by state, then by action
    (0, 1),
    (2, 0),
    (1, GOAL),
)
MAX_EPISODE_STEPS = 1000


class Corridor(gymnasium.Env):
    """The environment. The reward is -1 for every step, also for the one that reaches the goal."""

    metadata = {"render_modes": [], "action_names": ("left", "right")}  # noqa: RUF012 - as gymnasium has it

    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Box(0.0, 1.0, (1,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)
        self._state = 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        """Begins in the leftmost state."""
        super().reset(seed=seed)
        self._state = 0
        return self._observation(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Moves one state, or stays at the left end."""
        self._state = NEXT_STATES[self._state][action]
        return self._observation(), -1.0, self._state == GOAL, False, {}

    def _observation(self) -> np.ndarray:
        return np.ones(1, np.float32)  # not 0, which would hide the weights of a first layer from their gradients
