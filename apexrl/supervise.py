"""Child processes: started, watched, started again a bounded number of times, and stopped within a deadline."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import IO

from apexrl.errors import PeerError
from apexrl.lifecycle import PARENT_VARIABLE

logger = logging.getLogger(__name__)

LONG_LIFE_SECONDS = 600.0  # who lived so long has its earlier deaths forgiven
LONGEST_PAUSE_SECONDS = 5.0


class Child:
    """One role: its command, its process, and how often it was started again."""

    def __init__(self, name: str, arguments: Sequence[str], is_needed: bool, may_finish: bool, log: IO[bytes] | None):
        self.name = name
        self.is_needed = is_needed
        self.may_finish = may_finish
        self.restarts = 0
        self.recent_deaths = 0
        self.is_given_up = False
        self.started_at = 0.0
        self.process: subprocess.Popen[bytes] | None = None
        self.start_at = 0.0
        self._arguments = list(arguments)
        self._environment = {**os.environ, PARENT_VARIABLE: str(os.getpid())}
        self._log = log

    def start(self) -> None:
        """Starts the process, in a group of its own: a Ctrl-C is for the supervisor, who stops the roles in order."""
        self.started_at = time.monotonic()
        self.process = subprocess.Popen(
            self._arguments,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )

    @property
    def status(self) -> int | None:
        """The exit status, None while the process runs or waits to be started again."""
        return None if self.process is None else self.process.poll()

    def signal(self, number: int) -> None:
        """Signals the process and, for SIGKILL, its group."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            if number == signal.SIGKILL:
                os.killpg(self.process.pid, number)
            else:
                self.process.send_signal(number)


class Supervisor:
    """Owns the children. Call `watch` regularly, and `stop` at the end, whatever happened."""

    def __init__(self, max_restarts: int):
        self.children: dict[str, Child] = {}
        self._max_restarts = max_restarts

    @property
    def num_restarts(self) -> int:
        """How often any child was started again."""
        return sum(child.restarts for child in self.children.values())

    def start(
        self,
        name: str,
        arguments: Sequence[str],
        is_needed: bool = True,
        may_finish: bool = False,
        log: IO[bytes] | None = None,
    ) -> None:
        """Starts a child: a Python script or module with its arguments.

        Args:
          is_needed: the run cannot go on without it; one that is not needed is given up when it dies too often.
          may_finish: it may end by itself with status 0; any other child that ends is started again.
        """
        self.children[name] = Child(name, [sys.executable, *arguments], is_needed, may_finish, log)
        self.children[name].start()

    def watch(self) -> list[str]:
        """Starts again what died; returns the names of the children that ended by themselves with status 0.

        Raises: PeerError when a child that is needed has died more often than it may.
        """
        finished = []
        now = time.monotonic()
        for child in self.children.values():
            status = child.status
            if child.process is None:
                if now >= child.start_at and not child.is_given_up:
                    child.start()
            elif status == 0 and child.may_finish:
                finished.append(child.name)
            elif status is not None:
                self._bury(child, status, now)
        return finished

    def _bury(self, child: Child, status: int, now: float) -> None:
        """Decides what becomes of a child that has ended."""
        lived_long = now - child.started_at > LONG_LIFE_SECONDS
        child.recent_deaths = 1 if lived_long else child.recent_deaths + 1
        ended = f"{child.name} ended with {describe_status(status)}"
        child.process = None
        if child.recent_deaths > self._max_restarts:
            if child.is_needed:
                raise PeerError(f"{ended}, after {child.restarts} restarts")
            logger.error("%s, after %d restarts: the run goes on without it", ended, child.restarts)
            child.is_given_up = True
            return
        child.restarts += 1
        pause = min(0.25 * 2**child.recent_deaths, LONGEST_PAUSE_SECONDS)
        logger.warning("%s; restart %d in %.1f s", ended, child.restarts, pause)
        child.start_at = now + pause

    def stop(self, names: Sequence[str], deadline_seconds: float) -> None:
        """Asks the named children to end, all at once, and kills those that have not at the deadline."""
        children = [self.children[name] for name in names if name in self.children]
        for child in children:
            child.signal(signal.SIGTERM)
        deadline = time.monotonic() + deadline_seconds
        for child in children:
            if child.process is None:
                continue
            try:
                child.process.wait(max(deadline - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                logger.warning("%s did not end in %.0f s: killed", child.name, deadline_seconds)
            child.signal(signal.SIGKILL)  # and whatever it left behind
            child.process.wait()


def describe_status(status: int) -> str:
    """Returns an exit status in words."""
    if status < 0:
        return f"signal {signal.Signals(-status).name}"
    return f"status {status}"
