"""Gymnasium's registry of environments: the entry of an id, and the id that was meant."""

import difflib
import re

import gymnasium
from gymnasium.envs.registration import EnvSpec

from apexrl.environments import catch, corridor
from apexrl.environments.atari import has_usual_frameskip
from apexrl.errors import ConfigError, reason_of
from apexrl.own_modules import import_own

SIMILAR = 0.7  # of difflib's measure, where 1 are equal names

catch.register()
corridor.register()


def registered(env: str) -> EnvSpec:
    """Returns the entry of an id. `module:Id` first imports the module that registers it.

    Raises: ConfigError when there is no such entry; it names the one that was meant.
    """
    module, _, name = env.rpartition(":")
    if module:
        import_own(module, f"unknown environment {env!r}")
    try:
        return gymnasium.spec(name)
    except Exception as error:
        if meant := similar(name):
            hint = f"did you mean {module}:{meant}?" if module else f"did you mean {meant}?"
            raise ConfigError(f"unknown environment {env!r}: {hint}") from error
        raise ConfigError(
            f"unknown environment {env!r} ({reason_of(error)}); "
            "say e.g. CartPole-v1 or ALE/Breakout-v5, or module:Id for one of your own"
        ) from error


def similar(name: str) -> str:
    """Returns the newest version of the registered name that is most like this one; empty when none is like it."""
    newest: dict[str, EnvSpec] = {}
    for entry in gymnasium.registry.values():
        bare = _bare(entry.id)
        if has_usual_frameskip(entry.id) and (bare not in newest or _version(entry) > _version(newest[bare])):
            newest[bare] = entry
    close = difflib.get_close_matches(_bare(name), newest, 1, SIMILAR)
    return newest[close[0]].id if close else ""


def _bare(env: str) -> str:
    """Returns an id without its namespace and its version, in small letters."""
    return re.sub(r"-v\d+$", "", env.rpartition("/")[2]).lower()


def _version(entry: EnvSpec) -> int:
    return -1 if entry.version is None else entry.version
