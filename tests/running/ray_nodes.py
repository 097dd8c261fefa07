"""A Ray cluster of several nodes on this machine: each is `ray start` in a network namespace of its own."""

import contextlib
import sys
import time
from pathlib import Path

from benchmarks.namespaces import Namespaces
from tests.system.processes import Process

RAY = str(Path(sys.executable).with_name("ray"))
PORT = 6379
# Nodes that are lost have to be missed soon.
FAST = {"RAY_health_check_period_ms": "1000", "RAY_health_check_failure_threshold": "3"}


class RayNodes:
    """The nodes; the first is the head. A context manager, which leaves nothing behind."""

    def __init__(self, tmp_path: Path):
        self._tmp_path = tmp_path
        self._hosts = Namespaces()
        self._nodes: dict[str, Process] = {}

    def __enter__(self):
        self._hosts.__enter__()
        return self

    def __exit__(self, *_):
        for name in self._nodes:
            self.kill(name)
        self._hosts.__exit__()

    @property
    def head(self):
        return f"{self._hosts.address('head')}:{PORT}"

    def start(self, name, cpus):
        """Starts a node and waits until it has joined."""
        is_head = not self._nodes
        self._hosts.add(name)
        where = ["--head", f"--port={PORT}", "--include-dashboard=false"] if is_head else [f"--address={self.head}"]
        command = [RAY, "start", *where, f"--node-ip-address={self._hosts.address(name)}", f"--num-cpus={cpus}"]
        command += ["--object-store-memory=80000000", "--disable-usage-stats", "--block"]
        log = self._tmp_path / f"ray-{name}.txt"
        self._nodes[name] = self._process(name, command, log)
        deadline = time.monotonic() + 300
        while "Ray runtime started" not in log.read_text():
            assert time.monotonic() < deadline and self._nodes[name].popen.poll() is None, log.read_text()
            time.sleep(0.2)

    def _process(self, name, command, log):
        # Each node has files of its own: Ray deletes those of a node that it has no use for any more.
        files = self._tmp_path / f"files-{name}"
        for directory in (files, Path("/tmp/ray")):
            directory.mkdir(exist_ok=True)
        inside = ["sh", "-c", f'mount --bind {files} /tmp/ray && exec "$@"', "sh", *command]
        code = "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"
        return Process(["-c", code, *self._hosts.command(name, inside)], log, FAST)

    def driver(self, *flags, name, on="head"):
        """Starts a run from a node."""
        command = [sys.executable, "-m", "apexrl.running.ray_cluster", "--ray-address", self.head, *map(str, flags)]
        return self._process(on, command, self._tmp_path / f"{name}.txt")

    def runs(self, name, part):
        """Whether a node has a process whose command line has a part."""
        for pid in self._hosts.pids(name):
            with contextlib.suppress(OSError):
                if part in Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode():
                    return True
        return False

    def where(self, part):
        """The nodes that run something."""
        return [name for name in self._nodes if self.runs(name, part)]

    def kill(self, name):
        """Kills a node with all its processes."""
        self._hosts.kill(name)
        self._nodes[name].__exit__()
