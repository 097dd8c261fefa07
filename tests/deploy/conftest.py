"""What the tests of deploy/ share: AWS as moto serves it, and the scripts as the processes that a user starts."""

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.deploy.image_build import build  # noqa: F401 - a fixture
from tests.deploy.moto_process import Aws, moto_server
from tests.system.processes import ROOT

CURE = "pip install -r requirements-deploy.txt"


@pytest.fixture(scope="session")
def aws_process(tmp_path_factory) -> Iterator[Aws]:
    """One server for all tests of a session; `aws` is the same server, empty."""
    missing = [name for name in ("boto3", "moto", "flask") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: {CURE}")
    with moto_server(tmp_path_factory.mktemp("moto") / "moto.log") as server:
        yield server


@pytest.fixture
def aws(aws_process: Aws) -> Aws:
    """AWS with nothing in it."""
    aws_process.reset()
    return aws_process


@pytest.fixture
def run_script(aws: Aws) -> Callable[..., subprocess.CompletedProcess]:
    """Runs a script of deploy/ against `aws`; further variables of its environment by name."""

    def run(name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, str(ROOT / "deploy" / name), *arguments],
            env=aws.environment | environment,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )

    return run
