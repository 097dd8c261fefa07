"""The status file says how far a run is. The learner replaces it every few seconds for readers such as the launcher."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from apexrl.errors import ConfigError
from apexrl.files import read_json
from apexrl.networks.headers import Counters
from apexrl.runs import STATUS_FILE
from apexrl.types import Count, Name

LAST_EVALUATION = "the evaluation of the last network"  # a learner waits for it at the end of its run


class Status(msgspec.Struct, frozen=True):
    """The content of STATUS_FILE. The learner writes it, readers watch the run by it."""

    env: Name
    frames: Count
    counters: Counters
    metrics: dict[str, float]
    waits_for: str


def read_status(directory: Path) -> Status | None:
    """Returns the newest status of a run, None when there is none yet or it cannot be read."""
    with contextlib.suppress(ConfigError):
        return read_json(directory / STATUS_FILE, Status)
    return None


class Statuses:
    """The statuses of a run from now on. A file that stays as it is now is of an earlier start, whatever clocks say."""

    def __init__(self, directory: Path, clock: Callable[[], float] = time.monotonic):
        self._directory, self._clock = directory, clock
        self._before = self._stamp = self._look()
        self._changed_at = clock()

    def newest(self) -> Status | None:
        """Returns the newest status, None when there is none yet or it cannot be read."""
        if (stamp := self._look()) != self._stamp:
            self._stamp, self._changed_at = stamp, self._clock()
        return None if stamp == self._before else read_status(self._directory)

    def age_seconds(self) -> float:
        """Returns for how long `newest` has found no other file."""
        return self._clock() - self._changed_at

    def _look(self) -> tuple[int, int] | None:
        with contextlib.suppress(OSError):
            found = (self._directory / STATUS_FILE).stat()
            return found.st_ino, found.st_mtime_ns
        return None
