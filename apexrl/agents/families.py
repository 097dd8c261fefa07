"""The algorithms by name. Loads no torch: `implementation` does."""

import contextlib
import importlib
from typing import Any, TypeVar, cast

from apexrl.agents import (
    apex_dpg_config,
    apex_dqn_config,
    impact_config,
    impala_config,
    pqn_config,
    r2d2_config,
    sac_config,
)
from apexrl.agents.contract import Family, Implementation
from apexrl.errors import ConfigError
from apexrl.own_modules import import_own

R = TypeVar("R")
FAMILIES: dict[str, Family] = {
    "apex-dqn": apex_dqn_config.FAMILY,
    "apex-dpg": apex_dpg_config.FAMILY,
    "impala": impala_config.FAMILY,
    "impact": impact_config.FAMILY,
    "r2d2": r2d2_config.FAMILY,
    "sac": sac_config.FAMILY,
    "pqn": pqn_config.FAMILY,
}
"""By the name that --agent takes. A module of your own may add to it: --agent module:name imports it first."""


def family_of(name: str) -> Family:
    """Returns the family of a name, or of `module:name`, whose module registers it in FAMILIES.

    Raises: ConfigError when there is none.
    """
    module, _, own_name = name.rpartition(":")
    if module:
        with contextlib.chdir("."):  # a module that changes the directory does so for itself
            import_own(module, f"--agent {name}")
    if own_name not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ConfigError(f"--agent {name}: there is no such algorithm; known are {known}, or module:name for your own")
    return FAMILIES[own_name]


def records(given: Any, kind: type[R], source: str) -> tuple[R, ...]:
    """Returns the records that a function of a family gave.

    Raises: ConfigError when they are no tuple of such records.
    """
    if type(given) is not tuple or not all(isinstance(record, kind) for record in given):
        name = kind.__name__
        raise ConfigError(f"{source} gives {given!r:.200}: give a tuple of {name}, such as ({name}(...),)")
    return given


def implementation(family: Family) -> Implementation:
    """Loads the module of a family: the place where an agent is named becomes the place where it is made.

    Raises: ConfigError when there is no such module, or it lacks a function.
    """
    try:
        module = importlib.import_module(family.module)
    except ModuleNotFoundError as error:
        if error.name != family.module:
            raise
        raise ConfigError(f"the family's module {family.module!r} does not exist: mend Family.module") from error
    functions = ("make_network", "make_actor", "make_learner")
    if missing := [name for name in functions if not hasattr(module, name)]:
        raise ConfigError(
            f"{family.module} has no {', '.join(missing)}: a family's module needs {', '.join(functions)}"
        )
    return cast(Implementation, module)
