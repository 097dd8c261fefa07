"""The flags as others know them: `python -m deploy flags` writes flags.json, limits.json and train_flags.py anew.

The cluster's variables of flags (`replay_flags` and so on) take the names of flags.json only, with values that match
its regular expressions: those of the algorithm that the variable `agent` names. It leaves out flags that the cluster
itself sets (addresses, ports, shards, directories, keys), those of modules that no image has, and one whose value needs
quotes. limits.json has the numbers of actors and environments that a replay server takes, and by preset the
environments of a process, the batches that learners share, and the numbers by which one uses up experience.
apexrl/train_flags.py has the types of `apexrl.train`'s flags, for editors and mypy.
"""

import dataclasses
import json
import types
import typing
from pathlib import Path
from typing import Annotated, Any

from apexrl.agents.families import FAMILIES
from apexrl.config.commands import ActorCommand, LearnerCommand, ReplayCommand, RunCommand
from apexrl.config.fields import range_of, types_of
from apexrl.config.flags import default_command, parse
from apexrl.config.sections import (
    DEFAULT_AGENT,
    ActingConfig,
    Changing,
    EnvConfig,
    EvaluationConfig,
    LearningConfig,
    PresetName,
    ReplayConfig,
)
from apexrl.net.actor_sessions import MAX_ACTORS, MAX_SLOTS

FLAGS_FILE = Path(__file__).resolve().parent / "terraform" / "cluster" / "flags.json"
LIMITS_FILE = FLAGS_FILE.with_name("limits.json")
TYPES_FILE = Path(__file__).resolve().parents[1] / "apexrl" / "train_flags.py"
HEAD = '''"""The flags of `apexrl.train` with their types, of all algorithms. Written by `python -m deploy flags`."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict


class TrainFlags(TypedDict, total=False):
    """Any of them may be left out; `apexrl train --help` says what they do."""

'''
GIVEN_OTHERWISE = {"env"}  # `train` has a parameter of its own for it
OTHERS = {"env_kwargs": "str | Mapping[str, Any]"}
PRESETS = tuple(name for name in typing.get_args(PresetName) if name != "auto")
ROLES = ("agent", "replay", "learner", "actor", "evaluator")
SET_BY_THE_CLUSTER = {
    *("env", "num_workers", "environments_per_worker", "journal_dir", "checkpoint", "record_dir"),
    *("num_learners", "learner_devices"),
    *("network", "inputs", "mix_journal"),  # no image has a module or a journal of the user's
}
NEEDS_QUOTES = {"env_kwargs"}

WORD = "[A-Za-z0-9_.:/=@-]+"


def pattern_of(kind: Any) -> str:
    """Returns a regular expression (RE2) for a flag's value; numbers of a tuple are separated by one space."""
    allowed = range_of(kind)
    if typing.get_origin(kind) is typing.Annotated:
        kind = kind.__origin__
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return f"({'|'.join(arguments)})"
    if origin is tuple:
        of = pattern_of(arguments[0])
        return f"{of}( {of})*" if Ellipsis in arguments else " ".join([of] * len(arguments))
    if kind is bool:
        return "(true|false)"
    if kind is int:
        return "(0|[1-9][0-9]*)" if not allowed.wanted(0) else "[1-9][0-9]*"
    if kind is float:
        sign = "" if allowed.wanted(-1.0) else "-?"
        return sign + r"[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]+)?"
    if kind == Changing:
        number = pattern_of(Annotated[float, allowed])
        return f"{number}(:{number}(:[1-9][0-9]*[kMG]?)?(:cosine)?)?"
    assert kind is str, kind
    return WORD


def agents() -> list[str]:
    """Returns our algorithms; not those that a test has added to the list."""
    return [name for name, family in FAMILIES.items() if family.module.startswith("apexrl.")]


def configs_of(agent: str) -> dict[str, tuple[type, ...]]:
    """Returns the configurations whose fields are the flags of each role."""
    family = FAMILIES[agent]
    learner = (type(family.update), type(family.network), LearningConfig)
    acting, evaluating = (EnvConfig, ActingConfig), (EnvConfig, EvaluationConfig)
    return dict(zip(ROLES, ((type(family.algorithm),), (ReplayConfig,), learner, acting, evaluating), strict=True))


def make_patterns(agent: str) -> dict[str, dict[str, str]]:
    """Returns the expression of each flag of each role."""
    patterns: dict[str, dict[str, str]] = {}
    for role, configs in configs_of(agent).items():
        assert all(dataclasses.is_dataclass(config) for config in configs)
        kinds: dict[str, Any] = {}
        for config in configs:
            kinds |= typing.get_type_hints(config, include_extras=True)
        patterns[role] = {
            name: f"^{pattern_of(kind)}$"
            for name, kind in sorted(kinds.items())
            if name not in SET_BY_THE_CLUSTER | NEEDS_QUOTES
        }
    return patterns


def text_of_all() -> str:
    """Returns the content of flags.json."""
    return json.dumps({agent: make_patterns(agent) for agent in agents()}, indent=2) + "\n"


def text_of_limits() -> str:
    """Returns the content of limits.json."""
    environments = {
        agent: {
            preset: parse(ActorCommand, ["--agent", agent, "--preset", preset]).acting.environments_per_worker
            for preset in PRESETS
        }
        for agent in agents()
    }
    # Of apex-dqn alone: its batches are of transitions.
    learning = {
        preset: {
            "batch_size": parse(LearnerCommand, ["--preset", preset]).update.batch_size,
            "samples_per_insert": parse(ReplayCommand, ["--preset", preset]).replay.samples_per_insert,
        }
        for preset in PRESETS
    }
    batches = {
        agent: {
            preset: {
                name: getattr(update, name)
                for update in [parse(LearnerCommand, ["--agent", agent, "--preset", preset]).update]
                for name in ("batch_size", "mix", "minibatches")
                if hasattr(update, name)
            }
            for preset in PRESETS
        }
        for agent in agents()
    }
    limits = {"actors": MAX_ACTORS, "environments": MAX_SLOTS, "environments_per_worker": environments,
              "batches": batches, "learning": {DEFAULT_AGENT: learning}}  # fmt: skip
    return json.dumps(limits, indent=2) + "\n"


def text_of_types() -> str:
    """Returns the content of train_flags.py."""
    found: dict[str, list[str]] = {}
    for name, kind in (item for agent in agents() for item in types_of(default_command(RunCommand, agent)).items()):
        text = OTHERS.get(name) or _text_of(kind)
        if name not in GIVEN_OTHERWISE and text not in found.setdefault(name, []):
            found[name].append(text)
    return HEAD + "".join(f"    {name}: {' | '.join(kinds)}\n" for name, kinds in sorted(found.items()))


def _text_of(kind: Any) -> str:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return f"Literal{str(list(arguments)).replace(chr(39), chr(34))}"
    if origin is tuple:
        of = _text_of(arguments[0])
        return f"{of} | Sequence[{of}]" if Ellipsis in arguments else f"Sequence[{of}]"
    if origin is types.UnionType:  # None is what is not given
        return " | ".join(_text_of(part) for part in arguments if part is not types.NoneType)
    return kind.__name__


def write() -> None:
    """Writes the files."""
    for file, text in ((FLAGS_FILE, text_of_all()), (LIMITS_FILE, text_of_limits()), (TYPES_FILE, text_of_types())):
        file.write_text(text, encoding="utf-8")
        print(file)
