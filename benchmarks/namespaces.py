"""Hosts with addresses of their own on this machine: network namespaces at one bridge. It needs root and iproute2."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path


class Namespaces:
    """The hosts, as a context manager that leaves nothing behind.

    Each process has its own bridge and addresses: 10.78.N.1 is this machine, 10.78.N.10 the first host.
    """

    def __init__(self) -> None:
        self._name, self._network = f"apx{os.getpid()}", f"10.78.{os.getpid() % 256}"
        self.hosts: list[str] = []

    def __enter__(self) -> "Namespaces":
        ip("link", "add", self._name, "type", "bridge")
        ip("address", "add", f"{self._network}.1/24", "dev", self._name)
        ip("link", "set", self._name, "up")
        return self

    def __exit__(self, *_: object) -> None:
        for number, host in enumerate(self.hosts):
            self.kill(host)
            ip("link", "delete", f"{self._name}.{number}")  # else it goes some time after its namespace
            ip("netns", "delete", self._inside(host))
        ip("link", "delete", self._name)
        self.hosts.clear()

    def add(self, host: str, qdisc: Sequence[str] = ()) -> None:
        """Makes a host; qdisc are words of tc(8) that slow its sending down."""
        inside, outside = self._inside(host), f"{self._name}.{len(self.hosts)}"
        self.hosts.append(host)
        ip("netns", "add", inside)
        ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", inside)
        ip("link", "set", outside, "master", self._name, "up")
        for words in (f"address add {self.address(host)}/24 dev eth0", "link set eth0 up", "link set lo up"):
            ip("-n", inside, *words.split())
        if qdisc:
            run(["tc", "-n", inside, "qdisc", "add", "dev", "eth0", "root", *qdisc])

    def address(self, host: str) -> str:
        """Returns the address of a host."""
        return f"{self._network}.{10 + self.hosts.index(host)}"

    def command(self, host: str, words: Sequence[str]) -> list[str]:
        """Returns a command that runs on a host."""
        return ["ip", "netns", "exec", self._inside(host), *words]

    def pids(self, host: str) -> list[int]:
        """Returns the processes of a host."""
        return [int(pid) for pid in ip("netns", "pids", self._inside(host)).split()]

    def runs(self, host: str, part: str) -> bool:
        """Returns whether a host has a process whose command line has a part."""
        for pid in self.pids(host):
            with contextlib.suppress(OSError):
                if part in Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode():
                    return True
        return False

    def kill(self, host: str) -> None:
        """Kills all processes of a host."""
        for pid in self.pids(host):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _inside(self, host: str) -> str:
        return f"{self._name}-{host}"


def ip(*words: str) -> str:
    """Runs one command of iproute2; returns its output."""
    return run(["ip", *words])


def run(words: Sequence[str]) -> str:
    """Runs a command; returns its output.

    Raises: RuntimeError with its error.
    """
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout
