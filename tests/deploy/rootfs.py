"""Root file systems of Ubuntu 24.04, as Canonical's packages make them: the base image of the tests of hosts.

One is made with debootstrap and kept in `cache()`; tests lay an overlay over it and never write to it.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.deploy.commands import ran
from tests.system.processes import ROOT

MIRROR = os.environ.get("APEXRL_TEST_MIRROR", "http://archive.ubuntu.com/ubuntu")
SUITE = "noble"
# Packages of Canonical's server image, as far as a host of ours needs them. python3-venv is not among them.
PACKAGES = (
    *("systemd", "systemd-sysv", "dbus", "cloud-init", "openssh-server", "sudo", "python3", "ca-certificates"),
    *("locales", "rsyslog", "logrotate", "iproute2", "nftables", "curl", "gpg", "netbase"),
)
KEYRING = "pool/main/u/ubuntu-keyring/ubuntu-keyring_2023.11.28.1_all.deb"
KEYRING_SHA256 = "36de43b15853ccae0028e9a767613770c704833f82586f28eb262f0311adb8a8"
TOOLS = {
    "systemd-nspawn": "systemd-container",
    "debootstrap": "debootstrap",
    "dpkg-deb": "dpkg",
    "ip": "iproute2",
    "gpg": "gpg",
}
DEBOOTSTRAP_SECONDS = 1200
PRIVILEGED = "root with CAP_SYS_ADMIN is needed: a machine of your own, or a container with --privileged"


def cache() -> Path:
    """Returns where the tests of hosts keep what is slow to make."""
    path = Path(os.environ.get("APEXRL_TEST_CACHE", Path(tempfile.gettempdir()) / "apexrl-test-cache"))
    path.mkdir(parents=True, exist_ok=True)
    return path


def require(*further_tools: str) -> None:
    """Skips a test where no machine can be started, with the reason and the cure."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("machines of systemd-nspawn need Linux and root: run the tests as root")
    missing = [package for tool, package in TOOLS.items() if shutil.which(tool) is None]
    missing += [tool for tool in further_tools if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"not installed: apt-get install {' '.join(missing)}")


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    with (cache() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def base() -> Path:
    """Returns the root file system; made when it is not there. Skips where it cannot be made."""
    path = cache() / "ubuntu-24.04"
    with _one_at_a_time():
        if not path.is_dir():
            _make(path)
    probe = ran(["systemd-nspawn", "--quiet", "--register=no", "--keep-unit", "-D", str(path), "--read-only", "true"])
    if probe.returncode != 0:
        pytest.skip(f"systemd-nspawn does not work here ({probe.stderr.strip()}): {PRIVILEGED}")
    return path


def _make(path: Path) -> None:
    arriving = path.with_name(path.name + ".arriving")
    shutil.rmtree(arriving, ignore_errors=True)
    with tempfile.TemporaryDirectory() as directory:
        package = Path(directory) / "keyring.deb"
        try:
            with urllib.request.urlopen(f"{MIRROR}/{KEYRING}", timeout=30) as answer:
                package.write_bytes(answer.read())
        except OSError as error:
            pytest.skip(f"{MIRROR} cannot be reached ({error}): name another mirror with APEXRL_TEST_MIRROR")
        assert hashlib.sha256(package.read_bytes()).hexdigest() == KEYRING_SHA256, f"{MIRROR}/{KEYRING} was changed"
        subprocess.run(["dpkg-deb", "-x", str(package), directory], check=True, timeout=60)
        command = [
            "debootstrap",
            "--variant=minbase",
            f"--keyring={directory}/usr/share/keyrings/ubuntu-archive-keyring.gpg",
            "--components=main,universe",
            f"--include={','.join(PACKAGES)}",
            *(SUITE, str(arriving), MIRROR),
            "/usr/share/debootstrap/scripts/gutsy",  # Ubuntu's; Debian's debootstrap may not know the newest name
        ]
        subprocess.run(command, check=True, timeout=DEBOOTSTRAP_SECONDS, stdout=subprocess.DEVNULL)
    (arriving / "etc/hosts").write_text("127.0.0.1 localhost test-host\n")  # a VPC has a name server for this
    arriving.rename(path)


def wheels() -> Path:
    """Returns a directory with the wheels of deploy/packer/requirements-common.txt, checked by their hashes.

    Skips where they cannot be downloaded.
    """
    lock = ROOT / "deploy/packer/requirements-common.txt"
    path = cache() / f"wheels-{hashlib.sha256(lock.read_bytes()).hexdigest()[:12]}"
    with _one_at_a_time():
        if not path.is_dir():
            _download_wheels(lock, path)
    return path


def _download_wheels(lock: Path, path: Path) -> None:
    arriving = path.with_name(path.name + ".arriving")
    shutil.rmtree(arriving, ignore_errors=True)
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(39, 4, -1)]
    platforms += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64", "any"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    command += ["--only-binary", ":all:", "--implementation", "cp", "--python-version", "3.12"]
    command += [word for abi in ("cp312", "abi3", "none") for word in ("--abi", abi)]
    command += [word for name in platforms for word in ("--platform", name)]
    command += ["--requirement", str(lock), "--dest", str(arriving)]
    result = ran(command, seconds=600)
    if result.returncode != 0:
        problem = " ".join(result.stderr.split())[-300:] or f"pip ended with status {result.returncode}"
        pytest.skip(
            f"the wheels of the images cannot be downloaded ({problem}): connect to PyPI, or name an index of the same "
            "files with PIP_INDEX_URL"
        )
    arriving.rename(path)


@contextlib.contextmanager
def overlay(layers: Sequence[Path], directory: Path) -> Iterator[Path]:
    """Mounts layers, the upper ones first, below one that can be written: `directory`/upper. Yields the root."""
    for name in ("upper", "work", "root"):
        (directory / name).mkdir(parents=True, exist_ok=True)
    root = directory / "root"
    options = f"lowerdir={':'.join(map(str, layers))},upperdir={directory / 'upper'},workdir={directory / 'work'}"
    options += ",volatile"  # nothing waits for the disk
    command = ["mount", "-t", "overlay", "overlay", "-o", options, str(root)]
    result = ran(command)
    if result.returncode != 0:
        pytest.skip(f"no overlay can be mounted in {directory} ({result.stderr.strip()}): set TMPDIR to a disk's")
    try:
        yield root
    finally:
        subprocess.run(["umount", "--lazy", str(root)], check=True, timeout=60)
