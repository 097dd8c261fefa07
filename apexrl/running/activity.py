"""Activity of a process that has to end: CPU time and disk, of the process and of all its descendants."""

import time
from typing import NamedTuple

import psutil

from apexrl.leftovers import with_descendants

WORK_SECONDS = 0.05  # CPU time that counts as work; a process that only waits is killed before it has used so much


class Usage(NamedTuple):
    """The resources that a process and its descendants have used so far."""

    processes: frozenset[int]
    cpu_seconds: float
    disk_bytes: int
    is_at_disk: bool  # the kernel reads or writes for one of them right now


class Activity:
    """Measures for how long a process has done nothing."""

    def __init__(self, pid: int):
        self._pid = pid
        self._worked_at = time.monotonic()
        self._then = Usage(frozenset(), 0.0, 0, False)

    def idle_seconds(self) -> float:
        """Returns the time since the process last worked; call it about once a second."""
        now, usage = time.monotonic(), usage_of(self._pid)
        worked = usage.cpu_seconds - self._then.cpu_seconds >= WORK_SECONDS
        if worked or usage.is_at_disk or usage[::2] != self._then[::2]:
            self._worked_at, self._then = now, usage
        return now - self._worked_at


def usage_of(pid: int) -> Usage:
    """Returns the usage of a process, all zero when the process is gone."""
    processes, cpu_seconds, disk_bytes, is_at_disk = [], 0.0, 0, False
    for process in with_descendants(pid):
        try:
            times = process.cpu_times()
            is_at_disk |= process.status() == psutil.STATUS_DISK_SLEEP
            if hasattr(process, "io_counters"):  # not on every system
                counters = process.io_counters()
                disk_bytes += counters.read_bytes + counters.write_bytes
        except (psutil.Error, OSError):  # it has just ended, or is another user's
            continue
        processes.append(process.pid)
        cpu_seconds += times.user + times.system
    return Usage(frozenset(processes), cpu_seconds, disk_bytes, is_at_disk)
