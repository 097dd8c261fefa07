"""A host as a machine of systemd-nspawn: a root file system that boots, with a network of its own."""

import contextlib
import itertools
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from tests.deploy.commands import ran

BOOT_SECONDS = 60
POWEROFF_SECONDS = 60
KILL_SECONDS = 10
UPLINK = "host0"
_numbers = itertools.count()


def wait_until(condition: Callable[[], object], seconds: float, what: str | Callable[[], str]) -> None:
    """Waits until a condition holds; fails with `what` was waited for. Ten times the seconds only end what hangs."""
    seconds *= 10
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"waited {seconds:.0f} s for {what if isinstance(what, str) else what()}")
        time.sleep(0.2)


class Machine:
    """A booted machine. Commands run in all its namespaces."""

    def __init__(self, root: Path, popen: subprocess.Popen, log: Path):
        self.root = root
        self.log = log
        self.address = ""
        self._popen = popen
        self._init = 0

    @property
    def is_running(self) -> bool:
        """Whether it has not been powered off."""
        return self._popen.poll() is None

    def wait_for_boot(self) -> None:
        """Waits until the machine is up and cloud-init has done its work."""

        def has_init() -> bool:
            assert self.is_running, self.log.read_text(errors="replace")
            # Before it is systemd it is a copy of systemd-nspawn, which is not in all its namespaces yet.
            found = [child.pid for child in psutil.Process(self._popen.pid).children() if child.name() == "systemd"]
            self._init = found[0] if found else 0
            return bool(self._init)

        wait_until(has_init, BOOT_SECONDS, "the first process of a machine")

        def has_booted() -> bool:
            assert self.is_running, self.log.read_text(errors="replace")
            states = self.run(
                *("timeout", "5", "systemctl", "is-active", "multi-user.target", "cloud-final.service"), check=False
            )
            return states.stdout.split() == ["active", "active"]

        wait_until(has_booted, BOOT_SECONDS, self.describe)

    def run(self, *command: str, check: bool = True) -> subprocess.CompletedProcess:
        """Runs a command in the machine."""
        result = ran(
            ["nsenter", "--all", f"--target={self._init}", *command],
            env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin", "LC_ALL": "C.UTF-8"},
            stdin=subprocess.DEVNULL,
        )
        assert not check or result.returncode == 0, f"{command}: {result.stdout}{result.stderr}"
        return result

    def show(self, unit: str, name: str) -> str:
        """Returns a property of a unit."""
        return self.run("systemctl", "show", "--value", "-p", name, unit).stdout.strip()

    def wait_for_state(self, unit: str, state: str, seconds: float = 30) -> None:
        """Waits until a unit is active, inactive, activating or failed."""
        wait_until(
            lambda: self.show(unit, "ActiveState") == state,
            seconds,
            lambda: f"{unit} to be {state}, it is {self.show(unit, 'ActiveState')}:\n{self.journal(unit)}",
        )

    def journal(self, unit: str) -> str:
        """Returns what a unit has said."""
        return self.run("journalctl", "--no-pager", "-o", "short-precise", "-u", unit).stdout

    def describe(self) -> str:
        """Returns what does not work."""
        jobs = self.run("systemctl", "list-jobs", "--no-pager", check=False).stdout
        return f"a machine to boot\n{jobs}\n{self.run('systemctl', '--failed', '--no-pager', check=False).stdout}"

    def wait_for_poweroff(self, seconds: float = POWEROFF_SECONDS) -> None:
        """Waits until the machine has powered itself off."""
        wait_until(lambda: not self.is_running, seconds, "a machine to power itself off")

    def kill(self) -> None:
        """Ends it as when its power fails: all processes at once."""
        psutil.Process(self._init).kill()
        self.wait_for_poweroff()

    def power_off(self) -> None:
        """Shuts it down as a host is shut down."""
        self.run("systemctl", "poweroff", check=False)
        self.wait_for_poweroff()


def ip(*words: str) -> None:
    """Runs iproute2's command."""
    result = ran(["ip", *words])
    assert result.returncode == 0, f"ip {' '.join(words)}: {result.stderr}"


@contextlib.contextmanager
def network(address: str, gateway: str, router: str = "", link: str = "") -> Iterator[str]:
    """Makes a network namespace with one address, and a link to it. Yields its name.

    Args:
      gateway: the address at the other end of the link.
      router: the namespace of the other end, by default this process's.
      link: the name of the other end.
    """
    number = next(_numbers)
    name, link = f"apexrl-{os.getpid()}-{number}", link or f"ax{os.getpid() % 100000}h{number}"
    there, inside = ("-n", router) if router else (), ("-n", name)
    ip("netns", "add", name)
    try:
        ip(*there, "link", "add", link, "type", "veth", "peer", "name", UPLINK, "netns", name)
        for words in (
            (*there, "address", "add", f"{gateway}/32", "peer", f"{address}/32", "dev", link),
            (*there, "link", "set", link, "up"),
            (*inside, "link", "set", "lo", "up"),
            (*inside, "address", "add", f"{address}/32", "peer", f"{gateway}/32", "dev", UPLINK),
            (*inside, "link", "set", UPLINK, "up"),
            (*inside, "route", "add", "default", "via", gateway, "dev", UPLINK, "src", address),
        ):
            ip(*words)
        yield name
    finally:
        for words in ((*there, "link", "delete", link), ("netns", "delete", name)):
            subprocess.run(["ip", *words], check=False, capture_output=True, timeout=30)


def seed(root: Path, user_data: str, **meta_data: str) -> None:
    """Leaves user-data and meta-data where cloud-init finds them at the next boot."""
    directory = root / "var/lib/cloud/seed/nocloud"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "user-data").write_text(user_data)
    meta_data = {"instance-id": "i-0123456789abcdef0", "local-hostname": "test-host", **meta_data}
    (directory / "meta-data").write_text("".join(f"{name}: {value}\n" for name, value in meta_data.items()))
    (directory / "network-config").write_text("network: {config: disabled}\n")


def _kill(popen: subprocess.Popen) -> None:
    """Kills a machine's first process, at which systemd-nspawn ends; killed itself it would leave the machine alone."""
    nspawn = psutil.Process(popen.pid)
    deadline = time.monotonic() + KILL_SECONDS
    while popen.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in nspawn.children():
                child.kill()
        time.sleep(0.05)
    popen.kill()


@contextlib.contextmanager
def booted(root: Path, namespace: str, log: Path, binds: Mapping[Path, str] | None = None) -> Iterator[Machine]:
    """Boots a machine; it is gone at the end."""
    flags: Sequence[str] = [f"--bind-ro={source}:{target}" for source, target in (binds or {}).items()]
    command = [
        *("systemd-nspawn", "--quiet", "--boot", "--register=no", "--keep-unit", "--link-journal=no"),
        *(
            "--console=pipe",
            "--capability=CAP_NET_ADMIN",
            "--resolv-conf=off",
            "--timezone=off",
            f"--network-namespace-path=/run/netns/{namespace}",
        ),
        *(f"--machine={namespace}", f"--directory={root}", *flags),
    ]
    with log.open("wb") as output:
        popen = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
    machine = Machine(root, popen, log)
    try:
        yield machine
    finally:
        if popen.poll() is None:
            _kill(popen)
        popen.wait()
