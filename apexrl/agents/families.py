"""The algorithms by name. Loads no torch: `implementation` does."""

import contextlib
import dataclasses
import importlib
import typing
from collections.abc import Mapping
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
from apexrl.agents.contract import Family, Implementation, Section
from apexrl.config.commands import OfflineCommand, ReplayCommand, RunCommand, WorkerCommand
from apexrl.config.fields import is_of_words, types_of, values_of
from apexrl.config.sections import AlgorithmConfig
from apexrl.config.words import flag_of
from apexrl.errors import ConfigError, named
from apexrl.own_modules import import_own
from apexrl.types import EnvironmentSpec, StreamSpec

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
SHIPPED = frozenset(FAMILIES)
COMMANDS = (RunCommand, OfflineCommand, ReplayCommand, WorkerCommand)  # the flags of the others are among theirs


def family_of(name: str) -> Family:
    """Returns the family of a name, or of `module:name`, whose module registers it in FAMILIES.

    Raises: ConfigError when there is none, or a field or a preset of somebody's own cannot be.
    """
    module, _, own_name = name.rpartition(":")
    if module:
        with contextlib.chdir("."):  # a module that changes the directory does so for itself
            import_own(module, f"--agent {name}")
    if own_name not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ConfigError(f"--agent {name}: there is no such algorithm; known are {known}, or module:name for your own")
    family = FAMILIES[own_name]
    if own_name not in SHIPPED:
        if not isinstance(family, Family):
            raise ConfigError(f"--agent {name}: FAMILIES[{own_name!r}] is {family!r:.200}: give a Family")
        _check_fields(name, family)
        _check_presets(name, family)
    return family


def _check_fields(agent: str, family: Family) -> None:
    """Raises ConfigError when a command has a flag of a field's name already, or no words can give the field."""
    for kind in COMMANDS:
        taken, own = set[str](), []
        for field in dataclasses.fields(kind):
            if field.default is dataclasses.MISSING:
                own.append(getattr(family, field.name))
            else:
                taken |= values_of(field.default).keys() if dataclasses.is_dataclass(field.default) else {field.name}
        for config in own:
            source = f"--agent {agent}: {type(config).__name__}"
            with named(source):
                kinds = types_of(config)
            if both := taken & kinds.keys():
                raise ConfigError(
                    f"{source} has a field {min(both)}: there is a flag {flag_of(min(both))} already: rename it"
                )
            taken |= kinds.keys()
            if others := [name for name, of in kinds.items() if not is_of_words(of)]:
                told = getattr(kinds[others[0]], "__qualname__", kinds[others[0]])
                cure = "make it a number, a text, a Literal, or a tuple of those"
                raise ConfigError(f"{source} has a field {others[0]} of type {told}, which is no flag: {cure}")


def _check_presets(agent: str, family: Family) -> None:
    """Raises ConfigError when a preset has a section, or a section a field, that there is not."""
    command = RunCommand(algorithm=family.algorithm, network=family.network, update=family.update)
    known = typing.get_args(Section)
    for preset, sections in family.presets.items():
        source = f"--agent {agent}: preset {preset}"
        for section, values in sections.items():
            if section not in known:
                raise ConfigError(f"{source} has a section {section}: they are {', '.join(known)}")
            if not isinstance(values, Mapping):
                raise ConfigError(f"{source}: the section {section} is {values!r:.200}: give its fields by name")
            if unknown := values.keys() - values_of(getattr(command, section)):
                raise ConfigError(f"{source}: the section {section} has no field {min(unknown)}")


def stream_of(agent: str, algorithm: AlgorithmConfig, environment: EnvironmentSpec) -> StreamSpec:
    """Returns the stream of an environment for an algorithm.

    Raises: ConfigError when it has none, or its function fails.
    """
    with named(f"--agent {agent}: Family.stream"):
        stream = family_of(agent).stream(algorithm, environment)
    if not isinstance(stream, StreamSpec):
        raise ConfigError(f"--agent {agent}: Family.stream gives {stream!r:.200}: give a StreamSpec")
    return stream


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
