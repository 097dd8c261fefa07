"""Supervision of child processes: it starts, watches and stops them, and restarts each a bounded number of times."""

import dataclasses
import logging
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

from apexrl.children import start_child
from apexrl.errors import ConfigError, PeerError, PeerTimeout
from apexrl.leftovers import MARK_VARIABLE, kill_family, kill_group, kill_marked, new_mark
from apexrl.lifecycle import PASSING_ERRNOS, PATIENCE_STATUS, PERMANENT_STATUS, TEMPORARY_STATUS, TOLD_STATUS
from apexrl.running.activity import Activity
from apexrl.running.last_words import MAX_LOG_BYTES, FromLog, FromPipe, without_numbers

logger = logging.getLogger(__name__)

LONG_LIFE_SECONDS = 600.0  # a child that lived longer has its earlier deaths forgiven
SHORT_LIFE_SECONDS = 30.0  # a child that dies sooner, twice with the same error, is given up
LONGEST_PAUSE_SECONDS = 5.0
STOP_LIMIT_SECONDS = 60.0
POLL_SECONDS, LOOK_SECONDS, SAY_SECONDS = 0.1, 1.0, 5.0


@dataclasses.dataclass(eq=False)
class Child:
    """One role: its command, its process, and how often it was started again."""

    name: str
    arguments: Sequence[str]
    is_needed: bool
    may_finish: bool
    words: FromLog | FromPipe
    peers_come_back: bool = True
    process: subprocess.Popen[bytes] | None = None
    mark: str = dataclasses.field(default_factory=new_mark)  # of the newest process, and of all that it starts
    started_at: float = 0.0
    start_at: float = 0.0
    restarts: int = 0
    recent_deaths: int = 0
    fault: str = ""  # the error of a life shorter than SHORT_LIFE_SECONDS
    is_given_up: bool = False

    def start(self) -> None:
        """Starts the process."""
        self.started_at = time.monotonic()
        self.mark = new_mark()
        with self.words.outputs() as (stdout, stderr):
            self.process = start_child(self.arguments, {MARK_VARIABLE: self.mark}, stdout=stdout, stderr=stderr)
        self.words.follow(self.process)

    @property
    def status(self) -> int | None:
        """The exit status, None while the process runs or waits to be started again."""
        return None if self.process is None else self.process.poll()

    def last_words(self, status: int) -> str:
        """Returns the last line of a process that ended with this status; empty when no error of its own ended it."""
        return "" if status in (0, TOLD_STATUS, -signal.SIGTERM, -signal.SIGKILL) else self.words.last()

    @property
    def newest_line(self) -> str:
        """The last line in its log by the process that runs now; empty before the first, and without a log."""
        return self.words.last() if isinstance(self.words, FromLog) else ""

    def ask_to_end(self) -> None:
        """Sends SIGTERM."""
        if self.process is not None:
            self.process.terminate()

    def bury(self) -> None:
        """Kills what a process that has ended left behind. Roles that it supervised notice its end by themselves."""
        if self.process is not None:
            kill_group(self.process.pid)
            kill_marked(self.mark, also_nested=False)
            self.process = None

    def kill(self) -> None:
        """Kills the process, its descendants, and all that it left in its process group."""
        if self.process is None:
            return
        kill_family(self.process)
        self.words.drain()


class Supervisor:
    """Owns the children. Call `watch` regularly, and `stop` at the end, also after an error.

    Args:
      max_restarts: of each child.
      echoes: children with a log write to our stderr, too.
      max_log_bytes: of each log; as much again stays beside it.
    """

    def __init__(self, max_restarts: int, echoes: bool = False, max_log_bytes: int = MAX_LOG_BYTES):
        self.children: dict[str, Child] = {}
        self._max_restarts = max_restarts
        self._echoes = echoes
        self._max_log_bytes = max_log_bytes

    @property
    def num_restarts(self) -> int:
        """The number of restarts of all children."""
        return sum(child.restarts for child in self.children.values())

    def start(
        self,
        name: str,
        arguments: Sequence[str],
        is_needed: bool = True,
        may_finish: bool = False,
        log: Path | None = None,
        peers_come_back: bool = True,
    ) -> None:
        """Starts a child: a Python script or module with its arguments.

        Args:
          is_needed: the run cannot go on without this child. A child that is not needed is given up when it dies too
            often.
          may_finish: the child may end by itself with status 0. Any other child that ends is started again.
          log: the file of its output; by default the output goes to ours.
          peers_come_back: they are started again when they end, and so is a child that has lost its patience with them.
        """
        words: FromPipe | FromLog = FromPipe(log, self._max_log_bytes)
        if log is not None and not self._echoes:
            words = FromLog(log, self._max_log_bytes)
        self.children[name] = Child(name, arguments, is_needed, may_finish, words, peers_come_back)
        self.children[name].start()

    def bound_logs(self) -> None:
        """Cuts logs that have become too long. `watch` and `stop` do, too."""
        for child in self.children.values():
            child.words.bound()

    def watch(self) -> list[str]:
        """Restarts children that died; returns the names of those that finished (`may_finish`, status 0).

        Raises: ConfigError when a child that is needed cannot work, PeerError when it dies again and again, PeerTimeout
          when it has lost its patience with peers that do not come back.
        """
        finished = []
        now = time.monotonic()
        for child in self.children.values():
            for line in child.words.news():
                logger.warning("%s: %s", child.name, line)
            child.words.bound()
            status = child.status
            if child.process is None:
                if now >= child.start_at and not child.is_given_up:
                    self._start_again(child, now)
            elif status == 0 and child.may_finish:
                finished.append(child.name)
            elif status is not None:
                self._bury(child, status, now)
        return finished

    def _start_again(self, child: Child, now: float) -> None:
        """Starts a child that has ended. When the system has no process or file left for it, it is tried again."""
        try:
            child.start()
        except OSError as error:
            if error.errno not in PASSING_ERRNOS:
                raise
            fault = f"{child.name} cannot be started ({error.strerror})"
            child.recent_deaths += 1
            if child.recent_deaths > self._max_restarts:
                self._give_up(child, PeerError(f"{fault}, after {child.restarts} restarts"))
            else:
                logger.warning("%s: again in %.0f s", fault, LONGEST_PAUSE_SECONDS)
                child.start_at = now + LONGEST_PAUSE_SECONDS

    def _bury(self, child: Child, status: int, now: float) -> None:
        """Plans the restart of a child that has ended, or gives it up. Its simulators end first."""
        lived_seconds = now - child.started_at
        child.bury()
        child.recent_deaths = 1 if lived_seconds > LONG_LIFE_SECONDS else child.recent_deaths + 1
        words = child.last_words(status)
        ended = f"{child.name} ended with {describe_status(status)}" + (f": {words}" if words else "")
        died_at_once = lived_seconds < SHORT_LIFE_SECONDS and status > 0 and status != TEMPORARY_STATUS
        fault = without_numbers(words) if died_at_once else ""
        is_the_same, child.fault = bool(fault) and fault == child.fault, fault
        if status == PERMANENT_STATUS:
            self._give_up(child, ConfigError(ended))
        elif status == PATIENCE_STATUS and not child.peers_come_back:
            self._give_up(child, PeerTimeout(ended))
        elif is_the_same:
            self._give_up(child, PeerError(f"{ended}, twice in a row"))
        elif child.recent_deaths > self._max_restarts:
            self._give_up(child, PeerError(f"{ended}, after {child.restarts} restarts"))
        else:
            child.restarts += 1
            pause = min(0.25 * 2**child.recent_deaths, LONGEST_PAUSE_SECONDS)
            logger.warning("%s; restart %d in %.1f s", ended, child.restarts, pause)
            child.start_at = now + pause

    def _give_up(self, child: Child, error: ConfigError | PeerError) -> None:
        if child.is_needed:
            raise error
        logger.error("%s: the run goes on without it", error)
        child.is_given_up = True

    def stop(
        self,
        names: Sequence[str],
        idle_seconds: float,
        limit_seconds: float = STOP_LIMIT_SECONDS,
        hurried: Callable[[], bool] = lambda: False,
        repeats: Collection[str] = (),
    ) -> None:
        """Asks the named children to end, all at once, and returns when all of them have ended.

        Args:
          idle_seconds: a child that does nothing for so long is killed.
          limit_seconds: a child that has not ended by then is killed, even if it still works.
          hurried: returns true when the user waits no longer; all children are killed then.
          repeats: names of those that are asked again and again: foreign code may ignore signals for a moment.
        """
        children = [self.children[name] for name in names if name in self.children]
        for child in children:
            child.ask_to_end()
        ending = {child: Activity(child.process.pid) for child in children if child.process is not None}
        started = looked = said = time.monotonic()
        while ending := {child: activity for child, activity in ending.items() if child.status is None}:
            now = time.monotonic()
            self.bound_logs()
            if hurried():
                _kill(ending, "")
            elif now - started >= limit_seconds:
                _kill(ending, f" did not end in {limit_seconds:.0f} s")
            elif now - looked >= min(LOOK_SECONDS, idle_seconds):
                looked = now
                idle = [child for child, activity in ending.items() if activity.idle_seconds() >= idle_seconds]
                _kill(idle, f" did nothing for {idle_seconds:.0f} s")
            if now - said >= SAY_SECONDS:
                said = now
                for child in ending:
                    logger.info("%s is still ending, for %.0f s now", child.name, now - started)
            time.sleep(POLL_SECONDS)
            for child in ending:
                if child.name in repeats:
                    child.ask_to_end()
        kill_marked(*(child.mark for child in children), also_nested=True)  # the processes that they left behind
        for child in children:
            child.kill()


def _kill(children: Iterable[Child], reason: str) -> None:
    for child in children:
        logger.warning("%s%s: killed", child.name, reason)
        child.kill()


def describe_status(status: int) -> str:
    """Returns an exit status in words."""
    if status == TOLD_STATUS:
        return "a signal that told it to end"
    if status >= 0:
        return f"status {status}"
    names = {int(number): number.name for number in signal.Signals}
    return f"signal {names.get(-status, -status)}"
