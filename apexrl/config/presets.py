"""The flags that are known to train an environment: `presets.toml` beside this module. Loads no torch."""

import fnmatch
import functools
import tomllib
from pathlib import Path
from typing import Any

from apexrl.config.sections import DEFAULT_AGENT

VECTOR_AGENT = "sac"  # trains unknown environments whose actions are vectors of numbers
FILE = Path(__file__).with_suffix(".toml")


@functools.cache
def presets() -> dict[str, dict[str, Any]]:
    """Returns the file's tables by environment, or a pattern of some: the algorithm as `agent`, and flags' names."""
    return tomllib.loads(FILE.read_text())


def usual_agent(env: str) -> str:
    """Returns the name of the algorithm that trains on an environment unless told otherwise."""
    return str(_table(env).get("agent", DEFAULT_AGENT))


def flags_for(env: str, agent: str, has_end: bool = False) -> dict[str, Any]:
    """Returns the flags that an algorithm trains an environment with, by name: none where it is not the usual one.

    Args:
      has_end: the run is to end otherwise than after so many frames.
    """
    numbers = _table(env) if agent == usual_agent(env) else {}
    left_out = {"agent", "total-frames"} if has_end else {"agent"}
    return {name: value for name, value in numbers.items() if name not in left_out}


def _table(env: str) -> dict[str, Any]:
    return next((table for pattern, table in presets().items() if fnmatch.fnmatchcase(env, pattern)), {})
