"""Pictures of MuJoCo's simulations on machines without a screen."""

import ctypes.util
import functools
import os
import subprocess
import sys
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec

from apexrl.environments.dm_suite import SuiteTask

VARIABLE = "MUJOCO_GL"  # MuJoCo's own, which names the library
LIBRARIES = {"egl": "EGL", "osmesa": "OSMesa"}
FAMILY = "gymnasium.envs.mujoco."  # the modules of Gymnasium's simulations
TRIAL = "import mujoco; context = mujoco.GLContext(16, 16); context.make_current(); context.free()"
TRIAL_SECONDS = 60.0


def creator_of(registered: EnvSpec) -> Any:
    """Returns the class of an environment, or the function that makes it."""
    entry = registered.entry_point
    return gymnasium.envs.registration.load_env_creator(entry) if isinstance(entry, str) else entry


def why_no_pictures(creator: Any) -> str:
    """Chooses the library that draws without a screen, where nobody has; returns why there is none, or an empty string.

    Args:
      creator: `creator_of` an environment; one that derives from Gymnasium's or is the suite's is drawn by MuJoCo.
    """
    classes = getattr(creator, "__mro__", ())
    if not any(base is SuiteTask or base.__module__.startswith(FAMILY) for base in classes) or os.environ.get(VARIABLE):
        return ""
    for choice, library in LIBRARIES.items():
        if ctypes.util.find_library(library) and _draws(choice):
            os.environ[VARIABLE] = choice
            return ""
    return "neither EGL nor OSMesa draws for MuJoCo here: say `apt-get install libegl1` or `libosmesa6`"


@functools.cache
def _draws(choice: str) -> bool:
    """Returns whether a library draws, and not only is there: a process of its own tries, as a failure may stay."""
    words = [sys.executable, "-c", TRIAL]
    environment = {**os.environ, VARIABLE: choice}
    try:
        done = subprocess.run(words, env=environment, capture_output=True, timeout=TRIAL_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
