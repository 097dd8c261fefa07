"""Python processes that this one starts: they find this package from any directory, and end when this process is gone.

They do the latter themselves, by `lifecycle.end_with_parent`.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parent
PARENT_VARIABLE = "APEXRL_PARENT"  # holds the process id of the one that has started this process


def start_child(arguments: Sequence[str], variables: Mapping[str, str], **options: Any) -> subprocess.Popen[bytes]:
    """Starts Python in a session of its own: Ctrl-C reaches this process alone, which ends the others in order.

    With `-P` no file of the working directory takes the place of a module.

    Args:
      variables: of its environment, beside ours.
      options: of `Popen`; without them it has no input, and our output.
    """
    settings: dict[str, Any] = {"stdin": subprocess.DEVNULL, "start_new_session": True} | options
    return subprocess.Popen([sys.executable, "-P", *arguments], env={**child_environment(), **variables}, **settings)


def child_environment() -> dict[str, str]:
    """Returns the environment variables of a process that we start: ours, with our id and the place of this package.

    In a checkout that nobody has installed it is on PYTHONPATH; a package of pip's is found by itself.
    """
    home, path = str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")
    ours = dict(os.environ) | {PARENT_VARIABLE: str(os.getpid())}
    if PACKAGE.parent.name in ("site-packages", "dist-packages") or home in path.split(os.pathsep):
        return ours
    return ours | {"PYTHONPATH": os.pathsep.join([home, path] if path else [home])}


def role_script(name: str) -> str:
    """Returns the path of a role's program: actor.py, learner.py or replay.py."""
    return str(PACKAGE / "roles" / name)
