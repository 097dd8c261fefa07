"""Atari games with DQN's preprocessing. Only this module and `atari_modes` know ale_py."""

import dataclasses
import json
from typing import Any

import ale_py
import gymnasium
import numpy as np
from ale_py.vector_env import AtariVectorEnv
from gymnasium.envs.registration import EnvSpec

from apexrl.config.sections import EnvConfig
from apexrl.environments.actions import taken
from apexrl.environments.game_book import GameBook
from apexrl.errors import ConfigError
from apexrl.types import EnvironmentSpec, TimeSteps

FRAMES_PER_STEP = 4
STACKED_FRAMES = 4
FRAME_SHAPE = (84, 84)
SCREEN = (210, 160)
REGISTERED_KWARGS = {
    *("game", "frameskip", "repeat_action_probability", "full_action_space", "max_num_frames_per_episode"),
    *("mode", "difficulty"),
}
# Those that --env-kwargs may hold:
OWN_KWARGS = ("mode", "difficulty", "full_action_space", "repeat_action_probability")
FRAMESKIPS = (1, 4)  # ids registered with either are played with 4: DQN's skip, which v5 ids register

gymnasium.register_envs(ale_py)


class AtariEnvironment:
    """ale-py's C++ vector environment with DQN's preprocessing: 84x84 gray, skip 4, max of 2 frames.

    It avoids three settings of ale-py:
      episodic_life    resets the game at a lost life, so that the later lives are never played
      life_loss_info   reports a lost life like the game's end, and hides a truncation
      reward_clipping  hides the score
    """

    pictures_per_second = 60 / FRAMES_PER_STEP

    def __init__(
        self, config: EnvConfig, registered: EnvSpec, num_envs: int, *, evaluate: bool, num_threads: int, render: bool
    ):
        kwargs = _settings(config, registered)
        options: dict[str, Any] = {
            "max_num_frames_per_episode": config.max_episode_frames,
            "repeat_action_probability": kwargs.get("repeat_action_probability", 0.0),
            "full_action_space": kwargs.get("full_action_space", False),
            "noop_max": config.noop_max,
            "use_fire_reset": config.fire_at_reset,
        }
        self._envs = _games(kwargs, num_envs, num_threads, options)
        # ale-py's vector environment cannot render, so a second one plays the same game, seed and actions in colour.
        height, width = SCREEN
        picture: dict[str, Any] = {"img_height": height, "img_width": width, "grayscale": False}
        self._camera = _games(kwargs, 1, 1, options | picture) if render else None
        self._picture: np.ndarray | None = None
        names = tuple(action.name.lower() for action in self._envs.ale.get_action_set())
        self.spec = EnvironmentSpec(
            config.env, FRAME_SHAPE, "uint8", config.frame_stack or STACKED_FRAMES, len(names), FRAMES_PER_STEP,
            action_names=names, variant=config.variant,
        )  # fmt: skip
        self._clip = config.clip_rewards != "no"
        self._life_loss_terminal = config.life_loss_terminal and not evaluate

    def reset(self, seed: int) -> np.ndarray:
        """Returns the first frames [E, 84, 84]."""
        observations, info = self._envs.reset(seed=seed)
        self._lives = info["lives"]
        self._games = GameBook(len(observations))
        if self._camera is not None:
            self._picture = self._camera.reset(seed=seed)[0][0, -1]
        return observations[:, -1]

    def send(self, actions: np.ndarray) -> np.ndarray:
        """Begins one step with actions [E], which it returns; ale-py's threads play it in the background."""
        own = taken(actions, self._games.steps, self.spec.num_actions, self.spec.action_bounds)
        self._envs.send(own)
        if self._camera is not None:
            self._camera.send(own[:1])
        return own

    def receive(self) -> TimeSteps:
        """Waits for the step that `send` began, and returns it."""
        observations, rewards, terminated, truncated, info = self._envs.recv()
        if self._camera is not None:
            self._picture = self._camera.recv()[0][0, -1]
        starts = self._games.starts
        lost = ~starts & (info["lives"] > 0) & (info["lives"] < self._lives)
        self._lives = info["lives"]
        returns, steps = self._games.add(rewards, terminated | truncated)
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


class AtariGame(gymnasium.Env):
    """One game of `AtariEnvironment` as gymnasium has environments: its frames, whole games, the game's own rewards."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": int(60 / FRAMES_PER_STEP)}  # noqa: RUF012 - as there

    def __init__(self, config: EnvConfig, registered: EnvSpec, render_mode: str | None):
        if render_mode not in (None, "rgb_array"):
            raise ConfigError(f"render_mode {render_mode!r}: a game of Atari has rgb_array")
        self.render_mode, renders = render_mode, render_mode is not None
        config = dataclasses.replace(config, clip_rewards="no")
        self._envs = AtariEnvironment(config, registered, 1, evaluate=True, num_threads=1, render=renders)
        self.observation_space = gymnasium.spaces.Box(0, 255, FRAME_SHAPE, np.uint8)
        self.action_space = gymnasium.spaces.Discrete(self._envs.spec.num_actions)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        """Begins a game; returns its first frame [84, 84]."""
        super().reset(seed=seed)
        seed = int(self.np_random.integers(2**31)) if seed is None else seed % 2**31
        return self._envs.reset(seed)[0], {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Takes a step of four emulator frames."""
        self._envs.send(np.array([action]))
        seen = self._envs.receive()
        ends, terminated = bool(seen.episode_steps[0]), not seen.discounts[0]
        return seen.frames[0], float(seen.rewards[0]), terminated, ends and not terminated, {}

    def render(self) -> Any:
        """Returns the screen [210, 160, 3], None unless made with a `render_mode`."""
        return self._envs.render()

    def close(self) -> None:
        """Stops ale-py's threads."""
        self._envs.close()


def _games(kwargs: dict[str, Any], num_envs: int, num_threads: int, options: dict[str, Any]) -> Any:
    """Returns games of ale-py's vector environment, which has neither modes nor difficulties, or those that have."""
    game, chosen = kwargs["game"], {name: kwargs.get(name) for name in ("mode", "difficulty")}
    if chosen == {"mode": None, "difficulty": None}:
        return AtariVectorEnv(game, num_envs, num_threads=num_threads, reward_clipping=False, stack_num=1, **options)
    from apexrl.environments.atari_modes import ModeGames  # noqa: PLC0415 - loads OpenCV

    return ModeGames(game, num_envs, **chosen, **options)


def _settings(config: EnvConfig, registered: EnvSpec) -> dict[str, Any]:
    """Returns the arguments of a game: those of its id, and --env-kwargs.

    Raises: ConfigError when they ask for something that DQN's preprocessing does not have.
    """
    presented = {"--wrapper": config.wrapper, "--grayscale": config.grayscale, "--resize": config.resize,
                 "--action-mask": config.action_mask}  # fmt: skip
    if given := [flag for flag, value in presented.items() if value]:
        raise ConfigError(
            f"{' and '.join(given)}: games of Atari keep DQN's preprocessing (84x84, gray), so leave that out"
        )
    if unknown := sorted(config.kwargs.keys() - OWN_KWARGS):
        seen = "; agents see its screen, never its RAM" if "obs_type" in unknown else ""
        raise ConfigError(
            f"--env-kwargs: a game of Atari takes {', '.join(OWN_KWARGS)}, and not {', '.join(unknown)}{seen}"
        )
    env, kwargs = config.env, registered.kwargs
    if others := sorted(kwargs.keys() - REGISTERED_KWARGS):
        raise ConfigError(f"environment {env!r} is registered with {', '.join(others)}: register it without")
    frameskip = kwargs.get("frameskip", FRAMES_PER_STEP)
    if frameskip not in FRAMESKIPS:
        same = [spec.id for spec in gymnasium.registry.values() if spec.kwargs.get("game") == kwargs["game"]]
        raise ConfigError(f"environment {env!r} has frameskip {frameskip}, games are played with 4: "
                          f"say {' or '.join(sorted(filter(has_usual_frameskip, same)))}")  # fmt: skip
    kwargs = kwargs | config.kwargs
    if config.repeat_action_probability:
        if "repeat_action_probability" in config.kwargs:
            raise ConfigError("--repeat-action-probability and --env-kwargs both say it: leave it out of one")
        kwargs["repeat_action_probability"] = config.repeat_action_probability
    chance, is_full = kwargs.get("repeat_action_probability", 0.0), kwargs.get("full_action_space", False)
    if type(chance) not in (int, float) or not 0 <= chance <= 0.99:  # with 1 no action of ours would ever count
        told = json.dumps(chance)
        raise ConfigError(f"--env-kwargs: repeat_action_probability is {told}, and not a number from 0 to 0.99")
    if type(is_full) is not bool:
        raise ConfigError(f"--env-kwargs: full_action_space is {json.dumps(is_full)}, and not true or false")
    return kwargs


def is_atari(registered: EnvSpec) -> bool:
    """Returns whether an id is that of an Atari game."""
    entry = registered.entry_point
    module = entry if isinstance(entry, str) else getattr(entry, "__module__", "")
    return "game" in registered.kwargs and module.startswith("ale_py")


def has_usual_frameskip(env: str) -> bool:
    """Returns whether a registered id is played with a frameskip that we have; all but Atari's are."""
    registered = gymnasium.registry[env]
    return not is_atari(registered) or registered.kwargs.get("frameskip", FRAMES_PER_STEP) in FRAMESKIPS
