"""Environments that are hard to play, or that cannot be played: `tests.environments.odd_envs:ID`."""

import os
import pathlib
import signal
import subprocess
import time
import typing
from functools import partial

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, OneOf, Text, Tuple

from apexrl.environments.catch import Catch


class Words(gymnasium.Space):
    """A space that gymnasium does not know, as MiniGrid has one."""

    def __init__(self):
        super().__init__(dtype=str)

    def sample(self, mask=None, probability=None):
        return "open the red door"

    def contains(self, x):
        return isinstance(x, str)


class Odd(gymnasium.Env):
    """Gives one observation for ever."""

    def __init__(self, space, observation=None):
        self.observation_space, self.action_space = space, Discrete(2)
        self._observation = space.sample() if observation is None else observation

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._observation, {}

    def step(self, action):
        return self._observation, 0.0, False, False, {}


class Actions(gymnasium.Env):
    """Shows its last action."""

    observation_space = Box(-np.inf, np.inf, (2,), np.float32)

    def __init__(self, space):
        self.action_space = space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.asarray(action, np.float32), 0.0, False, False, {}


class Steered(Odd):
    """Pictures, whose actions are vectors."""

    def __init__(self):
        super().__init__(Box(0, 255, (40, 40, 3), np.uint8))
        self.action_space = Box(-1, 1, (2,), np.float32)


class Overwriting(gymnasium.Wrapper):
    """A wrapper that changes its action in place."""

    def step(self, action):
        result = super().step(action.copy())
        action[:] = 99
        return result


def make_mission(direction=2):
    space = Dict({"image": Box(0, 10, (2, 2, 3), np.uint8), "direction": Discrete(4), "mission": Words()})
    observation = {"image": np.full((2, 2, 3), 7, np.uint8), "direction": direction, "mission": "open the red door"}
    return Odd(space, observation)


class Given(Odd):
    """Gives an observation and a reward that its arguments choose, or hangs, from its third step on or a later one."""

    def __init__(self, observation=0.5, reward=1.0, hangs=False, sound_steps=2, dtype="float64"):
        super().__init__(Box(-np.inf, np.inf, (2,), np.dtype(dtype)), np.zeros(2, dtype))
        self._given = np.array([0, observation]).astype(dtype), float(reward)
        self._hangs, self._steps, self._sound_steps = hangs, 0, sound_steps

    def step(self, action):
        self._steps += 1
        if self._steps <= self._sound_steps:
            return self._observation, 0.0, False, False, {}
        while self._hangs:
            time.sleep(0.01)
        return *self._given, False, False, {}


class Slow(Odd):
    """Takes its time to be made."""

    def __init__(self, seconds):
        super().__init__(Box(0, 1, (2,), np.float32))
        time.sleep(seconds)


class Dying(Odd):
    """Ends its process: when it is made, by a signal; in its reset; or in its fifth step, by a signal.

    It has a simulator in a session of its own, which it never ends, where there is a file to write its number to.
    """

    def __init__(self, at, simulator=""):
        super().__init__(Box(0, 1, (2,), np.float32))
        self._at, self._steps = at, 0
        if simulator:
            pathlib.Path(simulator).write_text(str(subprocess.Popen(["sleep", "600"], start_new_session=True).pid))
        if at == "make":
            os.kill(os.getpid(), signal.SIGSEGV)

    def reset(self, *, seed=None, options=None):
        if self._at == "reset":
            os._exit(3)
        return super().reset(seed=seed)

    def step(self, action):
        self._steps += 1
        if self._at == "step" and self._steps == 5:
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().step(action)


class Painted(Odd):
    """Shows a picture whose colours tell its channels apart, and its rows from its columns."""

    def __init__(self, channels=3, height=48, width=40, is_first=False, dtype="uint8"):
        picture = np.zeros((height, width, channels), dtype)
        picture[:, :, 0], picture[: height // 2, :, 1], picture[:, : width // 2, 2] = 10, 100, 200
        picture = np.moveaxis(picture, -1, 0) if is_first else picture
        super().__init__(Box(0, 255, picture.shape, dtype), picture)


class Informed(Odd):
    """Gives infos whose types and shapes change, in each copy at another time."""

    def __init__(self):
        super().__init__(Box(0, 1, (2,), np.float32), np.zeros(2, np.float32))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._end, self._steps = 1 + int(self.np_random.integers(5)), 0
        return self._observation, {"winner": None, "path": np.zeros(self._end)}

    def step(self, action):
        self._steps += 1
        ends = self._steps == self._end
        infos = {"winner": 1 if ends else None, "path": np.zeros(self._steps)}
        return self._observation, 1.0, ends, False, infos


class Filmed(Odd):
    """Fails where its pictures are wanted: when it is made, in `render`, or by pictures that are none."""

    metadata: typing.ClassVar = {"render_modes": ["rgb_array"]}

    def __init__(self, pictures, render_mode=None):
        super().__init__(Box(0, 1, (2,), np.float32), np.zeros(2, np.float32))
        if render_mode and pictures == "no screen":
            raise RuntimeError("failed to create a GL context")
        self.render_mode, self._pictures = render_mode, pictures

    def render(self):
        if self._pictures == "no display":
            raise RuntimeError("failed to open display")
        return "text" if self._pictures == "letters" else np.zeros((4, 4), np.float32)


class Single(Odd):
    """Owns a file, as a simulator owns a port: two at a time cannot be."""

    def __init__(self, path):
        super().__init__(Box(-1, 1, (2,)), np.zeros(2, np.float32))
        self.path = pathlib.Path(path)
        self.path.touch(exist_ok=False)

    def close(self):
        self.path.unlink()


class Forgetful(gymnasium.Wrapper):
    """Counts episodes, and tells their number."""

    def reset(self, **named):
        self.count = getattr(self, "count", -1) + 1
        observation, info = self.env.reset(**named)
        return np.full_like(observation, self.count / 10), info


def in_a_dictionary(env):
    """A wrapper that puts an observation into a dictionary, beside words."""
    space = Dict({"picture": env.observation_space, "words": Words()})
    return gymnasium.wrappers.TransformObservation(env, lambda seen: {"picture": seen, "words": "look"}, space)


def only_the_picture(env):
    """A wrapper that takes it out again."""
    return gymnasium.wrappers.TransformObservation(env, lambda seen: seen["picture"], env.observation_space["picture"])


def only_the_green(env):
    """A wrapper that leaves one channel of a picture."""
    box = Box(0, 255, (*env.observation_space.shape[:2], 1), np.uint8)
    return gymnasium.wrappers.TransformObservation(env, lambda seen: seen[:, :, 1:2], box)


def without_the_last_action(env):
    """A wrapper with fewer actions than the environment names."""
    return gymnasium.wrappers.TransformAction(env, lambda action: action, Discrete(int(env.action_space.n) - 1))


def unchanged(env):
    """A wrapper that does nothing."""
    return gymnasium.Wrapper(env)


def no_environment(env):
    """Returns no environment."""
    return env.observation_space


def make_without(module, extra):
    message = f'{module} is not installed, run `pip install "gymnasium[{extra}]"`'
    raise gymnasium.error.DependencyNotInstalled(message) from ModuleNotFoundError(name=module)


def make_failing():
    raise ZeroDivisionError("the board has no fields,\nso it is not one")


def make_game(game, render_mode=None):
    return Odd(Box(0, 255, (10, 10, 4), np.uint8))


def make_catch(render_mode=None):
    return Catch(render_mode=render_mode)


def make_catch_with_pictures(render_mode=None):
    return Catch(render_mode=render_mode)


make_catch_with_pictures.metadata = {"render_modes": ["rgb_array"]}

SPACES = {
    "Words-v0": Words(),
    "Words-in-dict-v0": Dict({"mission": Words()}),
    "Channels-last-v0": Box(0, 255, (96, 96, 3), np.uint8),
    "Board-v0": Box(0, 1, (8, 8, 111), np.uint8),
    "Untrue-bytes-v0": Box(0, 1, (2,), np.uint8),
    "Untrue-integers-v0": Box(0, 5, (2,), np.int64),
    "Scalar-in-dict-v0": Dict({"a": Box(-1, 1, (1,)), "k": Discrete(3)}),
    "Text-first-v0": Dict({"a": Text(5), "b": Box(-1, 1, (2,))}),
    "One-of-v0": OneOf([Discrete(2), Box(-1, 1, (3,))]),
    "Numbered-keys-v0": Dict({1: Box(-1, 1, (2,)), 2: Text(3), 3: Box(0, 255, (20, 20, 3), np.uint8)}),
    "Four-dimensions-v0": Box(0, 1, (2, 2, 2, 2)),
    "Text-in-dict-v0": Dict({"a": Box(0, 1, (2,)), "t": Text(5), "both": Tuple((Text(5), Discrete(2)))}),
}
ACTIONS = {
    "Vector-actions-v0": Box(np.array([-1, 2], np.float32), np.array([0, 5], np.float32)),
    "Unbounded-actions-v0": Box(-np.inf, 1, (2,), np.float32),
    "Matrix-actions-v0": Box(-1, 1, (2, 2), np.float32),
    "Integer-actions-v0": Box(0, 3, (2,), np.int32),
    "Many-actions-v0": MultiDiscrete([2, 3]),
    "Steps-v0": MultiDiscrete([3, 2], start=[-1, 1]),
    "Shifted-v0": Discrete(3, start=-1),
    "Halves-v0": Box(-3, 3, (2,), np.float16),
    "Six-v0": Box(-0.1, 0.1, (2, 3), np.float64),
    "Few-switches-v0": MultiBinary(3),
    "Switches-v0": MultiBinary((3, 4)),
}
ENTRY_POINTS = {
    "Single-v0": Single,
    "Mission-v0": make_mission,
    "Fails-v0": make_failing,
    "Without-box2d-v0": partial(make_without, "Box2D", "box2d"),
    "Without-jax-v0": partial(make_without, "jax", "jax"),
    "Given-v0": Given,
    "Slow-v0": Slow,
    "Steered-v0": Steered,
    "Dying-v0": Dying,
    "Informed-v0": Informed,
    "Painted-v0": Painted,
    "Versioned-v0": Painted,
    "Versioned-v1": Painted,
    "Nowhere-v0": "no_such_module:Env",
    "Function-v0": make_catch,
    "Function-with-pictures-v0": make_catch_with_pictures,
}
ATARI = {
    "Pong-skip-5-v0": {"game": "pong", "frameskip": 5},
    "Pong-mode-1-v0": {"game": "pong", "frameskip": 4, "mode": 1},
    "Pong-ram-v0": {"game": "pong", "frameskip": 4, "obs_type": "ram"},
    "Pong-all-actions-v0": {"game": "pong", "frameskip": 4, "full_action_space": True},
    "NoSuchRom-v0": {"game": "no_such_rom", "frameskip": 4},
}
for name, entry_point in ENTRY_POINTS.items():
    gymnasium.register(name, entry_point=entry_point, disable_env_checker=True)
for name, space in SPACES.items():
    gymnasium.register(name, entry_point=Odd, kwargs={"space": space}, disable_env_checker=True)
for name, space in ACTIONS.items():
    gymnasium.register(name, entry_point=Actions, kwargs={"space": space}, disable_env_checker=True)
for pictures in ("no screen", "no display", "letters", "gray"):
    name = f"Filmed-{pictures.replace(' ', '-')}-v0"
    gymnasium.register(name, entry_point=Filmed, kwargs={"pictures": pictures}, disable_env_checker=True)
gymnasium.register("Chess-v0", entry_point=make_game, kwargs={"game": "chess"}, disable_env_checker=True)
for name, kwargs in ATARI.items():
    gymnasium.register(name, entry_point="ale_py.env:AtariEnv", kwargs=kwargs)
