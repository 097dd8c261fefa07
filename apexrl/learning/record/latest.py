"""The checkpoint that a run goes on from, and results that would be lost without one."""

import os
from pathlib import Path

import msgspec

from apexrl.errors import ApexError, ConfigError
from apexrl.files import read_json
from apexrl.networks.checkpoint import Checkpoint, all_finite, load_checkpoint
from apexrl.networks.headers import BEST, CHECKPOINTS, latest_path, numbered_checkpoints
from apexrl.runs import CURVE_FILE, STATUS_FILE, SUMMARY_FILE


class _Summary(msgspec.Struct):
    updates: int = 0


def latest_checkpoint(directory: Path) -> Checkpoint | None:
    """Returns the checkpoint that a run directory continues from, None when it has neither a checkpoint nor results.

    Raises: ConfigError when the checkpoint is damaged or not finite, or missing beside results that a new network would
      replace.
    """
    path = latest_path(directory)
    anew = f"train a new network on the run's experience (--resume {directory} --from-scratch)"
    choice = f"put a sound copy there, or {anew}"
    if path.exists():
        try:
            checkpoint = load_checkpoint(path)
        except ApexError as error:
            raise ConfigError(f"{path} cannot be continued ({error}): {choice}") from error
        if not all_finite(checkpoint.tensors):
            raise ConfigError(f"{path} holds values that are not finite: {choice}")
        return checkpoint
    if (result := result_in(directory)) is not None:
        raise ConfigError(f"{path} is missing, and {result} is there: {choice}")
    return None


def result_in(directory: Path) -> Path | None:
    """Returns a file that tells of a learner's work in a run directory, but the latest checkpoint; None without any."""
    files = (directory / CHECKPOINTS / BEST, directory / CURVE_FILE, directory / STATUS_FILE)
    found = [*numbered_checkpoints(directory), *(path for path in files if path.exists())]
    summary = directory / SUMMARY_FILE
    if found:
        return found[0]
    return summary if _has_learned(summary) else None


def _has_learned(summary: Path) -> bool:
    """Returns whether a summary tells of updates; a run that failed before its first one has a summary, too."""
    try:
        return os.path.lexists(summary) and read_json(summary, _Summary).updates > 0
    except ConfigError:  # nobody knows
        return True
