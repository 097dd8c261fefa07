"""The memory that this process may still take, within the limits of its control groups, and what it keeps of it."""

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path

import psutil

from apexrl.control_groups import SELF, groups_of

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h

# For each file system type: the files with a group's limit and use, and the name of the line with its file cache.
FILES = {
    "cgroup2": ("memory.max", "memory.current", "inactive_file"),
    "cgroup": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def free_memory_bytes(memory_gb: float = 0.0, process: Path = SELF) -> int:
    """Returns the bytes that this process may still take: `memory_gb` if it is not 0, else the free memory found."""
    if memory_gb:
        return int(memory_gb * 1e9)
    return max(min([psutil.virtual_memory().available, *_left_by_groups(process)]), 0)


def _left_by_groups(process: Path) -> Iterator[int]:
    """Yields the bytes left under each limit, from the process's group up to the root."""
    for kind, directory in groups_of("memory", process):
        limit_file, used_file, cache_line = FILES[kind]
        limit, used = _number(directory / limit_file), _number(directory / used_file)
        if limit is not None and used is not None:
            yield limit - used + _cached(directory / "memory.stat", cache_line)


def _number(path: Path) -> int | None:
    """Returns the number in a file, None when it has none, for example `max`."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _cached(path: Path, name: str) -> int:
    """Returns the bytes of file cache that the kernel frees before a group runs out of memory."""
    try:
        numbers = dict(line.split() for line in path.read_text().splitlines())
        return int(numbers.get(name, 0))
    except (OSError, ValueError):
        return 0


def keep_freed_memory() -> None:
    """Makes glibc keep the freed memory of tensors for later ones instead of returning it to the kernel.

    A batch of screens has some megabytes. Fresh pages for each of its tensors cost as much as the arithmetic (measured:
    docs/log/learner.md). Without glibc the function does nothing.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(_M_MMAP_THRESHOLD, 32 * 2**20)  # the largest that glibc takes
        mallopt(_M_TRIM_THRESHOLD, 1 * 2**30)
        mallopt(_M_TOP_PAD, 64 * 2**20)
