"""One environment as training makes each of its copies: with its arguments and limit, behind the user's wrappers."""

from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec
from gymnasium.wrappers import FlattenObservation, GrayscaleObservation, NormalizeObservation, NormalizeReward

from apexrl.config import EnvConfig
from apexrl.environments.fitting import checked
from apexrl.errors import ConfigError, reason_of
from apexrl.own_modules import own

CASTING = (FlattenObservation, GrayscaleObservation)  # wrappers that change numbers to another type without a word


def make_single(config: EnvConfig, registered: EnvSpec, render_mode: str | None = None) -> gymnasium.Env:
    """Makes one environment, with observations and actions as its outermost wrapper has them.

    Raises: ConfigError when the configuration asks for something that cannot be had.
    """
    env = make_bare(config, registered, render_mode)
    for name in config.wrapper:
        env = wrapped(env, name)
    _check_learned(env, config)
    return env


def make_bare(config: EnvConfig, registered: EnvSpec, render_mode: str | None = None) -> gymnasium.Env:
    """Makes one environment before the wrappers of the user's.

    Raises: ConfigError when its arguments cannot be had.
    """
    if "render_mode" in config.kwargs:
        raise ConfigError("--env-kwargs cannot hold render_mode: --record-dir chooses where videos go")
    kwargs: dict[str, Any] = config.kwargs | {"max_episode_steps": longest_episode(config, registered)}
    if render_mode:
        kwargs["render_mode"] = render_mode
    return gymnasium.make(registered.id, **kwargs)


def wrapped(env: gymnasium.Env, name: str) -> gymnasium.Env:
    """Returns an environment behind a wrapper of the user's.

    Raises: ConfigError when the wrapper cannot be had, fails, or gives something else.
    """
    wrapper = own(name, "--wrapper")
    try:
        behind = wrapper(checked(env) if wrapper in CASTING else env)
    except Exception as error:
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
            raise ConfigError(
                f"environment {config.env!r} has a {name}, whose running statistics are in no checkpoint: every "
                "process would have others. Give a --wrapper module:name with numbers of your own, such as a "
                f"gymnasium.wrappers.{'TransformReward' if 'Reward' in name else 'TransformObservation'}, "
                f"or one that sets the statistics of {name} and its update_running_mean = False"
            )
        env = env.env
