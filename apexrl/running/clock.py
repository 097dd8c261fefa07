"""The clock decides when a run is over. A smoke run ends when everything has happened once, or at its deadline."""

from collections.abc import Callable

from apexrl.clocks import time_of_day
from apexrl.config.commands import RunCommand
from apexrl.networks.headers import Counters

SMOKE_DEADLINE_SECONDS = 600.0


class Clock:
    """The time limit of a run. A smoke run's limit counts from its first frame: a slow machine starts slowly.

    It goes by the time of day, as the learner does, which knows when the run ends.
    """

    def __init__(self, command: RunCommand, clock: Callable[[], float] = time_of_day, began_at: float | None = None):
        """Begins now, or when the run began, in seconds since 1970."""
        self._max_seconds = command.max_seconds
        self._is_smoke = command.smoke
        self._clock, self.began_at = clock, clock() if began_at is None else began_at
        self._first_frame: float | None = None

    def elapsed(self) -> float:
        """Returns the seconds since the start."""
        return self._clock() - self.began_at

    @property
    def ends_at(self) -> float:
        """When the run ends by its time, in seconds since 1970; 0 where it does not."""
        return self.began_at + self._max_seconds if self._max_seconds and not self._is_smoke else 0.0

    def is_over(self, counters: Counters) -> bool:
        """True when the run's time is up; for a smoke run, see the module."""
        elapsed = self.elapsed()
        if not self._is_smoke:
            return bool(self._max_seconds) and elapsed >= self._max_seconds
        if counters.transitions_inserted and self._first_frame is None:
            self._first_frame = elapsed
        if elapsed >= SMOKE_DEADLINE_SECONDS:
            return True
        if self._first_frame is None or elapsed - self._first_frame < self._max_seconds:
            return False
        return not what_is_missing(counters)


def what_is_missing(counters: Counters) -> list[str]:
    """Returns the steps that a run has not taken yet: inserted, sampled, learned, evaluated."""
    done = {
        "inserted": counters.transitions_inserted,
        "sampled": counters.transitions_sampled,
        "learned": counters.updates,
        "evaluated": counters.evaluation_episodes,
    }
    return [name for name, count in done.items() if not count]
