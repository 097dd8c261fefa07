"""A deadline for the calls of environments: foreign code that never returns would stop its actor without a word."""

import contextlib
import logging
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from apexrl.errors import ApexError, reason_of
from apexrl.leftovers import kill_descendants
from apexrl.lifecycle import end_at_once

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAKING = "its making"
LOOKS = 20  # of the watchdog during one deadline
LONGEST_PAUSE_SECONDS = 5.0


class Watchdog:
    """Ends the process when a call of one of its environments does not return before the deadline.

    One thread makes the calls. A second one looks whether the same call goes on; it counts its looks, so the time of a
    process that is stopped does not count. Code that never lets other threads run cannot be noticed.
    """

    def __init__(self, env: str, deadline_seconds: float, making_seconds: float = 0.0):
        """Watches nothing before `start`.

        Args:
          deadline_seconds: of a call; 0: none.
          making_seconds: of the call that makes an environment; 0: none.
        """
        self.env = env
        self._deadline_seconds, self._making_seconds = deadline_seconds, making_seconds
        self._calls = 0
        self._going_on = (0, "")  # number and name of the call, 0 between two
        self._seen = 0  # the number of the call at the last look
        self._seen_seconds = 0.0
        self._closed = threading.Event()

    def start(self) -> None:
        """Begins to watch the calls of this thread."""
        if self._deadline_seconds or self._making_seconds:
            caller = threading.get_ident()
            threading.Thread(target=self._watch, args=(caller,), name="watchdog", daemon=True).start()

    def call(self, name: str, function: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """Calls a function of an environment, and returns its result.

        Raises: ApexError when it would end the process.
        """
        try:
            with self.watching(name):
                return function(*arguments, **named)
        except (SystemExit, KeyboardInterrupt) as error:
            raise ApexError(
                f"environment {self.env!r} ended its process in {'' if name == MAKING else 'a '}{name} "
                f"({reason_of(error)}): it should end the "
                "episode, or raise an error"
            ) from error

    @contextlib.contextmanager
    def watching(self, name: str) -> Iterator[None]:
        """Watches what goes on within it as a call of that name."""
        self._calls += 1
        self._going_on = (self._calls, name)
        try:
            yield
        finally:
            self._going_on = (0, "")

    def close(self) -> None:
        """Watches no longer."""
        self._closed.set()

    def look(self, pause_seconds: float) -> float:
        """Looks, a pause after the look before; returns for how many seconds it has seen one call."""
        number, _ = self._going_on
        self._seen_seconds = self._seen_seconds + pause_seconds if number and number == self._seen else 0.0
        self._seen = number
        return self._seen_seconds

    def _watch(self, caller: int) -> None:
        shortest = min(filter(None, (self._deadline_seconds, self._making_seconds)))
        pause = min(shortest / LOOKS, LONGEST_PAUSE_SECONDS)
        while not self._closed.wait(pause):
            seconds = self.look(pause)
            deadline = self._making_seconds if self._going_on[1] == MAKING else self._deadline_seconds
            if deadline and seconds >= deadline:
                self._end(seconds, caller)

    def _end(self, seconds: float, caller: int) -> None:
        frame = sys._current_frames().get(caller)
        logger.error("the call that does not return:\n%s", "".join(traceback.format_stack(frame)))
        name = self._going_on[1]
        flag = "--patience-seconds" if name == MAKING else "--step-deadline-seconds"
        logger.error(
            "environment %r has not returned from %s for %.0f s: mend it, or give more %s",
            self.env, name, seconds, flag,
        )  # fmt: skip
        kill_descendants()  # no environment is closed
        end_at_once(1)
