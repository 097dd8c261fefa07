"""Pictures of MuJoCo's simulations on machines without a screen."""

import ctypes.util
import os
from typing import Any

from apexrl.environments.dm_suite import SuiteTask

VARIABLE = "MUJOCO_GL"  # MuJoCo's own, which names the library
LIBRARIES = {"egl": "EGL", "osmesa": "OSMesa"}


def why_no_pictures(creator: Any) -> str:
    """Chooses the library that draws without a screen, where nobody has; returns why there is none, or an empty string.

    Args:
      creator: class of the environment, or the function that makes it.
    """
    is_mujoco = creator is SuiteTask or getattr(creator, "__module__", "").startswith("gymnasium.envs.mujoco.")
    if not is_mujoco or os.environ.get(VARIABLE):
        return ""
    for choice, library in LIBRARIES.items():
        if ctypes.util.find_library(library):
            os.environ[VARIABLE] = choice
            return ""
    return "neither EGL nor OSMesa draws for MuJoCo here: say `apt-get install libegl1` or `libosmesa6`"
