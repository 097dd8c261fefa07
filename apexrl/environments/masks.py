"""Masks of actions: which of them an environment allows now. Agents find the mask at the end of each observation.

`--action-mask` names it: a key of observations that are dictionaries, or a key of the `info` beside them.
"""

from collections import OrderedDict
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, MultiBinary

from apexrl.config.sections import EnvConfig
from apexrl.environments.actions import Actions
from apexrl.environments.fitting import UnfitError, fitted
from apexrl.errors import ConfigError

INFO = "info:"  # begins an --action-mask that is a key of the info


class MaskOfInfo(gymnasium.Wrapper):
    """Puts the mask of the info into the observation, which becomes a dictionary. The end of a game needs none."""

    def __init__(self, env: gymnasium.Env, config: EnvConfig):
        super().__init__(env)
        self._key, self._none = config.action_mask.removeprefix(INFO), np.zeros(_num_actions(env, config), np.int8)
        inner = env.observation_space
        self._has_parts = isinstance(inner, Dict)
        parts = dict(inner.spaces) if isinstance(inner, Dict) else {"observation": inner}
        self.observation_space = Dict({**parts, self._key: MultiBinary(len(self._none))})

    def reset(self, **named: Any) -> tuple[Any, dict[str, Any]]:
        """Begins an episode."""
        observation, info = self.env.reset(**named)
        return self._joined(observation, info, {}), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Takes a step."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        end = {self._key: self._none} if terminated else {}
        return self._joined(observation, info, end), reward, terminated, truncated, info

    def _joined(self, observation: Any, info: dict[str, Any], otherwise: dict[str, Any]) -> dict[str, Any]:
        found = otherwise | info
        if self._key not in found:
            raise UnfitError(f"info[{self._key!r}]", "it is missing, and --action-mask names it")
        mask = fitted(MultiBinary(len(self._none)), found[self._key], f"info[{self._key!r}]")
        return {**(observation if self._has_parts else {"observation": observation}), self._key: mask.astype(np.int8)}


class MaskLast(gymnasium.Wrapper):
    """Makes the mask the last part of a dictionary, and checks it: numbers 0 and 1, and an allowed action in play."""

    def __init__(self, env: gymnasium.Env, config: EnvConfig):
        super().__init__(env)
        key, asked = config.action_mask.removeprefix(INFO), f"--action-mask {config.action_mask}"
        if config.repeat_action_probability:
            raise ConfigError(f"{asked}: --repeat-action-probability repeats actions that it forbids: leave one out")
        spaces, num_actions = getattr(env.observation_space, "spaces", {}), _num_actions(env, config)
        if not isinstance(spaces, dict) or key not in spaces:
            found = f"the keys {', '.join(map(str, spaces))}" if isinstance(spaces, dict) and spaces else "no keys"
            raise ConfigError(f"{asked}: observations of {config.env} have {found}; {INFO}KEY takes a mask of the info")
        space = spaces[key]
        if not isinstance(space, Box | MultiBinary) or space.shape != (num_actions,):
            raise ConfigError(f"{asked} is {space}: a number for each of {num_actions} actions is needed, 1 or 0")
        others = [(name, part) for name, part in spaces.items() if name != key]
        self.observation_space = Dict(OrderedDict([*others, (key, space)]))
        self._key, self._space = key, MultiBinary(num_actions)

    def reset(self, **named: Any) -> tuple[Any, dict[str, Any]]:
        """Begins an episode."""
        observation, info = self.env.reset(**named)
        return self.observation(observation, in_play=True), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Takes a step."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        return self.observation(observation, in_play=not terminated), reward, terminated, truncated, info

    def observation(self, observation: dict[str, Any], in_play: bool = False) -> dict[str, Any]:
        """Returns an observation. Raises UnfitError when its mask is none, or allows nothing while a game goes on."""
        name = f"observation[{self._key!r}]"
        if not fitted(self._space, observation[self._key], name).any() and in_play:
            raise UnfitError(name, "no action is allowed, and the episode has not terminated")
        return observation


def _num_actions(env: gymnasium.Env, config: EnvConfig) -> int:
    """Returns the number of discrete actions. Raises ConfigError where an action is a vector."""
    if num := Actions(config.env, env.action_space).num:
        return num
    raise ConfigError(f"--action-mask {config.action_mask}: actions of {config.env} are vectors, and none is forbidden")
