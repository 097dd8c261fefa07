"""Real processes for tests: started with the real scripts, waited for with deadlines, never left behind.

Launchers, actors, learners and replay servers end with a test run that is killed, too.
"""

import atexit
import contextlib
import functools
import io
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import msgspec
import psutil

from apexrl.lifecycle import PARENT_VARIABLE
from tests.system.zygote import Zygote

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER, BASE_ONLY = ["-m", "apexrl.running.launch"], ["-m", "tests.base_only"]
PORTS = ("--actor-port", "--batch-port", "--parameter-port", "--metrics-port")


@functools.cache
def zygote() -> Zygote:
    """Returns this process's own."""
    found = Zygote()
    atexit.register(found.close)
    return found


def words_of(process: psutil.Process) -> list[str]:
    """Returns the command line of a process, also of a copy; nothing where it has just died."""
    try:
        return (zygote().words / str(process.pid)).read_text().split("\0")
    except OSError:
        with contextlib.suppress(psutil.Error):
            return process.cmdline()
    return []


class Process:
    """A running script; a context manager that kills it and everything it started.

    Args:
      is_copy: it is a copy of a process that has imported torch, which saves seconds; else Python is started, as users
        do. By default the launcher, actors and learners are copies.
    """

    def __init__(self, arguments, log: Path, environment=None, output=None, is_copy=None):
        self.log = log
        words = [str(word) for word in arguments]
        if is_copy is None:
            is_copy = words[:2] == LAUNCHER or words[0].endswith(("actor.py", "learner.py"))
        # What these tests expect is of a CPU: a GPU of this machine is hidden from them.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **(environment or {})}
        with log.open("ab") as file:
            if is_copy and output is None:
                self.popen = zygote().start(words, ROOT, environment, file.fileno())
                return
            if words[:2] in (LAUNCHER, BASE_ONLY) or words[0].endswith("replay.py"):
                environment = {PARENT_VARIABLE: str(os.getpid()), **environment}
            self.popen = subprocess.Popen(
                [sys.executable, *words],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output or file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment,
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.descendants():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait()

    def descendants(self):
        """All processes that it started and that still run."""
        try:
            return psutil.Process(self.popen.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def signal(self, number):
        self.popen.send_signal(number)

    def kill(self):
        self.popen.send_signal(signal.SIGKILL)
        self.popen.wait()

    def text(self):
        return self.log.read_text()


def wait_for(condition, seconds, what):
    """Returns the first true value of the condition; a deadline of ten times the seconds only ends what hangs."""
    seconds *= 10
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.1)
    raise AssertionError(f"{what}: not within {seconds} s")


def is_gone(pid: int) -> bool:
    """Returns whether a process has ended, also where its system buries nobody."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wires_of(ports) -> list[str]:
    """Returns the flags that give a run or a role these four ports."""
    return [str(word) for pair in zip(PORTS, ports, strict=True) for word in pair]


def launch(tmp_path: Path, ports, *flags, name="run", output=None, is_copy=None) -> Process:
    """Starts a whole run with its own ports; its directory is tmp_path / name."""
    directory = [] if "--resume" in flags else ["--run-dir", tmp_path / name]
    arguments = [*LAUNCHER, *directory, *wires_of(ports), *flags]
    if "--tensorboard-port" not in flags:
        arguments.append("--no-tensorboard")
    return Process(arguments, tmp_path / f"{name}.txt", output=output, is_copy=is_copy)


def call(main, *words) -> tuple[int, str]:
    """Runs a program's `main` in this process; returns its exit status, and all that it prints and logs."""
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    logging.getLogger().addHandler(handler)
    argv = mock.patch.object(sys, "argv", ["program", *map(str, words)])
    try:
        with argv, contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            status = main()
    except SystemExit as ended:
        status = ended.code
    finally:
        logging.getLogger().removeHandler(handler)
    return status, said.getvalue()


def refuse(*flags) -> tuple[int, str]:
    """Calls the launcher, for what begins no run; returns its exit status and all it says, in one line."""
    from apexrl.running import launch as launcher

    status, said = call(launcher.main, *flags)
    return status, " ".join(said.split())


def read_json(path: Path):
    """The content of a JSON file, None when it is not there."""
    return msgspec.json.decode(path.read_bytes()) if path.exists() else None


def updates_of(directory: Path) -> int:
    """Returns the number of updates in the learner's status file."""
    status = read_json(directory / "status.json")
    return status["counters"]["updates"] if status else 0


def games_of(directory: Path) -> int:
    """Returns the number of evaluation games in the learner's status file."""
    status = read_json(directory / "status.json")
    return status["counters"]["evaluation_episodes"] if status else 0


def play_on(run: Process, directory: Path, before: dict) -> None:
    """Waits until a run is past a `summary.json` in updates and in frames, and stops it.

    Its first updates may come from the frames of the log alone, so a run that ends by its updates may have no new ones.
    """
    wait_for(lambda: updates_of(directory) > before["updates"], 300, "updates")
    wait_for(lambda: read_json(directory / "status.json")["frames"] > before["frames"], 300, "new frames")
    run.signal(signal.SIGINT)
    assert run.popen.wait(300) == 0, run.text()
