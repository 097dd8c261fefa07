"""What the tests of deploy/ share: AWS as moto serves it, the scripts as a user starts them, Terraform without AWS."""

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.deploy.image_build import build  # noqa: F401 - a fixture
from tests.deploy.moto_process import Aws, moto_server
from tests.deploy.terraform import BUCKET, Workspace, offline_provider, skip_without_tools
from tests.system.processes import ROOT

CURE = "pip install -r requirements-deploy.txt"


@pytest.fixture(scope="session")
def aws_process(tmp_path_factory) -> Iterator[Aws]:
    """One server for all tests of a session; `aws` is the same server, empty."""
    missing = [name for name in ("boto3", "moto", "flask") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: {CURE}")
    log = tmp_path_factory.mktemp("moto") / "moto.log"
    with moto_server(log, MOTO_EC2_LOAD_DEFAULT_AMIS="false") as server:
        yield server


@pytest.fixture
def aws(aws_process: Aws) -> Aws:
    """AWS with nothing in it, not even public images."""
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


@pytest.fixture(scope="session")
def terraform_environment() -> Iterator[dict[str, str]]:
    """The environment in which Terraform uses the offline provider."""
    skip_without_tools()
    with offline_provider() as environment:
        yield environment


@pytest.fixture(scope="session")
def cluster(terraform_environment, tmp_path_factory) -> Workspace:
    """The cluster's configuration, initialized, nothing applied; for plans."""
    workspace = Workspace("cluster", tmp_path_factory.mktemp("terraform"), terraform_environment)
    workspace.must("init")
    return workspace


@pytest.fixture(scope="session")
def applied(terraform_environment, tmp_path_factory) -> dict[str, Any]:
    """The state of a cluster with every variable at its default."""
    workspace = Workspace("cluster", tmp_path_factory.mktemp("applied"), terraform_environment)
    workspace.must("init")
    return workspace.apply({"results_bucket": BUCKET})


@pytest.fixture(scope="session")
def bootstrap(terraform_environment, tmp_path_factory) -> Workspace:
    """Bootstrap's configuration, initialized, nothing applied; for plans."""
    workspace = Workspace("bootstrap", tmp_path_factory.mktemp("terraform"), terraform_environment)
    workspace.must("init")
    return workspace


@pytest.fixture
def apply_cluster(terraform_environment, tmp_path) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Applies a new cluster with some variables; returns its state."""

    def apply(variables: dict[str, Any]) -> dict[str, Any]:
        workspace = Workspace("cluster", tmp_path, terraform_environment)
        workspace.must("init")
        return workspace.apply({"results_bucket": BUCKET} | variables)

    return apply
