"""Observations, rewards and flags of an environment, as its spaces declare them: all else is refused by name.

Flattening and batching cast without a word: 0.99 becomes 0, 300 becomes 44, and the place -1 the last one.
"""

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from apexrl.casts import exactly

MAX_WHOLE = 2**63  # of a reward that Python knows exactly; NumPy takes it for no number beyond


class UnfitError(ValueError):
    """An environment gave something else than it declares."""

    def __init__(self, name: str, reason: str):
        super().__init__(f"a wrong {name}: {reason}")
        self.name = name
        self.reason = reason


def fitted(space: gymnasium.Space, value: Any, name: str = "observation") -> Any:
    """Returns an observation in the types and shapes of its space. Floats may lie beyond the bounds of a box.

    Raises: UnfitError when a number would become another one, or is none of a discrete space.
    """
    match space:
        case spaces.Box():
            if type(value) is np.ndarray and value.dtype == space.dtype and value.shape == space.shape:
                return value  # nearly always, in each step of each environment
            return _numbers(value, space.dtype, space.shape, name)
        case spaces.Discrete():
            if type(value) is int and space.start <= value < space.start + space.n:
                return value
            return int(_bounded(value, (), space.start, space.n, name))
        case spaces.MultiDiscrete():
            return _bounded(value, space.shape, space.start, space.nvec, name)
        case spaces.MultiBinary():
            return _bounded(value, space.shape, 0, 2, name)
        case spaces.Dict():
            if not isinstance(value, Mapping) or value.keys() != space.spaces.keys():
                found = f"the keys {[*value]}" if isinstance(value, Mapping) else f"a {type(value).__name__}"
                raise UnfitError(name, f"{found}, where the keys {[*space.spaces]} are needed")
            return {key: fitted(part, value[key], f"{name}[{key!r}]") for key, part in space.spaces.items()}
        case spaces.Tuple():
            parts = zip(space.spaces, _tuple(value, len(space.spaces), name), strict=True)
            return tuple(fitted(part, found, f"{name}[{i}]") for i, (part, found) in enumerate(parts))
        case spaces.OneOf():
            chosen, found = _tuple(value, 2, name)
            chosen = int(_bounded(chosen, (), 0, len(space.spaces), f"{name}[0]"))
            return chosen, fitted(space.spaces[chosen], found, f"{name}[1]")
        case _:  # one that cannot be flattened is left out
            return value


def reward_of(value: Any) -> float:
    """Returns a reward. Raises UnfitError when it is not one number."""
    if isinstance(value, float) or (type(value) is int and abs(value) < MAX_WHOLE):
        return value
    return float(_numbers(value, np.float64, (), "reward"))


def truth_of(value: Any, name: str) -> bool:
    """Returns whether an episode ended. Raises UnfitError when that is neither true nor false."""
    return value if type(value) is bool else bool(_numbers(value, np.bool_, (), name))


def _numbers(value: Any, dtype: Any, shape: tuple[int, ...], name: str) -> np.ndarray:
    try:
        return exactly(value, dtype, shape)
    except ValueError as error:  # also numpy's, about lists of different lengths
        raise UnfitError(name, str(error)) from error


def _bounded(value: Any, shape: tuple[int, ...], start: Any, count: Any, name: str) -> np.ndarray:
    """Returns whole numbers of [start, start + count)."""
    numbers = _numbers(value, np.int64, shape, name)
    outside = (numbers < start) | (numbers >= start + count)
    if outside.any():
        place = tuple(np.argwhere(outside)[0])
        least, counts = np.broadcast_to(start, shape)[place], np.broadcast_to(count, shape)[place]
        where = f" at {', '.join(map(str, place))}" if place else ""
        needed = f"whole numbers from {least} to {least + counts - 1} are needed"
        raise UnfitError(name, f"{numbers[place]}{where}, where {needed}")
    return numbers


def _tuple(value: Any, length: int, name: str) -> tuple[Any, ...]:
    if not isinstance(value, tuple | list) or len(value) != length:
        found = f"{len(value)} parts" if isinstance(value, tuple | list) else f"a {type(value).__name__}"
        raise UnfitError(name, f"{found}, where a tuple of {length} is needed")
    return tuple(value)


def checked(env: gymnasium.Env) -> gymnasium.Env:
    """Returns an environment that raises UnfitError where an observation is not of its space."""
    space = env.observation_space
    return gymnasium.wrappers.TransformObservation(env, lambda observation: fitted(space, observation), space)
