"""What values of flags look like, for Terraform: `python -m tests.deploy.flag_patterns` writes flags.json anew.

The cluster's variables of flags (`replay_flags` and so on) take the names of this file only, with values that match its
regular expressions. What the cluster itself sets (addresses, ports, directories, keys) is left out.
"""

import dataclasses
import json
import typing
from typing import Any

from apexrl.config import (
    ActingConfig,
    AgentConfig,
    EnvConfig,
    EvaluationConfig,
    LearningConfig,
    NetworkConfig,
    ReplayConfig,
    UpdateConfig,
)
from apexrl.flags import MAY_BE_ZERO
from tests.system.processes import ROOT

FLAGS_FILE = ROOT / "deploy" / "terraform" / "cluster" / "flags.json"
ROLES: dict[str, tuple[type, ...]] = {
    "agent": (AgentConfig,),
    "replay": (ReplayConfig,),
    "learner": (UpdateConfig, NetworkConfig, LearningConfig),
    "actor": (EnvConfig, ActingConfig),
    "evaluator": (EnvConfig, EvaluationConfig),
}
SET_BY_THE_CLUSTER = {"env", "num_workers", "environments_per_worker", "journal_dir", "checkpoint", "record_dir"}

WORD = "[A-Za-z0-9_.:/=-]+"


def pattern_of(name: str, kind: Any) -> str:
    """Returns a regular expression (RE2) for a flag's value; numbers of a tuple are separated by one space."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return f"({'|'.join(arguments)})"
    if origin is tuple:
        of = pattern_of(name, arguments[0])
        return f"{of}( {of})*" if Ellipsis in arguments else " ".join([of] * len(arguments))
    if kind is bool:
        return "(true|false)"
    if kind is int:
        return "(0|[1-9][0-9]*)" if name in MAY_BE_ZERO else "[1-9][0-9]*"
    if kind is float:
        return r"[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]+)?"
    assert kind is str, (name, kind)
    return WORD


def make_patterns() -> dict[str, dict[str, str]]:
    """Returns the expression of each flag of each role."""
    patterns: dict[str, dict[str, str]] = {}
    for role, configs in ROLES.items():
        kinds = {name: kind for config in configs for name, kind in typing.get_type_hints(config).items()}
        assert all(dataclasses.is_dataclass(config) for config in configs)
        patterns[role] = {
            name: f"^{pattern_of(name, kind)}$"
            for name, kind in sorted(kinds.items())
            if name not in SET_BY_THE_CLUSTER
        }
    return patterns


def text_of(patterns: dict[str, dict[str, str]]) -> str:
    """Returns the content of flags.json."""
    return json.dumps(patterns, indent=2) + "\n"


if __name__ == "__main__":
    FLAGS_FILE.write_text(text_of(make_patterns()))
    print(FLAGS_FILE)
