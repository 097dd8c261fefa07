"""The network that a build reaches: Ubuntu's packages, and a stand-in for the CloudWatch agent."""

import contextlib
import hashlib
import http.server
import itertools
import os
import shutil
import subprocess
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from tests.deploy import commands
from tests.deploy.rootfs import MIRROR, cache

_addresses = itertools.count()
AGENT = "opt/aws/amazon-cloudwatch-agent/bin/amazon-cloudwatch-agent-ctl"
AGENT_SCRIPT = """#!/bin/sh
# Does as the agent's control script does, as far as a test can see it: keeps the configuration that it is given.
[ "$2" = fetch-config ] || exit 0
for last; do :; done
cp "${last#file:}" /var/lib/agent-configuration.json
"""
AGENT_CONTROL = """Package: amazon-cloudwatch-agent
Version: 0.test
Architecture: amd64
Maintainer: nobody
Description: stands in for the CloudWatch agent
"""
AGENT_UNIT = "[Service]\nExecStart=/bin/sleep infinity\n[Install]\nWantedBy=multi-user.target\n"


@contextlib.contextmanager
def host_address() -> Iterator[str]:
    """Gives this machine an address that its test machines reach it by."""
    address = f"10.{200 + next(_addresses) % 50}.{os.getpid() % 250}.1"
    subprocess.run(
        ["ip", "address", "replace", f"{address}/32", "dev", "lo"], check=True, capture_output=True, timeout=30
    )
    try:
        yield address
    finally:
        subprocess.run(["ip", "address", "delete", f"{address}/32", "dev", "lo"], check=True, timeout=30)


@contextlib.contextmanager
def serving(address: str, directory: Path) -> Iterator[str]:
    """Serves the files of a directory; asked as a proxy, Ubuntu's packages, each fetched once. Yields the URL."""
    kept = cache() / "packages"
    kept.mkdir(exist_ok=True)

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.startswith("/"):
                return super().do_GET()
            path = kept / hashlib.sha256(self.path.encode()).hexdigest()
            if not self.path.startswith(MIRROR) or not (path.exists() or _fetch(self.path, path)):
                return self.send_error(404)
            self.send_response(200)
            self.send_header("Content-Length", str(path.stat().st_size))
            self.end_headers()
            with path.open("rb") as file:
                shutil.copyfileobj(file, self.wfile)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer((address, 0), lambda *a: Handler(*a, directory=str(directory)))
    with commands.serving(server):
        yield f"http://{address}:{server.server_port}"


def _fetch(url: str, path: Path) -> bool:
    arriving = path.with_name(f"{path.name}.{threading.get_ident()}")
    try:
        with urllib.request.urlopen(url, timeout=60) as answer, arriving.open("wb") as file:
            shutil.copyfileobj(answer, file)
    except OSError:
        return False
    arriving.replace(path)
    return True


def publish_agent(directory: Path) -> str:
    """Publishes a package in the agent's place, signed; returns the fingerprint of the key."""
    tree = directory / "package"
    for name, text in {
        "DEBIAN/control": AGENT_CONTROL,
        "lib/systemd/system/amazon-cloudwatch-agent.service": AGENT_UNIT,
        AGENT: AGENT_SCRIPT,
    }.items():
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tree / AGENT).chmod(0o755)
    package = directory / "ubuntu/amd64/latest/amazon-cloudwatch-agent.deb"
    key = directory / "assets/amazon-cloudwatch-agent.gpg"
    for path in (package.parent, key.parent):
        path.mkdir(parents=True)

    def run(*command: str) -> str:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout

    run("dpkg-deb", "--build", "--root-owner-group", str(tree), str(package))
    # Not below `directory`: the name of the agent's socket can be 108 characters long.
    with tempfile.TemporaryDirectory() as home:
        gpg = ("gpg", "--homedir", home, "--batch", "--passphrase", "")
        try:
            run(*gpg, "--quick-generate-key", "Test <test@example.com>", "ed25519", "sign", "never")
            run(*gpg, "--armor", "--output", str(key), "--export")
            run(*gpg, "--output", f"{package}.sig", "--detach-sign", str(package))
            lines = run(*gpg, "--with-colons", "--list-keys").splitlines()
        finally:
            run("gpgconf", "--homedir", home, "--kill", "gpg-agent")
    return next(line.split(":")[9] for line in lines if line.startswith("fpr:"))
