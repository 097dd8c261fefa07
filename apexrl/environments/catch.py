"""Catch: a ball falls through a small pixel field, and a paddle at the bottom moves left, stays, or moves right.

The reward is +1 or -1 when the ball arrives. An episode lasts rows - 1 steps. Catch is the smallest environment that
needs the convolutions, so a test can learn from pixels in a minute. It has two variants:

* `MemoryCatch` shows the ball in the first frame of an episode only. With memory the return is 1. Without memory the
  policy knows from the paddle alone which of 3 ways its first action went, so it catches 3 of 7 balls at most: the
  mean return is -1/7 at best.
* `SwitchingCatch` exchanges left and right again and again: the volatile game on which replay can do harm.
"""

import gymnasium
import numpy as np

SWITCH_PERIOD_STEPS = 3750  # of one environment: 8 of them take 30,000 steps together


class Catch(gymnasium.Env):
    """The environment. Observations are [rows, columns] uint8: 255 at the ball and the paddle, 0 elsewhere."""

    metadata = {  # noqa: RUF012 - as gymnasium has it
        "render_modes": ["rgb_array"],
        "render_fps": 10,
        "action_names": ("left", "stay", "right"),
    }

    def __init__(self, rows: int = 10, columns: int = 7, render_mode: str | None = None):
        self.render_mode = render_mode
        self._shape = (rows, columns)
        self.observation_space = gymnasium.spaces.Box(0, 255, self._shape, np.uint8)
        self.action_space = gymnasium.spaces.Discrete(3)
        self._ball = (0, 0)
        self._paddle = 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        """Drops a ball from a random column."""
        super().reset(seed=seed)
        columns = self._shape[1]
        self._ball = (0, int(self.np_random.integers(columns)))
        self._paddle = columns // 2
        return self._observation(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Moves the paddle by action - 1 columns and the ball down by one row."""
        rows, columns = self._shape
        self._paddle = int(np.clip(self._paddle + action - 1, 0, columns - 1))
        self._ball = (self._ball[0] + 1, self._ball[1])
        arrived = self._ball[0] == rows - 1
        reward = (1.0 if self._ball[1] == self._paddle else -1.0) if arrived else 0.0
        return self._observation(), reward, arrived, False, {}

    def render(self) -> np.ndarray:
        """Returns the field as an RGB picture, 16 pixels a cell."""
        return np.repeat(np.kron(self._observation(), np.ones((16, 16), np.uint8))[..., None], 3, axis=2)

    def _observation(self) -> np.ndarray:
        field = np.zeros(self._shape, np.uint8)
        if self._is_ball_shown():
            field[self._ball] = 255
        field[-1, self._paddle] = 255
        return field

    def _is_ball_shown(self) -> bool:
        return True


class MemoryCatch(Catch):
    """Catch whose ball is hidden after the first frame of an episode."""

    def _is_ball_shown(self) -> bool:
        return self._ball[0] == 0


class SwitchingCatch(Catch):
    """Catch whose actions left and right are exchanged after every `switch_period_steps` steps.

    The steps of an environment count across its episodes, which go on through a switch; a reset is no step. A new
    environment begins unswitched.
    """

    def __init__(self, switch_period_steps: int, rows: int = 10, columns: int = 7, render_mode: str | None = None):
        super().__init__(rows, columns, render_mode)
        self._period_steps = switch_period_steps
        self._steps = 0

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Takes the action, or while switched, its mirror image."""
        is_switched = self._steps // self._period_steps % 2 == 1
        self._steps += 1
        return super().step(2 - action if is_switched else action)
