"""How much memory this process may still take: what the machine has free, and what its control groups leave of that."""

from collections.abc import Iterator
from pathlib import Path

import psutil

# By the type of the mounted file system: the files with a group's limit and use, and the line of its file cache.
FILES = {
    "cgroup2": ("memory.max", "memory.current", "inactive_file"),
    "cgroup": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def free_memory_bytes(memory_gb: float = 0.0, process: Path = Path("/proc/self")) -> int:
    """Returns the bytes that may still be taken: `memory_gb` where it is not 0, else what is found to be free."""
    if memory_gb:
        return int(memory_gb * 1e9)
    return max(min([psutil.virtual_memory().available, *_left_by_groups(process)]), 0)


def _left_by_groups(process: Path) -> Iterator[int]:
    """Yields what each limit on the way from the process's group to the root leaves; nothing where there is none."""
    for kind, top, group in _memory_groups(process):
        limit_file, used_file, cache_line = FILES[kind]
        for directory in (group, *group.parents):
            limit, used = _number(directory / limit_file), _number(directory / used_file)
            if limit is not None and used is not None:
                yield limit - used + _cached(directory / "memory.stat", cache_line)
            if directory == top:
                break


def _memory_groups(process: Path) -> Iterator[tuple[str, Path, Path]]:
    """Yields kind, mount point and directory of the groups of the process that may limit its memory."""
    try:
        mounts = [line.split() for line in (process / "mountinfo").read_text().splitlines()]
        groups = [line.split(":", 2) for line in (process / "cgroup").read_text().splitlines()]
    except OSError:  # not Linux
        return
    for mount in mounts:
        root, top = mount[3], Path(mount[4])
        kind, _, options = mount[mount.index("-") + 1 :]
        for _, controllers, path in groups:
            is_memory = "memory" in controllers.split(",") and "memory" in options.split(",")
            if (kind == "cgroup2" and not controllers) or (kind == "cgroup" and is_memory):
                # Inside a container the path may be that of the host, of which only the part below the root is seen.
                below = Path(path).relative_to(root) if Path(path).is_relative_to(root) else Path()
                yield kind, top, top / below


def _number(path: Path) -> int | None:
    """Returns the number in a file; None where there is none, as in one that says `max`."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _cached(path: Path, name: str) -> int:
    """Returns the bytes of files that the kernel gives up before it lets a group run out of memory."""
    try:
        numbers = dict(line.split() for line in path.read_text().splitlines())
        return int(numbers.get(name, 0))
    except (OSError, ValueError):
        return 0
