"""Vector environments that return time steps. Only this module knows gymnasium and ale_py.

Every vector environment here resets in gymnasium's NEXT_STEP mode. The step after an end ignores its action and returns
the first frame of the next game. So the final observation of a game is always part of the stream.
"""

import importlib
import logging
from typing import Any, Literal, Protocol

import ale_py
import gymnasium
import numpy as np
from ale_py.vector_env import AtariVectorEnv
from gymnasium.envs.registration import EnvSpec

from apexrl.config import EnvConfig
from apexrl.environments import catch, corridor
from apexrl.errors import ConfigError
from apexrl.types import MAX_ACTION_SIZE, EnvironmentSpec, TimeSteps

ATARI_FRAMES_PER_STEP = 4
ATARI_SCREEN = (210, 160)
ATARI_KWARGS = {"game", "frameskip", "repeat_action_probability", "full_action_space", "max_num_frames_per_episode"}
FRAMESKIPS = (1, 4)  # ids registered with either are played with 4: DQN's skip, which v5 ids register
SMALLEST_PICTURE = 16  # pixels; before two sides of at least so many, a shorter first dimension counts as channels

logger = logging.getLogger(__name__)

gymnasium.register_envs(ale_py)
catch.register()
corridor.register()


class VectorEnvironment(Protocol):
    """E environments that step together. One thread owns them."""

    num_actions: int  # 0 where an action is a vector of numbers
    action_bounds: tuple[tuple[float, float], ...]  # by number of an action; empty if discrete
    action_names: tuple[str, ...]  # empty where the environment gives none
    frame_shape: tuple[int, ...]
    frame_dtype: Literal["uint8", "float32"]
    stacked_frames: int
    frames_per_step: int

    def reset(self, seed: int) -> np.ndarray:
        """Returns the first frames [E, *frame]."""

    def send(self, actions: np.ndarray) -> None:
        """Begins one step. Environments with threads of their own step in the background.

        Args:
          actions: [E] numbers of discrete actions, or [E, action size] float32, which are clipped to the bounds.
        """

    def receive(self) -> TimeSteps:
        """Waits for the step that `send` began, and returns it."""

    def render(self) -> np.ndarray | None:
        """Returns the picture [height, width, 3] uint8 (RGB) of the first environment, None if it has none."""

    def close(self) -> None:
        """Frees the environments."""


def make_environment(
    config: EnvConfig, num_envs: int, *, evaluate: bool = False, num_threads: int = 1, render: bool = False
) -> VectorEnvironment:
    """Makes a vector environment.

    Args:
      evaluate: play whole games; a lost life ends no episode.
      num_threads: ale-py's threads; other environments have none.
      render: `render` gives pictures.
    Raises: ConfigError when the id is unknown, the environment cannot be made, or has actions that are not supported.
    """
    registered = _registered(config.env)
    kwargs = registered.kwargs
    try:
        if "game" in kwargs:
            _check_atari(config.env, kwargs)
            return AtariEnvironment(config, kwargs, num_envs, evaluate=evaluate, num_threads=num_threads, render=render)
        return GymnasiumEnvironment(config, registered, num_envs, render=render)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"environment {config.env!r} cannot be made: {_reason(error)}") from error


def make_spec(config: EnvConfig, environment: VectorEnvironment) -> EnvironmentSpec:
    """Returns the frames and the actions of an environment."""
    return EnvironmentSpec(
        env=config.env,
        frame_shape=environment.frame_shape,
        frame_dtype=environment.frame_dtype,
        stacked_frames=environment.stacked_frames,
        num_actions=environment.num_actions,
        frames_per_step=environment.frames_per_step,
        action_bounds=environment.action_bounds,
        action_names=environment.action_names,
    )


def take_step(envs: VectorEnvironment, actions: np.ndarray) -> TimeSteps:
    """Takes one action in every environment and waits for the result."""
    envs.send(actions)
    return envs.receive()


class _GameBook:
    """Counts the raw return and the length of each environment's current game."""

    def __init__(self, num_envs: int):
        self._returns = np.zeros(num_envs)
        self._steps = np.zeros(num_envs, np.int64)

    def add(self, rewards: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Adds one step. Returns the return [E] and length [E] of the games that it ended, NaN and 0 for the others."""
        self._returns = np.where(starts, 0.0, self._returns + rewards)
        self._steps = np.where(starts, 0, self._steps + 1)
        return np.where(ends, self._returns, np.nan), np.where(ends, self._steps, 0)


class AtariEnvironment:
    """ale-py's C++ vector environment with DQN's preprocessing: 84x84 gray, skip 4, max of 2 frames.

    It avoids three settings of ale-py:
      episodic_life    resets the game at a lost life, so that the later lives are never played
      life_loss_info   reports a lost life like the game's end, and hides a truncation
      reward_clipping  hides the score
    """

    frame_shape: tuple[int, ...] = (84, 84)
    frame_dtype: Literal["uint8", "float32"] = "uint8"
    stacked_frames = 4
    frames_per_step = ATARI_FRAMES_PER_STEP
    action_bounds: tuple[tuple[float, float], ...] = ()

    def __init__(
        self, config: EnvConfig, kwargs: dict, num_envs: int, *, evaluate: bool, num_threads: int, render: bool
    ):
        options: dict[str, Any] = {
            "max_num_frames_per_episode": config.max_episode_frames,
            "repeat_action_probability": kwargs.get("repeat_action_probability", 0.0),
            "full_action_space": kwargs.get("full_action_space", False),
            "noop_max": config.noop_max,
            "use_fire_reset": config.fire_at_reset,
            "reward_clipping": False,
            "stack_num": 1,
        }
        self._envs = AtariVectorEnv(kwargs["game"], num_envs, num_threads=num_threads, **options)
        # ale-py's vector environment cannot render, so a second one plays the same game, seed and actions in colour.
        height, width = ATARI_SCREEN
        picture: dict[str, Any] = {"img_height": height, "img_width": width, "grayscale": False}
        self._camera = AtariVectorEnv(kwargs["game"], 1, num_threads=1, **options, **picture) if render else None
        self._picture: np.ndarray | None = None
        self.action_names = tuple(action.name.lower() for action in self._envs.ale.get_action_set())
        self.num_actions = len(self.action_names)
        self._clip = config.clip_rewards != "no"
        self._life_loss_terminal = config.life_loss_terminal and not evaluate

    def reset(self, seed: int) -> np.ndarray:
        """Returns the first frames [E, 84, 84]."""
        observations, info = self._envs.reset(seed=seed)
        self._lives = info["lives"]
        self._reset_next = np.zeros(len(observations), bool)
        self._games = _GameBook(len(observations))
        if self._camera is not None:
            self._picture = self._camera.reset(seed=seed)[0][0, -1]
        return observations[:, -1]

    def send(self, actions: np.ndarray) -> None:
        """Begins one step with actions [E]; ale-py's threads play it in the background."""
        actions = np.asarray(actions, np.int32)
        self._envs.send(actions)
        if self._camera is not None:
            self._camera.send(actions[:1])

    def receive(self) -> TimeSteps:
        """Waits for the step that `send` began, and returns it."""
        observations, rewards, terminated, truncated, info = self._envs.recv()
        if self._camera is not None:
            self._picture = self._camera.recv()[0][0, -1]
        starts = self._reset_next
        ends = terminated | truncated
        lost = ~starts & (info["lives"] > 0) & (info["lives"] < self._lives)
        self._reset_next, self._lives = ends, info["lives"]
        returns, steps = self._games.add(rewards, starts, ends)
        rewards = np.sign(rewards) if self._clip else rewards
        discounts = np.where(terminated | (lost & self._life_loss_terminal), 0, 1)
        frames = observations[:, -1]
        return TimeSteps(frames, rewards.astype(np.float32), discounts.astype(np.float32), starts, returns, steps)

    def render(self) -> np.ndarray | None:
        """Returns the screen [210, 160, 3] of the first game, None unless made with `render`."""
        return self._picture

    def close(self) -> None:
        """Stops ale-py's threads."""
        self._envs.close()
        if self._camera is not None:
            self._camera.close()


class GymnasiumEnvironment:
    """Any other Gymnasium environment with discrete or vector actions. This process steps its copies one by one.

    A class that names its discrete actions does so in its `metadata`, as "action_names".
    """

    stacked_frames = 1
    frames_per_step = 1

    def __init__(self, config: EnvConfig, registered: EnvSpec, num_envs: int, *, render: bool):
        limit = min(registered.max_episode_steps or config.max_episode_frames, config.max_episode_frames)
        self._renders = render and "rgb_array" in _render_modes(registered)
        if render and not self._renders:
            logger.warning("%s: no pictures; its class, or the function that makes it, needs %s", config.env,
                           'metadata = {"render_modes": ["rgb_array"]}')  # fmt: skip
        mode: dict[str, Any] = {"render_mode": "rgb_array"} if self._renders else {}
        dropped: set[str] = set()
        self._envs = gymnasium.make_vec(
            registered.id,
            num_envs,
            vectorization_mode="sync",
            wrappers=[lambda env: _readable(env, config.env, dropped)],
            max_episode_steps=limit,
            **mode,
        )
        if dropped:
            logger.warning(
                "%s: observations without %s, which cannot be flattened", config.env, ", ".join(sorted(dropped))
            )
        actions = self._envs.single_action_space
        if refusal := _why_other_actions(actions):
            self._envs.close()
            raise ConfigError(f"environment {config.env!r} has actions {actions}; {refusal}")
        box = self._envs.single_observation_space
        self.frame_shape = tuple(box.shape or ())
        self.frame_dtype: Literal["uint8", "float32"] = "uint8" if box.dtype == np.uint8 else "float32"
        self.num_actions, self._first_action = 0, 0
        self.action_bounds: tuple[tuple[float, float], ...] = ()
        self.action_names: tuple[str, ...] = ()
        if isinstance(actions, gymnasium.spaces.Discrete):
            self.num_actions, self._first_action = int(actions.n), int(actions.start)
            self.action_names = tuple(map(str, self._envs.metadata.get("action_names", ())))
        elif isinstance(actions, gymnasium.spaces.Box):
            self.action_bounds = tuple(zip(actions.low.tolist(), actions.high.tolist(), strict=True))
        self._clip = config.clip_rewards == "yes"

    def reset(self, seed: int) -> np.ndarray:
        """Returns the first observations [E, *frame]."""
        observations, _ = self._envs.reset(seed=seed)
        self._reset_next = np.zeros(len(observations), bool)
        self._games = _GameBook(len(observations))
        return observations.astype(self.frame_dtype)

    def send(self, actions: np.ndarray) -> None:
        """Stores the actions [E] or [E, action size] with which `receive` steps."""
        if self.num_actions:
            self._actions = np.asarray(actions) + self._first_action
        else:
            low, high = np.array(self.action_bounds, np.float32).T
            self._actions = np.clip(np.asarray(actions, np.float32), low, high)

    def receive(self) -> TimeSteps:
        """Takes one step in every environment."""
        observations, rewards, terminated, truncated, _ = self._envs.step(self._actions)
        starts = self._reset_next
        ends = terminated | truncated
        self._reset_next = ends
        returns, steps = self._games.add(rewards, starts, ends)
        rewards = np.sign(rewards) if self._clip else rewards
        discounts = np.where(terminated, 0, 1).astype(np.float32)
        frames = observations.astype(self.frame_dtype)
        return TimeSteps(frames, rewards.astype(np.float32), discounts, starts, returns, steps)

    def render(self) -> np.ndarray | None:
        """Returns the picture of the first environment, None unless made with `render` and able to render."""
        if not self._renders:
            return None
        try:
            pictures: Any = self._envs.render()
            return pictures[0]
        except gymnasium.error.DependencyNotInstalled as error:
            logger.warning("no pictures of this environment: %s", error)
            self._renders = False
            return None

    def close(self) -> None:
        """Closes the environments."""
        self._envs.close()


def _readable(env: gymnasium.Env, name: str, dropped: set[str]) -> Any:
    """Wraps an environment so that discrete, tuple and dictionary observations are one vector (discrete: one-hot).

    Leaves out the keys of a dictionary that cannot be flattened, and adds them to `dropped`.

    Raises: ConfigError when nothing is left, or when a picture has its channels first.
    """
    space: Any = env.observation_space
    if isinstance(space, gymnasium.spaces.Box):
        if len(space.shape) == 3 and min(space.shape[1:]) >= max(SMALLEST_PICTURE, space.shape[0] + 1):
            raise ConfigError(
                f"environment {name!r} has observations {space.shape}, channels first: register it behind "
                "gymnasium.wrappers.TransformObservation with the function lambda o: numpy.moveaxis(o, 0, -1)"
            )
        return env
    if isinstance(space, gymnasium.spaces.Dict):
        dropped.update(key for key, of in space.items() if not _is_flattenable(of))
        kept = [key for key in space if key not in dropped]
        if kept and dropped:
            env = gymnasium.wrappers.FilterObservation(env, kept)
    if not _is_flattenable(env.observation_space):
        raise ConfigError(
            f"environment {name!r} has observations {space}, which cannot be flattened: "
            "register it behind a wrapper that makes them numbers"
        )
    return gymnasium.wrappers.FlattenObservation(env)


def _why_other_actions(actions: gymnasium.Space) -> str:
    """Returns why an action space is not supported, or an empty string."""
    if isinstance(actions, gymnasium.spaces.Discrete):
        return ""
    if not isinstance(actions, gymnasium.spaces.Box) or not np.issubdtype(actions.dtype, np.floating):
        return "supported are Discrete, and Box of floats: register it behind a wrapper that makes it one of these"
    if len(actions.shape) != 1 or not 1 <= actions.shape[0] <= MAX_ACTION_SIZE:
        return (
            f"a Box needs one dimension of 1 to {MAX_ACTION_SIZE} numbers: "
            "register it behind a gymnasium.wrappers.TransformAction that reshapes them"
        )
    if not (np.isfinite(actions.low).all() and np.isfinite(actions.high).all() and (actions.low < actions.high).all()):
        return (
            "a Box needs finite bounds, the least below the greatest: "
            "register it behind gymnasium.wrappers.TransformAction with a bounded action_space"
        )
    return ""


def _is_flattenable(space: gymnasium.Space) -> bool:
    try:
        return isinstance(gymnasium.spaces.flatten_space(space), gymnasium.spaces.Box)
    except NotImplementedError:  # a space that gymnasium does not know
        return False


def _check_atari(env: str, kwargs: dict) -> None:
    """Raises ConfigError when an id asks for settings that DQN's preprocessing does not have."""
    others = sorted(kwargs.keys() - ATARI_KWARGS)
    if others:
        raise ConfigError(f"environment {env!r} is registered with {', '.join(others)}: register it without")
    frameskip = kwargs.get("frameskip", ATARI_FRAMES_PER_STEP)
    if frameskip not in FRAMESKIPS:
        same = [
            spec.id
            for spec in gymnasium.registry.values()
            if spec.kwargs.get("game") == kwargs["game"] and spec.kwargs.get("frameskip") in FRAMESKIPS
        ]
        raise ConfigError(f"environment {env!r} has frameskip {frameskip}, games are played with 4: "
                          f"say {' or '.join(sorted(same))}")  # fmt: skip


def _reason(error: BaseException) -> str:
    """Returns an error of foreign code as one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _render_modes(registered: EnvSpec) -> list[str]:
    """Returns the render modes that an environment declares, without making one."""
    entry = registered.entry_point
    creator = gymnasium.envs.registration.load_env_creator(entry) if isinstance(entry, str) else entry
    return list((getattr(creator, "metadata", None) or {}).get("render_modes") or [])


def _registered(env: str) -> EnvSpec:
    """Returns gymnasium's registry entry of an id. `module:Id` first imports the module that registers it.

    Raises: ConfigError when there is no such entry.
    """
    module, _, name = env.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
        return gymnasium.spec(name)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"unknown environment {env!r} ({_reason(error)}); "
            "for Atari say e.g. BreakoutNoFrameskip-v4 or ALE/Breakout-v5"
        ) from error
