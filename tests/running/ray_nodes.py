"""A Ray cluster of several nodes on this machine: each is `ray start` in a network namespace of its own."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.system.processes import Process

RAY = str(Path(sys.executable).with_name("ray"))
PORT = 6379


def sh(*words, check=True):
    return subprocess.run([str(w) for w in words], capture_output=True, text=True, check=check, timeout=120).stdout


class RayNodes:
    """The nodes; the first is the head. A context manager, which leaves nothing behind."""

    def __init__(self, tmp_path: Path, bridge="apexray", net="10.78.0"):
        self._tmp_path, self._bridge, self._net = tmp_path, bridge, net
        self._nodes: dict[str, Process] = {}

    def __enter__(self):
        self._remove()
        sh("ip", "link", "add", self._bridge, "type", "bridge")
        sh("ip", "link", "set", self._bridge, "up")
        return self

    def __exit__(self, *_):
        for name in list(self._nodes):
            self.kill(name)
        self._remove()

    def _remove(self):
        for line in sh("ip", "netns", "list").splitlines():
            if line.startswith(self._bridge):
                self._kill_all(line.split()[0])
                sh("ip", "netns", "delete", line.split()[0])
        sh("ip", "link", "delete", self._bridge, check=False)

    @staticmethod
    def _kill_all(namespace):
        for pid in sh("ip", "netns", "pids", namespace, check=False).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def address(self, name):
        return f"{self._net}.{10 + list(self._nodes).index(name)}"

    @property
    def head(self):
        return f"{self._net}.10:{PORT}"

    def start(self, name, cpus):
        """Starts a node and waits until it has joined."""
        namespace, number = f"{self._bridge}-{name}", len(self._nodes)
        own = f"{self._net}.{10 + number}"
        sh("ip", "netns", "add", namespace)
        sh("ip", "link", "add", f"{self._bridge}{number}", "type", "veth", "peer", "name", "eth0", "netns", namespace)
        sh("ip", "link", "set", f"{self._bridge}{number}", "master", self._bridge, "up")
        for words in (
            ("address", "add", f"{own}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("link", "set", "lo", "up"),
        ):
            sh("ip", "-n", namespace, *words)
        where = ["--head", f"--port={PORT}", "--include-dashboard=false"] if not number else [f"--address={self.head}"]
        command = [RAY, "start", *where, f"--node-ip-address={own}", f"--num-cpus={cpus}", "--disable-usage-stats"]
        command += ["--object-store-memory=80000000", "--block"]
        log = self._tmp_path / f"ray-{name}.txt"
        self._nodes[name] = self._process(namespace, command, log)
        deadline = time.monotonic() + 300
        while "Ray runtime started" not in log.read_text():
            assert time.monotonic() < deadline and self._nodes[name].popen.poll() is None, log.read_text()
            time.sleep(0.2)

    def _process(self, namespace, command, log):
        # Nodes that are lost have to be missed soon.
        fast = {"RAY_health_check_period_ms": "1000", "RAY_health_check_failure_threshold": "3", "RAY_DEDUP_LOGS": "0"}
        code = "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"
        return Process(["-c", code, "ip", "netns", "exec", namespace, *command], log, fast)

    def driver(self, *flags, name="driver"):
        """Starts a run from the head's node."""
        command = [sys.executable, "-m", "apexrl.running.ray_cluster", "--ray-address", self.head, *map(str, flags)]
        return self._process(f"{self._bridge}-head", command, self._tmp_path / f"{name}.txt")

    def processes(self, name, part):
        """The processes of a node whose command line has a part."""
        found = []
        for pid in sh("ip", "netns", "pids", f"{self._bridge}-{name}", check=False).split():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                if part in words:
                    found.append(int(pid))
        return found

    def kill(self, name):
        """Kills a node with all its processes."""
        self._kill_all(f"{self._bridge}-{name}")
        process = self._nodes[name]
        process.__exit__()

    def where(self, part):
        """The nodes that run something."""
        return [name for name in self._nodes if self.processes(name, part)]
