"""The tasks of DeepMind's control suite as environments of Gymnasium: `dm_control/cheetah-run-v0`.

An observation is its parts in a row. Episodes have a thousand steps and end by time, but where the suite itself ends
one with a discount of 0.

Source: arXiv:1801.00690.
"""

from typing import Any

import gymnasium
import numpy as np

from apexrl.errors import ConfigError
from apexrl.extras import why_missing

NAMESPACE = "dm_control/"
UNLIMITED = 1e10  # mjMAXVAL, which the suite gives as the bound of an actuator that has none
PICTURE_SIZE = (320, 240)


class SuiteTask(gymnasium.Env):
    """A task of the suite."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012 - as gymnasium has it

    def __init__(self, domain: str, task: str, render_mode: str | None = None):
        """Loads the suite, and the task.

        Raises: ConfigError when the package is not installed, or there is no such task.
        """
        try:
            from dm_control import suite  # noqa: PLC0415 - slow, and not everybody has it
        except ModuleNotFoundError as error:
            raise ConfigError(f"{NAMESPACE}: {why_missing(error) or error}") from error
        try:
            self._env = suite.load(domain, task)
        except ValueError as error:
            near = [other for of, other in suite.ALL_TASKS if of == domain]
            hint = f"tasks of {domain} are {', '.join(near)}" if near else f"say {NAMESPACE}cheetah-run-v0"
            raise ConfigError(f"the suite has no {domain}-{task}: {hint}") from error
        physics = self._env.physics
        # It draws nothing itself: a task that changes its terrain would ask for a screen wherever it is played.
        physics.__class__ = type("Undrawn", (type(physics),), {"contexts": None})
        self.render_mode = render_mode
        self._viewer: Any = None
        self.metadata = {**self.metadata, "render_fps": round(1 / self._env.control_timestep())}
        bounds = self._env.action_spec()
        low, high = (np.broadcast_to(bound, bounds.shape) for bound in (bounds.minimum, bounds.maximum))
        low, high = (np.where(abs(b) < UNLIMITED, b, np.copysign(np.inf, b)).astype(np.float32) for b in (low, high))
        self.action_space = gymnasium.spaces.Box(low, high)
        size = sum(int(np.prod(part.shape)) for part in self._env.observation_spec().values())
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (size,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        """Begins an episode."""
        super().reset(seed=seed)
        if seed is not None:
            self._env.task.random.seed(seed % 2**32)
        if self._env.physics.model.nhfield:  # another terrain, and a viewer draws the one that it began with
            self._end_viewer()
        return self._row(self._env.reset()), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Takes a step of control."""
        step = self._env.step(action)
        is_over = step.last()
        return self._row(step), float(step.reward), bool(is_over and not step.discount), is_over, {}

    def render(self) -> np.ndarray:
        """Returns what the task's first camera sees.

        Gymnasium's viewer draws it, which takes a library for its first picture; the suite takes one when imported.
        """
        if self._viewer is None:
            from gymnasium.envs.mujoco.mujoco_rendering import OffScreenViewer  # noqa: PLC0415 - as above

            physics = self._env.physics
            self._viewer = OffScreenViewer(physics.model.ptr, physics.data.ptr, *PICTURE_SIZE)
        self._viewer.make_context_current()  # that of another copy may be
        picture: np.ndarray = self._viewer.render("rgb_array", camera_id=0)
        return picture

    def close(self) -> None:
        """Ends the simulation."""
        self._end_viewer()
        self._env.close()

    def _end_viewer(self) -> None:
        if self._viewer is not None:
            self._viewer.close()
            self._viewer = None

    @staticmethod
    def _row(step: Any) -> np.ndarray:
        return np.concatenate([np.ravel(part) for part in step.observation.values()]).astype(np.float32)


def register(name: str) -> None:
    """Makes a task known to gymnasium by its name, such as `dm_control/cheetah-run-v0`; it ignores other names."""
    domain, _, task = name.removeprefix(NAMESPACE).removesuffix("-v0").partition("-")
    if name.startswith(NAMESPACE) and name.endswith("-v0") and task and name not in gymnasium.registry:
        entry = "apexrl.environments.dm_suite:SuiteTask"
        gymnasium.register(name, entry_point=entry, kwargs={"domain": domain, "task": task})
