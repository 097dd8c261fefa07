"""A moto server: AWS's interface over HTTP on this machine, as a process of its own."""

import contextlib
import dataclasses
import functools
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3

REGION = "us-east-1"
START_SECONDS = 60


@dataclasses.dataclass(frozen=True)
class Aws:
    """Where the server listens, and what a process has to be told to talk to it instead of AWS."""

    endpoint: str

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a process; without a trace of the real user's account (see conftest.py)."""
        return os.environ | {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def client(self, service: str) -> Any:
        """Returns a boto3 client of the server."""
        return _client(self.endpoint, service)

    def reset(self) -> None:
        """Forgets everything. Not for a server that was started with MOTO_AMIS_PATH: it breaks (moto 5.2)."""
        request = urllib.request.Request(f"{self.endpoint}/moto-api/reset", method="POST")
        urllib.request.urlopen(request, timeout=30).close()


@functools.cache
def _client(endpoint: str, service: str) -> Any:
    return boto3.Session("testing", "testing", region_name=REGION).client(service, endpoint_url=endpoint)


@contextlib.contextmanager
def moto_server(log: Path, host: str = "127.0.0.1", **environment: str) -> Iterator[Aws]:
    """Runs a server; it is gone at the end. Instance types and AMIs are checked as EC2 checks them."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port = probe.getsockname()[1]
    strict = {"MOTO_EC2_ENABLE_INSTANCE_TYPE_VALIDATION": "1", "MOTO_ENABLE_AMI_VALIDATION": "1"}
    command = [sys.executable, "-m", "moto.server", "--host", host, "--port", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env={**os.environ, **strict, **environment}, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        _wait_until_up(f"http://{host}:{port}", process, log)
        yield Aws(f"http://{host}:{port}")
    finally:
        process.kill()
        process.wait(10)


def _wait_until_up(endpoint: str, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, f"moto_server ended:\n{log.read_text()}"
        try:
            urllib.request.urlopen(f"{endpoint}/moto-api/data.json", timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise TimeoutError(f"moto_server did not answer within {START_SECONDS} s:\n{log.read_text()}")
