"""One environment as an agent sees it: with pictures, or with vectors of numbers."""

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Text, Tuple

from apexrl.config.sections import EnvConfig
from apexrl.environments.fitting import checked
from apexrl.environments.masks import MaskLast
from apexrl.errors import ConfigError

SMALLEST_PICTURE = 16  # pixels; before two sides of at least so many, a shorter first dimension counts as channels
TO_VECTOR = "give a --wrapper module:name that makes them numbers"


def presented(env: Any, config: EnvConfig, notes: set[str]) -> Any:
    """Returns an environment whose observations are a picture with its channels last, or a vector of numbers.

    Discrete, tuple and dictionary observations become one vector (discrete: one-hot), without the keys of a dictionary
    that cannot be flattened. A mask of the actions is the end of the vector.

    Args:
      notes: gets a line about each change that the user may not expect.
    Raises: ConfigError when the observations cannot be presented as the configuration says. The environment raises
      UnfitError when an observation is not of its space.
    """
    env = checked(env)
    if isinstance(env.observation_space, Box) and not config.action_mask:
        return _picture(env, config, notes)
    if flags := _picture_flags(config):
        raise ConfigError(f"{flags}: these are for pictures, and {config.env} has observations {env.observation_space}")
    if isinstance(env.observation_space, Dict):
        kept = [key for key, space in env.observation_space.items() if _is_flattenable(space)]
        dropped = sorted(map(str, set(env.observation_space) - set(kept)))
        if kept and dropped:
            notes.add(f"observations without {', '.join(dropped)}, which cannot be flattened")
            shown = Dict({key: env.observation_space[key] for key in kept})  # keys that are no words, too
            env = gymnasium.wrappers.TransformObservation(env, lambda seen: {key: seen[key] for key in kept}, shown)
        if pictures := [str(key) for key in kept if _is_picture(env.observation_space[key])]:
            alone = "a --wrapper that shows it alone keeps it a picture, and a --network sees both"
            notes.add(f"{' and '.join(pictures)} becomes part of a vector; {alone}")
    if config.action_mask:
        env = MaskLast(env, config)
    if not _is_flattenable(env.observation_space):
        raise ConfigError(
            f"environment {config.env!r} has observations {env.observation_space}, which cannot be flattened: "
            f"{TO_VECTOR}"
        )
    return gymnasium.wrappers.FlattenObservation(env)


def parts_of(env: gymnasium.Env) -> tuple[str, ...]:
    """Returns the parts NAME=SHAPE of the vector that `presented` has made of a dictionary; none of anything else."""
    inner = env.env.observation_space if isinstance(env, gymnasium.wrappers.FlattenObservation) else None
    if not isinstance(inner, Dict):
        return ()
    flat = gymnasium.spaces.flatdim
    shapes = {key: (isinstance(space, Box) and space.shape) or (flat(space),) for key, space in inner.items()}
    return tuple(f"{key}={'x'.join(map(str, shape))}" for key, shape in shapes.items())


def presenter(env: gymnasium.Env, config: EnvConfig) -> tuple[Box, Callable[[Any], np.ndarray]]:
    """Returns the space of the frames that an agent sees, and what makes a frame of an observation.

    Raises: ConfigError when the observations cannot be presented as the configuration says.
    """
    outermost = presented(env, config, set())
    space, layers, layer = outermost.observation_space, list[Any](), outermost
    while layer is not env:  # these are ours: an observation alone says what becomes of it
        layers.insert(0, layer)
        layer = layer.env

    def present(observation: Any) -> np.ndarray:
        for layer in layers:
            observation = layer.observation(observation)
        return np.asarray(observation, np.uint8 if space.dtype == np.uint8 else np.float32)

    return space, present


def _picture(env: Any, config: EnvConfig, notes: set[str]) -> Any:
    """Returns an environment of boxes, whose pictures have their channels last, and are gray and scaled if wanted."""
    space = env.observation_space
    if len(space.shape) == 3 and min(space.shape[1:]) >= max(SMALLEST_PICTURE, space.shape[0] + 1):
        low, high = (np.moveaxis(bound, 0, -1) for bound in (space.low, space.high))
        turned = Box(low, high, dtype=space.dtype)
        notes.add(f"observations {space.shape} have their channels first, and are turned to {turned.shape}")
        env = gymnasium.wrappers.TransformObservation(env, lambda picture: np.moveaxis(picture, 0, -1), turned)
        space = turned
    flags = _picture_flags(config)
    if flags and not (
        space.dtype == np.uint8 and len(space.shape) in (2, 3) and (space.low == 0).all() and (space.high == 255).all()
    ):
        raise ConfigError(f"{flags}: these are for pictures of bytes from 0 to 255, and {config.env} has {space}")
    if config.grayscale:
        if space.shape[2:] != (3,):
            raise ConfigError(f"--grayscale: this is for pictures with 3 channels, and {config.env} has {space}")
        env = gymnasium.wrappers.GrayscaleObservation(env)
    if config.resize:
        if len(config.resize) > 2:
            raise ConfigError(f"--resize {' '.join(map(str, config.resize))}: give one side, or height and width")
        size = config.resize[0], config.resize[-1]
        env = gymnasium.wrappers.ResizeObservation(env, size)
        if space.shape[2:] == (1,):  # OpenCV leaves the only channel out, and older versions of gymnasium take that
            box = Box(0, 255, (*size, 1), np.uint8)
            env = gymnasium.wrappers.TransformObservation(env, lambda picture: picture.reshape(box.shape), box)
    return env


def _picture_flags(config: EnvConfig) -> str:
    given = {"--grayscale": config.grayscale, "--resize": config.resize}
    return " and ".join(flag for flag, value in given.items() if value)


def _is_picture(space: gymnasium.Space) -> bool:
    sides = sorted(space.shape or ())
    return len(sides) in (2, 3) and sides[-2] >= SMALLEST_PICTURE


def _is_flattenable(space: gymnasium.Space) -> bool:
    """Whether a space becomes a vector of numbers. The numbers of characters say nothing, so text does not."""
    if isinstance(space, Dict):
        return all(map(_is_flattenable, space.values()))
    if isinstance(space, Tuple):
        return all(map(_is_flattenable, space))
    if isinstance(space, Text):
        return False
    try:
        return isinstance(gymnasium.spaces.flatten_space(space), Box)
    except NotImplementedError:  # a space that gymnasium does not know
        return False
