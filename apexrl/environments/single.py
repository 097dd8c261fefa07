"""One environment as training makes each of its copies: with its arguments and limit, behind the user's wrappers."""

import contextlib
import re
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec
from gymnasium.wrappers import (
    FlattenObservation,
    GrayscaleObservation,
    NormalizeObservation,
    NormalizeReward,
    StickyAction,
)

from apexrl.config.sections import EnvConfig
from apexrl.environments.fitting import checked
from apexrl.environments.masks import INFO, MaskOfInfo
from apexrl.environments.off_screen import creator_of, why_no_pictures
from apexrl.errors import ConfigError, reason_of
from apexrl.own_modules import own

COPY = "{copy}"  # in --env-kwargs: the number of the copy
SUM = re.compile(rf"(?:(\d+) *\+ *)?{re.escape(COPY)}")
CASTING = (FlattenObservation, GrayscaleObservation)  # wrappers that change numbers to another type without a word


def make_single(config: EnvConfig, registered: EnvSpec, render_mode: str | None = None, copy: int = 0) -> gymnasium.Env:
    """Makes one environment, with observations and actions as its outermost wrapper has them.

    Args:
      render_mode: of an environment whose own arguments say none.
      copy: its number among the copies of a run on one host, which its arguments may ask for.
    Raises: ConfigError when the configuration asks for something that cannot be had.
    """
    for name in config.wrapper:
        own(name, "--wrapper")  # before foreign code can change the directory of modules
    env = make_bare(config, registered, render_mode, copy)
    for name in config.wrapper:
        env = wrapped(env, name)
    _check_learned(env, config)
    return MaskOfInfo(env, config) if config.action_mask.startswith(INFO) else env


def make_bare(config: EnvConfig, registered: EnvSpec, render_mode: str | None = None, copy: int = 0) -> gymnasium.Env:
    """Makes one environment before the wrappers of the user's; its arguments are those of `make_single`.

    Raises: ConfigError when its arguments cannot be had.
    """
    own_mode = own_render_mode(config)
    if own_mode and render_mode and render_mode != own_mode:
        raise ConfigError(f"render_mode {render_mode!r}: --env-kwargs ask for {own_mode!r}, and its observations may "
                          "need that")  # fmt: skip
    kwargs: dict[str, Any] = numbered(config.kwargs, copy) | {"max_episode_steps": longest_episode(config, registered)}
    if render_mode:
        kwargs["render_mode"] = render_mode
    mode = render_mode or own_mode
    undrawn = why_no_pictures(creator_of(registered)) if mode else ""
    env = gymnasium.make(registered.id, **kwargs)  # which names a package that is missing
    if undrawn:
        with contextlib.suppress(Exception, SystemExit):
            env.close()
        raise ConfigError(f"render_mode {mode!r}: {undrawn}")
    probability = config.repeat_action_probability
    return StickyAction(env, probability) if probability else env


def own_render_mode(config: EnvConfig) -> str | None:
    """Returns the render mode that --env-kwargs give all copies, as wrappers that show pictures need it.

    Raises: ConfigError when it opens windows, or is none.
    """
    mode = config.kwargs.get("render_mode")
    if mode == "human" or not isinstance(mode, str | None):
        raise ConfigError(f"--env-kwargs: render_mode is {mode!r}: give rgb_array, or another that opens no window; "
                          "`watch` films a game")  # fmt: skip
    return mode


def numbered(value: Any, copy: int) -> Any:
    """Returns an argument with the number of a copy where it says COPY, also inside of lists and objects.

    COPY alone, or behind NUMBER+, is a number; in a longer text it is digits.
    """
    match value:
        case str():
            found = SUM.fullmatch(value)
            return int(found[1] or 0) + copy if found else value.replace(COPY, str(copy))
        case list():
            return [numbered(inner, copy) for inner in value]
        case dict():
            return {key: numbered(inner, copy) for key, inner in value.items()}
    return value


def wrapped(env: gymnasium.Env, name: str) -> gymnasium.Env:
    """Returns an environment behind a wrapper of the user's.

    Raises: ConfigError when the wrapper cannot be had, fails, or gives something else.
    """
    wrapper = own(name, "--wrapper")
    try:
        behind = wrapper(checked(env) if wrapper in CASTING else env)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"--wrapper {name} fails: {reason_of(error)}") from error
    if not isinstance(behind, gymnasium.Env):
        raise ConfigError(f"--wrapper {name} gives {behind!r}: it has to return an environment of gymnasium")
    return behind


def longest_episode(config: EnvConfig, registered: EnvSpec) -> int:
    """Returns the steps after which an episode is cut: the flag's, unless the environment has fewer.

    Raises: ConfigError when --env-kwargs give a limit that is none.
    """
    limit: Any = config.kwargs.get("max_episode_steps", registered.max_episode_steps)
    if limit is None:
        return config.max_episode_frames
    if type(limit) is not int or limit < 1:
        raise ConfigError(f"--env-kwargs: max_episode_steps is {limit!r}, and should be a whole number from 1 on")
    return min(limit, config.max_episode_frames)


def _check_learned(env: gymnasium.Env, config: EnvConfig) -> None:
    """Raises ConfigError when a wrapper of gymnasium's learns statistics, which no checkpoint holds.

    Also one of those with which the environment is registered. One whose statistics are fixed learns nothing.
    """
    while isinstance(env, gymnasium.Wrapper):
        if isinstance(env, NormalizeObservation | NormalizeReward) and env.update_running_mean:
            name = type(env).__name__
            flag = "--scale-rewards" if "Reward" in name else "--normalize-observations"
            raise ConfigError(
                f"environment {config.env!r} has a {name}, whose running statistics are in no checkpoint: every "
                f"process would have others. Give {flag} instead, whose statistics are the run's, or a --wrapper "
                "module:name with numbers of your own, such as a "
                f"gymnasium.wrappers.{'TransformReward' if 'Reward' in name else 'TransformObservation'}, "
                f"or one that sets the statistics of {name} and its update_running_mean = False"
            )
        env = env.env
