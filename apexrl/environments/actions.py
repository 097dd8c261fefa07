"""The actions of an agent, as environments take them and the log holds them."""

import math
from collections.abc import Iterable
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete

from apexrl.bounds import Bounds, clipped, needed_of
from apexrl.casts import exactly
from apexrl.errors import ApexError, ConfigError
from apexrl.types import MAX_ACTION_SIZE

MAX_JOINT_ACTIONS = 128  # of several discrete numbers
MANY_DIGITS = 18  # of a number that is not written out


class Actions:
    """The actions of one environment as agents have them: a number each, or a vector of floats within bounds.

    Several discrete numbers are one, the place of their combination in a table of all: the last number changes first.
    """

    def __init__(self, env: str, space: gymnasium.Space, names: Iterable[Any] = ()):
        """Takes the space of an environment's actions.

        Args:
          names: of discrete actions; those of other actions than these are left out.
        Raises: ConfigError when the space is not supported.
        """
        if refusal := _why_others(space):
            raise ConfigError(f"environment {env!r} has actions {space}; {refusal}")
        self.space = space
        self.bounds: Bounds = ()  # of each number of a vector
        self.num = 0  # of discrete ones
        match space:
            case Box():
                self.bounds = _bounds(space)
            case Discrete():
                self.num = int(space.n)
            case MultiDiscrete() | MultiBinary():
                choices, first = _choices(space), getattr(space, "start", 0)
                self.num = math.prod(choices.ravel().tolist())
                places = np.unravel_index(np.arange(self.num), choices.ravel())
                self._table = (np.stack(places, axis=1).reshape(-1, *choices.shape) + first).astype(space.dtype)
        given = tuple(map(str, names))
        self.names = given if len(given) == self.num else ()

    def taken(self, actions: np.ndarray) -> np.ndarray:
        """Returns actions [E] or [E, action size] as the environment's own step takes them; a copy.

        Numbers of a vector are cut to the space's own bounds: those of float64 lie between two of float32.
        """
        match self.space:
            case Box():
                shaped = actions.reshape(len(actions), *self.space.shape).astype(self.space.dtype)
                return shaped.clip(self.space.low, self.space.high)
            case Discrete():
                return actions.astype(self.space.dtype) + int(self.space.start)
        return self._table[actions]

    def rounded(self, actions: np.ndarray) -> np.ndarray:
        """Returns actions [E] or [E, action size] with the precision of the environment's own: float16 has less."""
        return actions.astype(self.space.dtype).astype(np.float32) if self.space.dtype == np.float16 else actions

    def had(self, actions: np.ndarray) -> np.ndarray:
        """Returns N actions of the environment's own step as agents have them: [N] int32, or [N, size] float32.

        Raises: ValueError when they are none of its space.
        """
        array = np.asarray(actions).reshape(len(actions), *(self.space.shape or ()))
        match self.space:
            case Box():
                return clipped(exactly(array.reshape(len(array), -1), np.float32), self.bounds)
            case MultiDiscrete() | MultiBinary():
                places = exactly(array - getattr(self.space, "start", 0), np.int64).reshape(len(array), -1)
                table = tuple(_choices(self.space).ravel())
                return np.ravel_multi_index(tuple(places.T), table).astype(np.int32)
        return exactly(array - int(getattr(self.space, "start", 0)), np.int32)


def _choices(space: MultiDiscrete | MultiBinary) -> np.ndarray:
    """Returns how many values each of several discrete numbers has."""
    return space.nvec if isinstance(space, MultiDiscrete) else np.full(space.shape, 2)


def _why_others(space: gymnasium.Space) -> str:
    """Returns why an action space is not supported, or an empty string."""
    if isinstance(space, Discrete):
        return ""
    if isinstance(space, MultiDiscrete | MultiBinary):
        if not _choices(space).size:
            return "these are no numbers at all: give a --wrapper module:name with actions to choose from"
        digits = float(np.log10(_choices(space)).sum())
        if digits < MANY_DIGITS and (num := math.prod(_choices(space).ravel().tolist())) <= MAX_JOINT_ACTIONS:
            return ""
        count = f"{num:,}" if digits < MANY_DIGITS else f"more than 10**{math.ceil(digits) - 1}"
        return (
            f"these have {count} combinations, and {MAX_JOINT_ACTIONS} are the most that become one number: "
            "give a --wrapper module:name with a gymnasium.wrappers.TransformAction that offers fewer"
        )
    if not isinstance(space, Box) or not np.issubdtype(space.dtype, np.floating):
        return (
            "supported are Discrete, MultiDiscrete, MultiBinary, and Box of floats: give a --wrapper module:name that "
            "makes it one of these"
        )
    if not 1 <= math.prod(space.shape) <= MAX_ACTION_SIZE:
        return (
            f"a Box needs 1 to {MAX_ACTION_SIZE} numbers: "
            "give a --wrapper module:name with a gymnasium.wrappers.TransformAction that has fewer"
        )
    if needed := needed_of(_bounds(space)):
        return (
            f"a Box needs {needed}: "
            "give a --wrapper module:name with a gymnasium.wrappers.TransformAction that has such an action_space"
        )
    return ""


def _bounds(space: Box) -> Bounds:
    return tuple(zip(space.low.ravel().tolist(), space.high.ravel().tolist(), strict=True))


def taken(actions: Any, steps: np.ndarray, num_actions: int, bounds: Bounds) -> np.ndarray:
    """Returns actions as environments take them: [E] int32, or [E, action size] float32 within their bounds.

    Args:
      steps: [E] steps of the current episodes, for the message.
      num_actions: of a discrete space; 0 where an action is a vector of numbers, which is clipped to its bounds.
    Raises: ApexError when actions have another shape or kind, are beyond a discrete space, or not finite.
    """
    given = np.asarray(actions)
    shape = (len(steps),) if num_actions else (len(steps), len(bounds))
    if given.shape != shape:
        raise ApexError(f"the agent gives actions of shape {given.shape}, not {shape}")
    if given.dtype.kind not in ("biu" if num_actions else "biuf"):
        needed = f"whole numbers from 0 to {num_actions - 1}" if num_actions else "numbers"
        raise ApexError(f"the agent gives actions of {given.dtype}, such as {given[0]}: {needed} are needed")
    if num_actions:
        sound, needed = (given >= 0) & (given < num_actions), f"whole numbers from 0 to {num_actions - 1}"
    else:
        sound, needed = np.isfinite(given).all(axis=1), "finite numbers"
    if not sound.all():
        wrong = int(np.flatnonzero(~sound)[0])
        raise ApexError(f"the agent gives the action {given[wrong]} in step {steps[wrong] + 1} of an episode: "
                        f"{needed} are needed")  # fmt: skip
    return given.astype(np.int32) if num_actions else clipped(given, bounds)
