"""Gymnasium's registry of environments: the entry of an id, and the id that was meant."""

import difflib
import importlib.metadata
import re
from types import ModuleType
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec

from apexrl.environments import dm_suite
from apexrl.environments.atari import has_usual_frameskip
from apexrl.environments.catch import SWITCH_PERIOD_STEPS
from apexrl.environments.corridor import MAX_EPISODE_STEPS
from apexrl.errors import ConfigError, reason_of
from apexrl.own_modules import import_own

SIMILAR = 0.7  # of difflib's measure, where 1 are equal names
OWN: dict[str, dict[str, Any]] = {
    "catch:Catch": {},
    "catch:MemoryCatch": {},
    "catch:SwitchingCatch": {"kwargs": {"switch_period_steps": SWITCH_PERIOD_STEPS}},
    "corridor:Corridor": {"max_episode_steps": MAX_EPISODE_STEPS},
}
"""By module and class, how our environments are registered."""

for name, options in OWN.items():
    gymnasium.register(f"{name.partition(':')[2]}-v0", entry_point=f"apexrl.environments.{name}", **options)


def registered(env: str) -> EnvSpec:
    """Returns the entry of an id. `module:Id` first imports the module that registers it.

    Raises: ConfigError when there is no such entry; it names the one that was meant.
    """
    module, _, name = env.rpartition(":")
    imported = import_own(module, f"environment {env!r}") if module else None
    dm_suite.register(name)
    _register_plugin(name.rpartition("/")[0])
    try:
        return gymnasium.spec(name)
    except Exception as error:
        if meant := similar(name, module):
            hint = f"did you mean {module}:{meant}?" if module else f"did you mean {meant}?"
            raise ConfigError(f"unknown environment {env!r}: {hint}") from error
        if imported is not None and _has_several_agents(imported, name):
            raise ConfigError(
                f"unknown environment {env!r}: it is made as PettingZoo makes them, and several agents in one "
                "environment are not supported: register an id of a gymnasium.Env in which one agent plays"
            ) from error
        raise ConfigError(
            f"unknown environment {env!r} ({reason_of(error)}); "
            "say e.g. CartPole-v1 or ALE/Breakout-v5, or module:Id for one of your own"
        ) from error


def _register_plugin(namespace: str) -> None:
    """Lets the installed package that announces a namespace of ids register them, as Gymnasium did before 1.0.

    Raises: ConfigError when the package fails.
    """
    if not namespace or any(entry.namespace == namespace for entry in gymnasium.registry.values()):
        return
    for plugin in importlib.metadata.entry_points(group="gymnasium.envs", name=namespace):
        try:
            plugin.load()()
        except Exception as error:
            raise ConfigError(f"{plugin.value} of an installed package fails: {reason_of(error)}") from error


def similar(name: str, module: str = "") -> str:
    """Returns the newest version of the registered name that is most like this one; empty when none is like it.

    Args:
      module: only names of environments out of the package of this module count.
    """
    newest: dict[str, EnvSpec] = {}
    for entry in gymnasium.registry.values():
        if module and _package(entry) != module.partition(".")[0]:
            continue
        bare = _bare(entry.id)
        if has_usual_frameskip(entry.id) and (bare not in newest or _version(entry) > _version(newest[bare])):
            newest[bare] = entry
    close = difflib.get_close_matches(_bare(name), newest, 1, SIMILAR)
    return newest[close[0]].id if close else ""


def _has_several_agents(module: ModuleType, name: str) -> bool:
    """Returns whether a module, or one of that name in it, makes environments as those of PettingZoo do."""
    places = [vars(module), getattr(vars(module).get(name), "__dict__", {})]
    is_theirs = module.__name__.partition(".")[0] == "pettingzoo"
    return is_theirs or any(made in place for place in places for made in ("parallel_env", "raw_env"))


def _package(entry: EnvSpec) -> str:
    """Returns the package of an environment's class, or of the function that makes it."""
    made_by = entry.entry_point
    module = made_by if isinstance(made_by, str) else getattr(made_by, "__module__", "")
    return module.partition(":")[0].partition(".")[0]


def _bare(env: str) -> str:
    """Returns an id without its namespace and its version, in small letters."""
    return re.sub(r"-v\d+$", "", env.rpartition("/")[2]).lower()


def _version(entry: EnvSpec) -> int:
    return -1 if entry.version is None else entry.version
