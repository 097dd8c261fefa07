"""The processes that a dead process leaves: simulators, which its environments started and cannot end any more.

A process group ends with one signal. A simulator in a session of its own is in another group, and when its parent is
dead nothing tells whose it was. So a supervisor gives each process that it starts a mark in its environment variables,
which whatever that process starts inherits.
"""

import contextlib
import os
import secrets
import signal
import subprocess
from collections.abc import Iterable

import psutil

MARK_VARIABLE = "APEXRL_MARK"
REAP_SECONDS = 10.0  # until the kernel has released a process that was killed
MOST_LOOKS = 5  # a process may start another one while we look


def new_mark() -> str:
    """Returns a mark for a process that we start. It goes on from our own, so marks tell who started whom."""
    return f"{os.environ.get(MARK_VARIABLE, '')}/{secrets.token_hex(8)}"


def kill_marked(*marks: str, also_nested: bool) -> None:
    """Kills all processes with one of these marks, as far as we may.

    Args:
      also_nested: those with marks that go on from these, too: of the roles that such a process has started.
    """
    beginnings = tuple(f"{mark}/" for mark in marks if also_nested)

    def is_marked(process: psutil.Process) -> bool:
        mark = _mark_of(process)
        return bool(mark) and (mark in marks or mark.startswith(beginnings))

    for _ in range(MOST_LOOKS):
        found = [*filter(is_marked, _all_processes())]
        _kill(found)
        if not found:
            return


def kill_group(group: int) -> None:
    """Kills all processes of a group, as far as there are any and we may."""
    with contextlib.suppress(OSError):
        os.killpg(group, signal.SIGKILL)


def kill_family(process: subprocess.Popen[bytes]) -> None:
    """Kills a process that leads a group, its descendants, and all that it left in its group; waits for its end."""
    family = with_descendants(process.pid) if process.poll() is None else []
    kill_group(process.pid)
    _kill(family)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(REAP_SECONDS)


def with_descendants(pid: int) -> list[psutil.Process]:
    """Returns a living process, those that it has started, and those that they have."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except (psutil.Error, OSError):  # it is gone, or no file descriptor is left to look
        return []


def kill_descendants() -> None:
    """Kills all processes that this one has started, for a process that ends without its environments' `close`."""
    _kill(with_descendants(os.getpid())[1:])


def _kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


def _all_processes() -> list[psutil.Process]:
    try:
        return list(psutil.process_iter())
    except (psutil.Error, OSError):  # as above
        return []


def _mark_of(process: psutil.Process) -> str:
    """Returns the mark of a process, empty without one."""
    try:
        return process.environ().get(MARK_VARIABLE, "")
    except (psutil.Error, OSError):  # it has just ended, or is another user's
        return ""
