"""The control groups that limit this process, of both versions: their quotas of CPU time, and the cores to use."""

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SELF = Path("/proc/self")


class Group(NamedTuple):
    """A control group that this process is in, or one around it."""

    kind: str  # the type of its file system: cgroup2, or cgroup
    directory: Path


def groups_of(controller: str, process: Path = SELF) -> Iterator[Group]:
    """Yields the groups that may limit a process by a controller, from its own up to the root."""
    try:
        mounts = [line.split() for line in _lines(process / "mountinfo")]
        groups = [line.split(":", 2) for line in _lines(process / "cgroup")]
    except OSError:  # not Linux
        return
    for mount in mounts:
        root, top = mount[3], Path(mount[4])
        kind, *_, options = mount[mount.index("-") + 1 :]
        for _, controllers, path in groups:
            is_limited = controller in controllers.split(",") and controller in options.split(",")
            if (kind == "cgroup2" and not controllers) or (kind == "cgroup" and is_limited):
                # Inside a container the path may be the host's. The container sees only the part below its root.
                below = Path(path).relative_to(root) if Path(path).is_relative_to(root) else Path()
                for directory in (top / below, *(top / below).parents):
                    yield Group(kind, directory)
                    if directory == top:
                        break


def _lines(file: Path) -> list[str]:
    """Returns the lines of a file that names others, whose names may be any bytes."""
    return [os.fsdecode(line) for line in file.read_bytes().split(b"\n") if line]


def cpu_quotas(process: Path = SELF) -> Iterator[float]:
    """Yields the CPU time that each group with a quota may use, in seconds a second."""
    for kind, directory in groups_of("cpu", process):
        try:
            if kind == "cgroup2":
                quota, period = (directory / "cpu.max").read_text().split()
            else:
                quota, period = ((directory / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            share = float(quota) / float(period)
        except (OSError, ValueError, ZeroDivisionError):  # no quota: no file, or `max`
            continue
        if share > 0:  # -1: no quota
            yield share


def num_cores(process: Path = SELF) -> int:
    """Returns the number of cores that this process may use, by its affinity and the quotas of its control groups."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(min([allowed, *map(math.ceil, cpu_quotas(process))]), 1)
