"""Vector environments that return time steps. Only this folder knows gymnasium and ale_py.

Every vector environment here resets in gymnasium's NEXT_STEP mode. The step after an end ignores its action and returns
the first frame of the next game. So the final observation of a game is always part of the stream.
"""

from typing import Protocol

import gymnasium
import numpy as np

from apexrl.config.sections import EnvConfig
from apexrl.environments.atari import AtariEnvironment, AtariGame, is_atari
from apexrl.environments.copies import GymnasiumEnvironment
from apexrl.environments.registry import registered
from apexrl.environments.renewal import Failures
from apexrl.environments.single import make_single
from apexrl.errors import named
from apexrl.types import EnvironmentSpec, TimeSteps

# The first numbers of a run's copies on one host: of the evaluator, of `watch` and `load`, and of all actors together.
EVALUATED, WATCHED, ACTED = 0, 10, 20


class VectorEnvironment(Protocol):
    """E environments that step together. One thread owns them."""

    spec: EnvironmentSpec
    pictures_per_second: float  # of a video that shows the game as fast as people play it

    def reset(self, seed: int) -> np.ndarray:
        """Returns the first frames [E, *frame]."""

    def send(self, actions: np.ndarray) -> np.ndarray:
        """Begins one step. Environments with threads of their own step in the background.

        Args:
          actions: [E] numbers of discrete actions, or [E, action size], which are clipped to the bounds.
        Returns: the actions as the environments take them: [E] int32, or [E, action size] float32.
        Raises: ApexError when they are not those of the environments.
        """

    def receive(self) -> TimeSteps:
        """Waits for the step that `send` began, and returns it."""

    def render(self) -> np.ndarray | None:
        """Returns the picture [height, width, 3] uint8 (RGB) of the first environment, None if it has none."""

    def close(self) -> None:
        """Frees the environments."""


def make_environment(
    config: EnvConfig, num_envs: int, *, evaluate: bool = False, num_threads: int = 1, render: bool = False,
    first_copy: int = EVALUATED, failures: Failures | None = None, making_seconds: float = 0.0,
) -> VectorEnvironment:  # fmt: skip
    """Makes a vector environment.

    Args:
      evaluate: play whole games; a lost life ends no episode.
      num_threads: ale-py's threads; other environments have none.
      render: `render` gives pictures.
      first_copy: the number of the first one among the copies of a run on one host.
      failures: of all environments of the process, where it has several vectors; Atari's do not fail one by one.
      making_seconds: after which the process ends where one is still being made; 0: never.
    Raises: ConfigError when the id is unknown, the environment cannot be made, or has actions that are not supported.
    """
    entry = registered(config.env)
    with named(f"environment {config.env!r} cannot be made"):
        if is_atari(entry):
            return AtariEnvironment(config, entry, num_envs, evaluate=evaluate, num_threads=num_threads, render=render)
        return GymnasiumEnvironment(
            config, entry, num_envs, failures or Failures(), render=render, first_copy=first_copy,
            making_seconds=making_seconds,
        )  # fmt: skip


def make_game(config: EnvConfig, render_mode: str | None = None, copy: int = WATCHED) -> gymnasium.Env:
    """Makes one environment of those that a vector has, for a loop of somebody's own.

    It has the arguments, the limit and the wrappers of the configuration, plays whole games, and clips no reward.
    Games of Atari give frames of 84x84 in gray. Others give observations as the outermost wrapper has them.

    Args:
      copy: its number, for arguments that ask for it.
    Raises: ConfigError when the id is unknown, or the environment cannot be made.
    """
    entry = registered(config.env)
    with named(f"environment {config.env!r} cannot be made"):
        if is_atari(entry):
            return AtariGame(config, entry, render_mode)
        return make_single(config, entry, render_mode, copy)


def clips_rewards(config: EnvConfig) -> bool:
    """Returns whether agents learn from the signs of the rewards."""
    return config.clip_rewards == "yes" or (config.clip_rewards == "auto" and is_atari(registered(config.env)))


def take_step(envs: VectorEnvironment, actions: np.ndarray) -> TimeSteps:
    """Takes one action in every environment and waits for the result."""
    envs.send(actions)
    return envs.receive()
