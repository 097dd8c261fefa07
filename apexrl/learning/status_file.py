"""The status file: how far a run is, for whoever watches it. The learner replaces it every few seconds."""

import contextlib
from pathlib import Path

import msgspec

from apexrl.networks.checkpoint import Counters

STATUS_FILE = "status.json"


class Status(msgspec.Struct, frozen=True):
    """What the learner writes to STATUS_FILE for whoever watches the run."""

    env: str
    frames: int
    counters: Counters
    figures: dict[str, float]
    waits_for: str


def read_status(directory: Path) -> Status | None:
    """Returns the newest status of a run, None when there is none yet."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode((directory / STATUS_FILE).read_bytes(), type=Status)
    return None
