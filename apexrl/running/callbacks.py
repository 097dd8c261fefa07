"""A role that calls code of the user's own with the news of a run: `python -m apexrl.running.callbacks DIRECTORY NAME`.

It reads the files of the run, so that a callback that is slow costs the learner nothing. An object that the name makes
has any of two methods, `on_status(status)` and `on_evaluation(evaluation)`; the run ends where one returns True.
"""

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from apexrl.errors import ConfigError, reason_of
from apexrl.learning.record.status_file import Status, Statuses
from apexrl.lifecycle import Stop, run_role
from apexrl.own_modules import own
from apexrl.runs import CURVE_FILE, CurvePoint, read_evaluations

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.5


class News:
    """The statuses and evaluations of a run that come from now on, each once."""

    def __init__(self, directory: Path):
        """Raises: ConfigError when the evaluations so far cannot be read: all of them would be news later."""
        self._directory = directory
        self._statuses = Statuses(directory)
        self._status: Status | None = None
        self._stamp = 0  # of the curve that was read last
        self._told = set(self._evaluations())

    def __call__(self) -> Iterator[Status | CurvePoint]:
        """Yields what is new since the last call: evaluations, then the newest status."""
        try:
            evaluations = self._evaluations()
        except ConfigError as error:  # the learner writes the file whole again with the next one
            logger.warning("%s", error)
            evaluations = []
        for evaluation in evaluations:
            if evaluation not in self._told:
                self._told.add(evaluation)
                yield evaluation
        status = self._statuses.newest()
        if status is not None and status != self._status:
            self._status = status
            yield status

    def _evaluations(self) -> list[CurvePoint]:
        path = self._directory / CURVE_FILE
        try:
            stamp = path.stat().st_mtime_ns
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
        if stamp == self._stamp:
            return []
        self._stamp = stamp
        return read_evaluations(path)


Callback = Callable[[Any], object]


def is_end(news: News, on_status: Callback | None, on_evaluation: Callback | None) -> bool:
    """Gives all news to two functions; returns whether one returned True (or numpy's True), which ends the run."""
    for item in news():
        called = on_evaluation if isinstance(item, CurvePoint) else on_status
        found = None if called is None else called(item)
        if isinstance(found, bool | np.bool_) and found:
            return True
    return False


def main(stop: Stop) -> None:
    """Follows a run until told to stop, then looks once more; ends by itself where the callback ends the run."""
    directory, name = Path(sys.argv[1]), sys.argv[2]
    news = News(directory)
    try:
        callback = own(name, "--callback")(directory)
        called = getattr(callback, "on_status", None), getattr(callback, "on_evaluation", None)
        if called == (None, None):
            raise ConfigError("it has neither on_status nor on_evaluation: give it one of these methods")
        while not is_end(news, *called):
            if stop.wait(LOOK_SECONDS):
                is_end(news, *called)
                return
    except ConfigError:
        raise
    except Exception as error:  # somebody else's code may raise anything
        raise ConfigError(f"--callback {name} failed: {reason_of(error)}") from error


if __name__ == "__main__":
    run_role("callback", main)
