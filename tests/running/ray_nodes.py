"""A Ray cluster of several nodes on this machine: each is `ray start` in a network namespace of its own."""

import sys
import time
from pathlib import Path

from benchmarks.namespaces import Namespaces
from tests.system.processes import Process

RAY = str(Path(sys.executable).with_name("ray"))
PORT = 6379
# Nodes that are lost have to be missed soon; processes in advance are of no use to us.
FAST = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_prestart_worker_first_driver": "0",
}


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

    @property
    def dashboard(self):
        return f"http://{self._hosts.address('head')}:8265"

    def start(self, **cpus):
        """Starts nodes, all at the same time, and waits until they have joined."""
        for name, count in cpus.items():
            self.begin(name, count)
        deadline = time.monotonic() + 300
        for name in cpus:
            log = self._log(name)
            while "Ray runtime started" not in log.read_text():
                assert time.monotonic() < deadline and self._nodes[name].popen.poll() is None, log.read_text()
                time.sleep(0.2)

    def begin(self, name, cpus):
        """Starts a node, which joins when it can."""
        is_head = not self._nodes
        self._hosts.add(name)
        where = [f"--address={self.head}"]
        if is_head:
            where = ["--head", f"--port={PORT}", "--dashboard-host=0.0.0.0"]
        command = [RAY, "start", *where, f"--node-ip-address={self._hosts.address(name)}", f"--num-cpus={cpus}"]
        command += ["--object-store-memory=80000000", "--disable-usage-stats", "--include-log-monitor=false", "--block"]
        self._nodes[name] = self._process(name, command, self._log(name))

    def _log(self, name):
        return self._tmp_path / f"ray-{name}.txt"

    def own_files(self, name):
        """The directory that a node sees as /tmp/ray, and no other node."""
        return self._tmp_path / f"files-{name}"

    def _process(self, name, command, log):
        # Each node has files of its own: Ray deletes those of a node that it has no use for any more.
        files = self.own_files(name)
        for directory in (files, Path("/tmp/ray")):
            directory.mkdir(exist_ok=True)
        inside = ["sh", "-c", f'mount --bind {files} /tmp/ray && exec "$@"', "sh", *command]
        code = "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"
        return Process(["-c", code, *self._hosts.command(name, inside)], log, FAST)

    def driver(self, *flags, name, on="head"):
        """Starts a run from a node."""
        command = [sys.executable, "-m", "apexrl.running.ray_cluster", "--ray-address", self.head, *map(str, flags)]
        return self._process(on, command, self._tmp_path / f"{name}.txt")

    def job(self, *words, name):
        """Runs `ray job WORDS`, as from a laptop that reaches the head's dashboard; its output has the name."""
        command = [RAY, "job", words[0], "--address", self.dashboard, *map(str, words[1:])]
        code = "import os, sys; os.execv(sys.argv[1], sys.argv[1:])"
        return Process(["-c", code, *command], self._tmp_path / f"{name}.txt")

    def where(self, part):
        """The nodes that run something."""
        return [name for name in self._nodes if self._hosts.runs(name, part)]

    def kill(self, name):
        """Kills a node with all its processes."""
        self._hosts.kill(name)
        self._nodes[name].__exit__()
