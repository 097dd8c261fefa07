"""Python processes that this one starts: they find this package from any directory, and end when this process is gone.

They do the latter themselves, by `lifecycle.end_with_parent`.
"""

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from apexrl.clocks import EPOCH_VARIABLE, epoch

PACKAGE = Path(__file__).resolve().parent
PARENT_VARIABLE = "APEXRL_PARENT"  # holds the process id of the one that has started this process


def start_child(arguments: Sequence[str], variables: Mapping[str, str], **options: Any) -> subprocess.Popen[bytes]:
    """Starts Python in a session of its own: Ctrl-C reaches this process alone, which ends the others in order.

    With `-P` no file of the working directory takes the place of a module. The session has our niceness, so that
    `nice bash run.sh` makes way for the programs beside it.

    Args:
      variables: of its environment, beside ours.
      options: of `Popen`; without them it has no input, and our output.
    """
    settings: dict[str, Any] = {"stdin": subprocess.DEVNULL, "start_new_session": True} | options
    environment = {**child_environment(), EPOCH_VARIABLE: repr(epoch()), **variables}
    child = subprocess.Popen([sys.executable, "-P", *arguments], env=environment, **settings)
    if settings["start_new_session"] and (niceness := os.nice(0)) > 0:
        make_session_nice(child.pid, niceness)
    return child


def make_session_nice(leader: int, niceness: int) -> None:
    """Lowers the priority of the session that a process leads, where Linux shares out the time by sessions (autogroup).

    There the niceness of a process counts for nothing against other sessions. Linux lets users, all together, change a
    session each tenth of a second, so this may take two seconds; a kernel without autogroups is left as it is.
    """
    for _ in range(20):
        try:
            Path(f"/proc/{leader}/autogroup").write_text(str(niceness))
        except BlockingIOError:  # somebody else has just changed one
            time.sleep(0.1)
        except OSError:
            return
        else:
            return


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
