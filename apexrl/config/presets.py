"""The flags that are known to train an environment: `presets.toml` beside this module. Loads no torch."""

import functools
import tomllib
from pathlib import Path
from typing import Any

from apexrl.config.sections import DEFAULT_AGENT

VECTOR_AGENT = "sac"  # trains unknown environments whose actions are vectors of numbers
FILE = Path(__file__).with_suffix(".toml")


@functools.cache
def presets() -> dict[str, dict[str, Any]]:
    """Returns the file's tables by environment: the algorithm as `agent`, and flags without their dashes."""
    return tomllib.loads(FILE.read_text())


def usual_agent(env: str) -> str:
    """Returns the name of the algorithm that trains on an environment unless told otherwise."""
    return str(presets().get(env, {}).get("agent", DEFAULT_AGENT))


def flags_for(env: str, agent: str, has_end: bool = False) -> list[str]:
    """Returns the flags that an algorithm trains on an environment with: none where it is not the usual one.

    Args:
      has_end: the run is to end otherwise than after so many frames.
    """
    numbers = presets().get(env, {}) if agent == usual_agent(env) else {}
    left_out = {"agent", "total-frames"} if has_end else {"agent"}
    return [word for name, value in numbers.items() if name not in left_out for word in (f"--{name}", str(value))]
