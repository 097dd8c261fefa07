"""The status file says how far a run is. The learner replaces it every few seconds for readers such as the launcher."""

import contextlib
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


def read_status(directory: Path, since: float = 0.0) -> Status | None:
    """Returns the newest status of a run, None when there is none yet or it cannot be read.

    Args:
      since: seconds since 1970; an older status is of an earlier start.
    """
    path = directory / STATUS_FILE
    with contextlib.suppress(OSError, ConfigError):
        if path.stat().st_mtime >= since:
            return read_json(path, Status)
    return None
