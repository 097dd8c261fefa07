"""The life of a process: a stop that signals set, threads whose errors end the program, logs, memory."""

import contextlib
import errno
import io
import json
import logging
import os
import resource
import secrets
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TextIO

import psutil

from apexrl.children import PARENT_VARIABLE, make_session_nice
from apexrl.errors import ApexError, ConfigError, KilledError, PeerTimeout
from apexrl.extras import why_missing
from apexrl.guard import check_not_imported
from apexrl.leftovers import kill_descendants
from apexrl.lines import TIME_FORM, log_to, printable, say

logger = logging.getLogger(__name__)

ORPHAN_SECONDS = 6.0  # a role whose supervisor is gone has so long to end by itself
HEED_SECONDS = 1.0
OWN_SIGNAL_SECONDS = 1.0  # after one process of several was told to end, in which the others have got their signals
THREADS_SECONDS = 2.0  # that threads of foreign code may hold up the end of a role
_SWITCH_SECONDS = 0.0005
FEW_CORES = 4  # up to which actors and the evaluator make way for the learner
NICENESS = 5  # a quarter of a core that is shared with one other process
ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"  # where torchrun looks for the error of a process that it started
PERMANENT_STATUS = 2  # exit status when a restart would fail again; also of a malformed command line
PATIENCE_STATUS = 69  # exit status when a peer was away for longer than the patience (EX_UNAVAILABLE of sysexits.h)
TEMPORARY_STATUS = 75  # exit status when the operating system may allow it later (EX_TEMPFAIL of sysexits.h)
MAX_OPEN_FILES = 65_536  # of a process; a hard limit may be a billion, and some programs close all that there might be
INTERRUPTED_STATUS = 130  # a shell's, of a program that Ctrl-C ended
TOLD_STATUS = 143  # a shell's, of a program that SIGTERM ended: of a role that a supervisor keeps
UNREAD_STATUS = 141  # a shell's, of a program that SIGPIPE ended
PASSING_ERRNOS = {  # a full disk, an address in use or not there yet, a lock, no memory or descriptors left
    *(errno.ENOSPC, errno.EDQUOT, errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EAGAIN),
    *(errno.ENOMEM, errno.EMFILE, errno.ENFILE),
}


def _ignore(*_: object) -> None:
    """Handles a signal whose number Python has written to a descriptor already."""


class Stop(threading.Event):
    """An event that is set when the process has to end. It keeps the first error and counts the signals."""

    def __init__(self) -> None:
        super().__init__()
        self.error: BaseException | None = None
        self.num_signals = 0
        self._wakeup: int | None = None  # the descriptor that Python writes the number of a signal to
        self._heeds_at = 0.0
        self._hang_up: Callable[[], None] | None = None

    def fail(self, error: BaseException) -> None:
        """Sets the stop because of an error. The first error is kept."""
        if self.error is None:
            self.error = error
        self.set()

    def told(self) -> None:
        """Sets the stop because of a signal."""
        self.num_signals += 1
        self.set()

    def on_signals(self) -> None:
        """Makes SIGINT and SIGTERM set the stop. Only scripts call this.

        A thread sets it, not a signal handler. A handler runs inside the main thread, which may hold the event's lock.
        """
        reading, self._wakeup = os.pipe()
        os.set_blocking(self._wakeup, False)
        self.heed_signals()

        def wait() -> None:
            while received := os.read(reading, 1):
                if received[0] == signal.SIGHUP and self._hang_up is not None:
                    self._hang_up()
                elif received[0] in (signal.SIGINT, signal.SIGTERM):  # foreign code may have handlers of others
                    self.told()

        self.thread(wait, "signals")

    def on_hang_up(self, act: Callable[[], None]) -> None:
        """Makes SIGHUP call a function, in the thread of the signals; without `on_signals`, nothing."""
        self._hang_up, self._heeds_at = act, 0.0
        self.heed_signals()

    def heed_signals(self) -> None:
        """Sets the handlers of `on_signals` again, which foreign code may have replaced; without that call, nothing.

        Call it again and again: a look takes microseconds. Handlers that are not Python's are replaced once a second.
        """
        now = time.monotonic()
        if self._wakeup is None or (now < self._heeds_at and signal.getsignal(signal.SIGTERM) is _ignore):
            return
        self._heeds_at = now + HEED_SECONDS
        signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if self._hang_up is not None else [])):
            signal.signal(number, _ignore)

    def thread(self, run: Callable[[], None], name: str) -> threading.Thread:
        """Starts a thread whose error ends the program."""

        def guarded() -> None:
            try:
                run()
            except BaseException as error:
                self.fail(error)

        thread = threading.Thread(target=guarded, name=name, daemon=True)
        thread.start()
        return thread


def run_role(role: str, main: Callable[[Stop], None], finalizes: bool = True) -> None:
    """Runs a role until it ends or is told to stop, and exits; on an error it logs the reason first.

    Args:
      finalizes: False where `end_at_once` has to end the process.
    """
    check_not_imported()
    log = open(os.dup(2), "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115 - until the end
    log_to(logging.StreamHandler(log), f"%(asctime)s {role}: %(message)s")
    logging.getLogger(__package__).setLevel(logging.INFO)  # foreign code may set another one for all
    allow_many_files()
    before = threading.enumerate()
    stop = Stop()
    stop.on_signals()
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # nohup has it ignored
        stop.on_hang_up(stop.told)
    parent = os.environ.get(PARENT_VARIABLE)  # before the role writes itself there, for its own children
    end_with_parent(stop, ORPHAN_SECONDS)
    status = run_program(lambda: _status_of(role, main, stop, log))
    if _is_gone(parent):
        kill_descendants()  # a supervisor would
    elif parent and stop.num_signals and not status:  # else a supervisor that did not ask takes it for finished
        status = TOLD_STATUS
    if not finalizes:
        end_at_once(status)
    _limit_threads(before, status)
    sys.exit(status)


def _status_of(role: str, main: Callable[[Stop], None], stop: Stop, log: TextIO) -> int:
    def tell(text: str) -> None:  # not to a logger: foreign code may have disabled it
        with contextlib.suppress(OSError):
            print(time.strftime(TIME_FORM), printable(f"{role}: {text}"), file=log)

    try:
        main(stop)
        if stop.error is not None:
            raise stop.error
    except ApexError as error:
        tell(str(error))
        if told := os.environ.get(ERROR_FILE_VARIABLE):
            with contextlib.suppress(OSError):  # the log has the error, and the status matters more
                Path(told).write_text(json.dumps({"message": str(error), "timestamp": int(time.time())}))
        return exit_status(error)
    except SystemExit:  # the command line asked for help, or was malformed
        raise
    except BaseException as error:
        if isinstance(error, BrokenPipeError) and _unread_streams():
            raise
        if isinstance(error, ModuleNotFoundError) and (cure := why_missing(error)):
            tell(cure)
            return PERMANENT_STATUS
        tell("".join([f"{role} failed\n", *traceback.format_exception(error)]).rstrip())
        return TEMPORARY_STATUS if getattr(error, "errno", None) in PASSING_ERRNOS else 1
    return 0


def _limit_threads(before: list[threading.Thread], status: int) -> None:
    """Ends the process after a while where new threads are left for which the interpreter would wait, maybe for ever.

    An environment may have started one and forgotten it.
    """
    if all(thread.daemon or thread in before for thread in threading.enumerate()):
        return
    end = threading.Timer(THREADS_SECONDS, end_at_once, [status])
    end.daemon = True
    end.start()


def run_program(main: Callable[[], int]) -> int:
    """Runs a program that prints; returns its exit status, UNREAD_STATUS when nobody reads its output any more.

    So `| head` ends it without a word, as other programs. An output that is full ends it with a line, and so does
    Ctrl-C. What an output's encoding lacks is an escape there.
    """
    check_not_imported()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr has it
    try:
        try:
            return main()
        finally:
            if not getattr(sys.stdout, "closed", True):  # foreign code may have closed it; daemons have none
                sys.stdout.flush()
    except ModuleNotFoundError as error:
        if not (cure := why_missing(error)):
            raise
        print(cure, file=sys.stderr)
        return PERMANENT_STATUS
    except KeyboardInterrupt:
        print("stopped before its end", file=sys.stderr)
        return INTERRUPTED_STATUS
    except OSError as error:
        is_full = error.errno == errno.ENOSPC
        lost = [1] if is_full else _unread_streams() if isinstance(error, BrokenPipeError) else []
        if not lost:
            raise
        for descriptor in lost:  # the interpreter flushes once more
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
        if not is_full:
            return UNREAD_STATUS
        print(f"cannot write: {error.strerror}", file=sys.stderr)
        return 1


def attempt(what: str, run: Callable[[], int]) -> int:
    """Runs a command for a person; returns its exit status, after a line that begins with `cannot WHAT` on an error."""
    try:
        return run()
    except BrokenPipeError:  # the reader of our output has left
        raise
    except (ApexError, OSError) as error:
        say(f"cannot {what}: {error}", file=sys.stderr)
        return exit_status(error)


def _unread_streams() -> list[int]:
    """Returns the descriptors, of standard output and error, whose reader has left."""
    poll = select.poll()
    for descriptor in (1, 2):
        poll.register(descriptor, 0)
    return [descriptor for descriptor, event in poll.poll(0) if event & select.POLLERR]


def end_at_once(status: int) -> NoReturn:
    """Ends the process without the interpreter's finalization, which a thread of a library may turn into an abort.

    A process that has met others through gloo needs it: gloo's threads may hold a last tensor, and die with the process
    when they release it during the finalization (github.com/pytorch/pytorch/issues/190489).
    """
    with contextlib.suppress(Exception):  # foreign code may have closed or replaced them
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def exit_status(error: Exception) -> int:
    """Returns the exit status of an error, which says whether a restart can help."""
    if isinstance(error, KilledError) or getattr(error.__cause__, "errno", None) in PASSING_ERRNOS:
        return TEMPORARY_STATUS
    if isinstance(error, PeerTimeout):
        return PATIENCE_STATUS
    return PERMANENT_STATUS if isinstance(error, ConfigError) else 1


def end_with_parent(stop: Stop, patience_seconds: float) -> None:
    """Sets the stop when the supervisor that started this process is gone, and ends the process after the patience.

    Without a supervisor the function does nothing.
    """
    parent = os.environ.get(PARENT_VARIABLE)

    def watch() -> None:
        while not _is_gone(parent):  # after a stop, too: nobody else would end a role that hangs
            time.sleep(1.0)
        logger.warning("the supervisor is gone")
        stop.set()
        time.sleep(patience_seconds)
        kill_descendants()
        os._exit(1)

    if parent:
        stop.thread(watch, "parent")


def _is_gone(parent: str | None) -> bool:
    """Returns whether the supervisor that started this process, if one did, is gone."""
    return bool(parent) and os.getppid() != int(parent or 0)


class Stopwatch:
    """Counts the seconds spent on each activity since the last reading of `shares`. One owner."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._started = time.monotonic()

    def add(self, what: str, seconds: float) -> None:
        """Adds seconds to an activity."""
        self._seconds[what] = self._seconds.get(what, 0.0) + seconds

    def lap(self, what: str, started: float) -> float:
        """Adds the seconds since `started` (a time of time.perf_counter) to an activity; returns the time now."""
        now = time.perf_counter()
        self.add(what, now - started)
        return now

    def elapsed(self) -> float:
        """Returns the seconds since the last reading of `shares`."""
        return max(time.monotonic() - self._started, 1e-9)

    def shares(self, prefix: str) -> dict[str, float]:
        """Returns each activity's share of the wall time since the last call, and resets the counts."""
        elapsed = self.elapsed()
        shares = {f"{prefix}{what}": seconds / elapsed for what, seconds in self._seconds.items()}
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        self._started = time.monotonic()
        return shares


class CpuMeter:
    """Measures the CPU time of this process. One owner."""

    def __init__(self) -> None:
        self._cpu_seconds, self._then = time.process_time(), time.monotonic()

    def cores(self) -> float:
        """Returns how many cores all threads together have used since the last call, on average."""
        cpu_seconds, now = time.process_time(), time.monotonic()
        used, elapsed = cpu_seconds - self._cpu_seconds, now - self._then
        self._cpu_seconds, self._then = cpu_seconds, now
        return used / max(elapsed, 1e-9)


def make_way(cores: int) -> None:
    """Lowers the priority of this process when there are at most FEW_CORES: the learner needs them.

    The launcher gives each role a session, whose priority is lowered, too.
    """
    if cores > FEW_CORES:
        return
    niceness = os.nice(NICENESS)
    if os.getsid(0) == os.getpid():
        make_session_nice(os.getpid(), niceness)


def switch_threads_often() -> None:
    """Lets threads of this process take turns ten times as often as Python does by itself.

    After each short operation of an update its thread may wait so long for another one (docs/log/learner.md).
    """
    sys.setswitchinterval(_SWITCH_SECONDS)


def process_name(index: int) -> str:
    """Returns a name for the index-th process of its kind on this host. No other process ever has the same name."""
    return f"{socket.gethostname()[:32]}-{index}-{secrets.token_hex(4)}"


def allow_many_files() -> None:
    """Raises the number of files that this process may open, and its children: each connection is one.

    The usual limit of 1,024 is a soft one, for programs that cannot handle more.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # a sandbox that does not let us: there are fewer connections
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def measured(name: str, measure: Callable[[], float]) -> dict[str, float]:
    """Returns a measurement by its name, or nothing when it fails: it may need a file descriptor, and none be left."""
    try:
        return {name: float(measure())}
    except (OSError, psutil.Error):
        return {}


def resident_bytes() -> int:
    """Returns the resident memory of this process in bytes.

    Raises: OSError when no file descriptor is left to read it.
    """
    return psutil.Process().memory_info().rss
