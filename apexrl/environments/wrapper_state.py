"""Finds wrappers whose state outlives an episode: no checkpoint holds it, so whoever plays later plays another game."""

import contextlib
import copy
import hashlib
import logging
import time
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.utils.env_checker import data_equivalence

from apexrl.config.sections import EnvConfig
from apexrl.environments.registry import registered
from apexrl.environments.single import make_bare, wrapped
from apexrl.errors import ConfigError, reason_of

logger = logging.getLogger(__name__)

STEPS, MOST_STEPS = 100, 1000  # of one recording: so many, and more until a game has ended
RECORDING_SECONDS = 2.0  # after which it ends early: its beginning is compared, too


class _Event(NamedTuple):
    """Something that passed through the outside of a layer: 0 is the environment, and each wrapper adds one."""

    layer: int
    is_action: bool
    value: Any


class _Tap(gymnasium.Wrapper):
    """Records what passes through the outside of a layer."""

    def __init__(self, env: gymnasium.Env, layer: int, events: list[_Event]):
        super().__init__(env)
        self._layer, self._events = layer, events

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begins an episode."""
        observation, info = self.env.reset(seed=seed, options=options)
        self._record(observation, [options, info])
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Takes a step."""
        self._events.append(_Event(self._layer, True, _kept(action)))
        observation, reward, terminated, truncated, info = self.env.step(action)
        # No action follows a last observation, and a wrapper may leave an old one there.
        self._record(None if terminated or truncated else observation, [reward, terminated, truncated, info])
        return observation, reward, terminated, truncated, info

    def _record(self, observation: Any, others: list[Any]) -> None:
        # A wrapper may learn from all that the environment gives; agents play by its observations alone.
        value = [observation, *others] if self._layer == 0 else observation
        self._events.append(_Event(self._layer, False, _kept(value)))


class _Recorder:
    """An environment behind its wrappers, and all that passes between its layers."""

    def __init__(self, config: EnvConfig):
        self._events: list[_Event] = []
        self._env: gymnasium.Env = _Tap(make_bare(config, registered(config.env)), 0, self._events)
        for number, name in enumerate(config.wrapper):
            self._env = _Tap(wrapped(self._env, name), number + 1, self._events)

    def record(self) -> list[_Event]:
        """Plays from the same seed with the same actions as ever; returns what passed."""
        ends_at = time.monotonic() + RECORDING_SECONDS
        self._events.clear()
        self._env.action_space.seed(0)
        self._env.reset(seed=0)
        has_ended = False  # a game: a wrapper may learn there alone
        for step in range(MOST_STEPS):
            if (step >= STEPS and has_ended) or time.monotonic() >= ends_at:
                break
            _, _, terminated, truncated, _ = self._env.step(self._env.action_space.sample())
            if terminated or truncated:
                self._env.reset()
                has_ended = True
        return list(self._events)

    def close(self) -> None:
        """Closes the environment."""
        self._env.close()


def check_wrapper_state(config: EnvConfig) -> None:
    """Plays the same games in two new environments with wrappers, and again in the second one.

    A wrapper remembers games if it changes the same observations or actions otherwise the second time, and did not do
    so in the two new ones. If it did, it may be chance or what all copies of a process share: a line says so. An
    environment that plays other games itself tells nothing about its wrappers.

    Raises: ConfigError when a wrapper remembers games.
    """
    if not config.wrapper:
        return
    try:
        with contextlib.closing(_Recorder(config)) as recorder:
            fresh = recorder.record()
        with contextlib.closing(_Recorder(config)) as recorder:
            same, again = recorder.record(), recorder.record()
        changed, differs = _first_difference(same, again), _first_difference(fresh, same)
    except (Exception, SystemExit) as error:  # foreign code: the role that meets it again names it
        logger.warning("%s: nobody knows whether its wrappers remember games: %s", config.env, reason_of(error))
        return
    if changed is None or (differs is not None and differs < changed):
        return
    event = same[changed]
    number = event.layer if event.is_action else event.layer - 1  # of the wrapper that it came out of
    if number not in range(len(config.wrapper)):
        return
    name, what = config.wrapper[number], "actions" if event.is_action else "observations"
    if differs is not None:
        logger.warning(
            "--wrapper %s makes other %s of the same ones in each environment: random ones belong to self.np_random, "
            "and whatever a wrapper learns is in no checkpoint", name, what,
        )  # fmt: skip
        return
    raise ConfigError(
        f"--wrapper {name} makes other {what} of the same ones when it has been played for a while. "
        "No checkpoint holds what it remembers, so evaluations, watch, load and --resume would play another game: let "
        "it begin anew in reset(), fix its numbers, and draw random ones from self.np_random"
    )


def _kept(value: Any) -> Any:
    """Returns a copy to compare; of arrays a checksum, for pictures are large."""
    if isinstance(value, np.ndarray) and value.dtype != object:
        return value.dtype.str, value.shape, hashlib.sha256(value.tobytes()).hexdigest()
    if isinstance(value, dict):
        return {key: _kept(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return list(map(_kept, value))
    return copy.deepcopy(value)


def _first_difference(events: list[_Event], others: list[_Event]) -> int | None:
    """Returns the number of the first event that differs, where both have one."""
    for number, (one, other) in enumerate(zip(events, others, strict=False)):
        if one[:2] != other[:2] or not data_equivalence(one.value, other.value, exact=True):
            return number
    return None
