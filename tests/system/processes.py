"""Real processes for tests: started with the real scripts, waited for with deadlines, never left behind."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil

ROOT = Path(__file__).resolve().parents[2]


class Process:
    """A running script; a context manager that kills it and everything it started."""

    def __init__(self, arguments, log: Path, environment=None, output=None):
        self.log = log
        with log.open("ab") as file:
            self.popen = subprocess.Popen(
                [sys.executable, *map(str, arguments)],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output or file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
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


def launch(tmp_path: Path, ports, *flags, name="run", output=None) -> Process:
    """Starts a whole run with its own ports; its directory is tmp_path / name."""
    names = ("--actor-port", "--batch-port", "--parameter-port", "--metrics-port")
    wires = [text for pair in zip(names, ports, strict=True) for text in pair]
    directory = [] if "--resume" in flags else ["--run-dir", tmp_path / name]
    arguments = ["-m", "apexrl.running.launch", *directory, *wires, *flags]
    if "--tensorboard-port" not in flags:
        arguments.append("--no-tensorboard")
    return Process(arguments, tmp_path / f"{name}.txt", output=output)


def read_json(path: Path):
    """The content of a JSON file, None when it is not there."""
    return msgspec.json.decode(path.read_bytes()) if path.exists() else None


def updates_of(directory: Path) -> int:
    """Returns the number of updates in the learner's status file."""
    status = read_json(directory / "status.json")
    return status["counters"]["updates"] if status else 0
