"""Times that go on evenly where somebody sets the clock, or where this process stands still for a while."""

import functools
import os
import time
from collections.abc import Callable

LONGEST_LOOK_SECONDS = 2.0
EPOCH_VARIABLE = "APEXRL_EPOCH"


@functools.cache
def epoch() -> float:
    """Returns the wall clock where the monotonic one was 0, as the process saw it that has started this one.

    So a role that starts again later agrees with the others about when the run ends, whatever became of the clock.
    """
    return float(os.environ.get(EPOCH_VARIABLE) or time.time() - time.monotonic())


def time_of_day() -> float:
    """Returns the seconds since 1970, which go on evenly where somebody sets the clock, and stand while we sleep."""
    return epoch() + time.monotonic()


class Absence:
    """Counts the seconds for which somebody has been away. A look adds a few at most.

    So the time in which this process was stopped itself, or its machine slept, is nobody's absence. One owner.
    """

    def __init__(self) -> None:
        self._seconds, self._looked = 0.0, time.monotonic()

    def look(self, is_away: bool) -> float:
        """Returns the seconds of the absence so far, 0 where there is none."""
        now = time.monotonic()
        self._seconds = self._seconds + min(now - self._looked, LONGEST_LOOK_SECONDS) if is_away else 0.0
        self._looked = now
        return self._seconds


class Allowance:
    """So much at once, and so much a second after that, of bytes or of messages. One owner."""

    def __init__(self, at_once: float, per_second: float, clock: Callable[[], float] = time.monotonic):
        self._at_once, self._per_second, self._clock = at_once, per_second, clock
        self._left, self._then = at_once, clock()

    def takes(self, much: int) -> bool:
        """Takes this off what is left; returns False where that is less."""
        now = self._clock()
        self._left = min(self._left + (now - self._then) * self._per_second, self._at_once)
        self._then = now
        if much > self._left:
            return False
        self._left -= much
        return True
