"""A run that is to be broken: its launcher, its roles, its disk, its memory and its journal while it goes on."""

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import NamedTuple

import psutil

from apexrl.learning.record.status_file import STATUS_FILE, Status, read_status
from apexrl.networks.headers import Counters
from apexrl.replay.journal import LogIdentity, read_identity, segment_paths
from apexrl.types import StreamSpec
from tests.system.processes import Process, launch, wait_for

ROLES = ("replay", "learner", "actors", "worker", "evaluator", "tensorboard")
SAMPLE_SECONDS = 5.0
START_SECONDS = 300.0
END_SECONDS = 120.0
RESTART_SECONDS = 120.0
RUN_FLAGS = (
    *("--max-restarts", 1000, "--num-workers", 2),
    *("--checkpoint-period-seconds", 10, "--evaluation-period-seconds", 20, "--episodes", 2),
)


class Sample(NamedTuple):
    """The memory of one role at one moment."""

    seconds: float
    role: str
    pid: int  # the role's first process: another one after a restart
    megabytes: float
    transitions: int  # that the learner had counted


def free_ports(count: int) -> list[int]:
    """Finds ports that nobody listens on."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


class SmallDisk:
    """A file system in memory of some MiB, where this process may mount one; a context manager."""

    def __init__(self, path: Path, mebibytes: int):
        self.is_mounted = False
        self.reason = "--disk-mib is 0"
        self._path = path
        self._mebibytes = mebibytes
        self._ballast = path / "ballast"

    def __enter__(self) -> "SmallDisk":
        self._path.mkdir(parents=True)
        if self._mebibytes:
            command = ["mount", "-t", "tmpfs", "-o", f"size={self._mebibytes}m", "tmpfs", str(self._path)]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
                self.is_mounted, self.reason = done.returncode == 0, done.stderr.strip()
            except OSError as error:
                self.reason = str(error)
        return self

    def __exit__(self, *_: object) -> None:
        self._ballast.unlink(missing_ok=True)
        if self.is_mounted:
            subprocess.run(["umount", "--lazy", str(self._path)], timeout=30, check=True)

    def fill(self, seconds: float) -> None:
        """Keeps the disk full for so long, then frees it."""
        deadline = time.monotonic() + seconds
        try:
            with self._ballast.open("wb", buffering=0) as file:
                while time.monotonic() < deadline:
                    for size in (2**20, 2**10):
                        with contextlib.suppress(OSError):
                            while file.write(bytes(size)) == size:
                                pass
                    time.sleep(0.2)
        finally:
            self._ballast.unlink(missing_ok=True)


class World:
    """The run; a context manager that leaves nothing behind. Its sampler runs in a thread of its own.

    `kept` is the journal with all it ever held: files that the server evicts stay there under a second name.
    """

    def __init__(self, directory: Path, disk: Path, flags: list[str]):
        self.ports = free_ports(5)
        self.directory = disk / "run"
        self.journal = self.directory / "journal"
        self.kept = disk / "kept"
        self.samples: list[Sample] = []
        self.processes: set[psutil.Process] = set()
        self.started = time.monotonic()
        self._ended = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        self._flags = (*RUN_FLAGS, "--tensorboard-port", self.ports[4], *flags)
        self._logs = directory
        self.launcher: Process

    def __enter__(self) -> "World":
        self.kept.mkdir()
        flags = (*self._flags, "--run-dir", self.directory)
        self.launcher = launch(self._logs, self.ports[:4], *flags, name="launcher", is_copy=False)
        self._sampler.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._sampler.join()
        self.launcher.__exit__()
        for process in self.left_over():
            with contextlib.suppress(psutil.Error):
                process.kill()

    def wait_for_spec(self) -> StreamSpec:
        """Waits for the journal's beginning; returns what its unrolls hold."""

        def identity() -> LogIdentity | None:
            self.check_launcher()
            return read_identity(self.journal)

        return wait_for(identity, START_SECONDS, "a journal").spec

    def wait_until_learning(self) -> None:
        """Waits for the first updates."""

        def is_learning() -> bool:
            self.check_launcher()
            status = read_status(self.directory)
            return status is not None and status.counters.updates > 0

        wait_for(is_learning, START_SECONDS, "a first update")

    def check_launcher(self) -> None:
        """Fails when the launcher has ended by itself."""
        status = self.launcher.popen.poll()
        assert status is None, f"the launcher ended by itself with status {status}: {self.launcher.text()[-500:]}"

    def roles(self) -> dict[str, list[psutil.Process]]:
        """Returns the living processes of each role, the first of which began it."""
        found: dict[str, list[psutil.Process]] = {}
        for process in self._children(self.launcher.popen.pid):
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                script = next((os.path.basename(word) for word in words if word.endswith(".py")), "")
                role = {"replay.py": "replay", "learner.py": "learner"}.get(script, "")
                if script == "actor.py":
                    role = "evaluator" if "--evaluate" in words else "actors"
                if "apexrl.running.tensorboard" in words:
                    role = "tensorboard"
                if role:
                    found[role] = [process]
        if "actors" in found:
            found["worker"] = self._children(found["actors"][0].pid)
        return {role: processes for role, processes in found.items() if processes}

    def kill(self, role: str, process: psutil.Process) -> None:
        """Kills a process of a role, and waits until another one is there."""
        before = set(self.roles().get(role, ()))
        self.processes |= before
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()

        def is_replaced() -> bool:
            self.check_launcher()
            now = set(self.roles().get(role, ()))
            return bool(now - before)

        wait_for(is_replaced, RESTART_SECONDS, f"another {role}")

    @staticmethod
    def stop(process: psutil.Process, seconds: float) -> None:
        """Stops a process for so long."""
        with contextlib.suppress(psutil.NoSuchProcess):
            process.suspend()
            try:
                time.sleep(seconds)
            finally:
                process.resume()

    def status(self) -> Status:
        """Returns what the learner told last; fails when it cannot be read."""
        status = read_status(self.directory)
        assert status is not None, "status.json cannot be read"
        return status

    def wait_for_progress(self, seconds: float) -> float:
        """Returns how long it took until the learner told of more updates and more transitions than at first."""
        started, fault_ended = time.monotonic(), time.time()
        lowest: Counters | None = None

        def has_grown() -> bool:
            nonlocal lowest
            self.check_launcher()
            if (self.directory / STATUS_FILE).stat().st_mtime <= fault_ended:
                return False
            counters = self.status().counters
            updates, transitions = counters.updates, counters.transitions_inserted
            if lowest is None or updates < lowest.updates or transitions < lowest.transitions_inserted:
                lowest = counters
            return updates > lowest.updates and transitions > lowest.transitions_inserted

        wait_for(has_grown, seconds, "growing updates and frames")
        return time.monotonic() - started

    def end(self) -> int | None:
        """Ends the run as Ctrl-C does; returns the launcher's exit status, None when it does not end."""
        self._ended.set()
        self._sampler.join()
        self._observe()
        self.launcher.signal(signal.SIGINT)
        try:
            return self.launcher.popen.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return None
        finally:
            self._keep_journal()

    def left_over(self) -> list[psutil.Process]:
        """Returns the processes of the run that live still."""
        return [p for p in self.processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    def _children(self, pid: int) -> list[psutil.Process]:
        try:
            return psutil.Process(pid).children()
        except psutil.NoSuchProcess:
            return []

    def _sample(self) -> None:
        while not self._ended.wait(SAMPLE_SECONDS):
            self._observe()

    def _observe(self) -> None:
        status = read_status(self.directory)
        transitions = status.counters.transitions_inserted if status else 0
        now = time.monotonic() - self.started
        for role, processes in self.roles().items():
            self.processes |= set(processes)
            with contextlib.suppress(psutil.NoSuchProcess):
                megabytes = sum(process.memory_info().rss for process in processes) / 1e6
                self.samples.append(Sample(now, role, processes[0].pid, megabytes, transitions))
        self._keep_journal()

    def _keep_journal(self) -> None:
        for path in segment_paths(self.journal):
            name = self.kept / path.name
            with contextlib.suppress(OSError):  # just evicted, or the disk is full: the next time
                if name.exists() and not name.samefile(path):
                    name.unlink()
                if not name.exists():
                    os.link(path, name)
