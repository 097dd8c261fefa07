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
from apexrl.errors import reason_of

VARIABLE = "MUJOCO_GL"  # MuJoCo's own, which names the library
LIBRARIES = {"egl": "EGL", "osmesa": "OSMesa"}
MODULES = "gymnasium.envs.mujoco."  # those of Gymnasium's simulations
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
    is_mujoco = any(base is SuiteTask or base.__module__.startswith(MODULES) for base in classes)
    if not is_mujoco or os.environ.get(VARIABLE):
        return ""
    faults = ""
    for choice, library in LIBRARIES.items():
        if not ctypes.util.find_library(library):
            continue
        if not (fault := _fault_of(choice)):
            os.environ[VARIABLE] = choice
            return ""
        faults += f" ({library} is there: {fault})"
    return f"neither EGL nor OSMesa draws for MuJoCo here{faults}: say `apt-get install libegl1` or `libosmesa6`"


@functools.cache
def _fault_of(choice: str) -> str:
    """Returns why a library that is there does not draw, or an empty string: a process tries, as a failure may stay."""
    words, environment = [sys.executable, "-c", TRIAL], {**os.environ, VARIABLE: choice}
    try:
        done = subprocess.run(
            words, env=environment, capture_output=True, text=True, errors="replace", timeout=TRIAL_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return reason_of(error)
    lines = done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"]
    return lines[-1] if done.returncode else ""
