"""The memory that this process may still take: free memory of the machine, within the limits of its control groups."""

from collections.abc import Iterator
from pathlib import Path

import psutil

from apexrl.control_groups import SELF, groups_of

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
