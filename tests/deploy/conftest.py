"""Fixtures of the tests of deploy/: AWS as moto serves it, the scripts as a user starts them, Terraform without AWS."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deploy import rootfs, site
from tests.deploy.clone import clone  # noqa: F401 - a fixture
from tests.deploy.commands import ran
from tests.deploy.host_commands import bucket, finish, start, systemctl  # noqa: F401 - fixtures
from tests.deploy.image_build import build  # noqa: F401 - a fixture
from tests.deploy.moto_process import Aws, moto_server
from tests.deploy.needed import find_terraform, with_terraform
from tests.deploy.terraform import BUCKET, Workspace, as_flags, copy_of, offline_provider
from tests.system.processes import ROOT


@pytest.fixture(scope="session", autouse=True)
def surroundings() -> Iterator[None]:
    """Hides the user's own account and cluster."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(("AWS_", "TF_")):
                patch.delenv(name)
        patch.setenv("AWS_CONFIG_FILE", os.devnull)
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
        yield


@pytest.fixture(scope="session")
def aws_process(tmp_path_factory) -> Iterator[Aws]:
    """One server for all tests of a session; `aws` is the same server, empty."""
    log = tmp_path_factory.mktemp("moto") / "moto.log"
    with moto_server(log, MOTO_EC2_LOAD_DEFAULT_AMIS="false") as server:
        yield server


@pytest.fixture
def aws(aws_process: Aws) -> Aws:
    """AWS with nothing in it, not even public images."""
    aws_process.reset()
    return aws_process


@pytest.fixture(scope="session")
def deploy(tmp_path_factory) -> Path:
    """A copy of deploy/ in which no cluster is described."""
    return copy_of(ROOT / "deploy", tmp_path_factory.mktemp("copy") / "deploy")


@pytest.fixture
def run_deploy(aws: Aws, deploy: Path) -> Callable[..., subprocess.CompletedProcess]:
    """Runs `python -m deploy` against `aws`; further variables of its environment by name."""

    def run(*words: str, **environment: str) -> subprocess.CompletedProcess:
        return ran(
            [sys.executable, "-m", "deploy", *words],
            cwd=deploy.parent,
            env=aws.environment | with_terraform() | environment,
        )

    return run


@pytest.fixture
def cost(deploy: Path, monkeypatch, capsys) -> Callable[..., subprocess.CompletedProcess]:
    """Runs `cost` in this process, where no cluster is described; a plan's variables by name."""
    from deploy import __main__, cluster

    monkeypatch.setenv("PATH", with_terraform()["PATH"])
    monkeypatch.setattr(cluster, "CONFIGURATION", deploy / "terraform" / "cluster")

    def tell(*words: str, **variables: Any) -> subprocess.CompletedProcess:
        command = ["cost", *words, *as_flags(variables)]
        status = __main__.main(command)
        return subprocess.CompletedProcess(command, status, *capsys.readouterr())

    return tell


@pytest.fixture(scope="session")
def terraform_environment() -> Iterator[dict[str, str]]:
    """The environment in which Terraform uses the offline provider."""
    find_terraform()
    with offline_provider() as environment:
        yield environment


def _initialized(configuration: str, directory: Path, environment: dict[str, str]) -> Workspace:
    workspace = Workspace(configuration, directory, environment)
    workspace.must("init")
    return workspace


@pytest.fixture(scope="session")
def cluster(terraform_environment, tmp_path_factory) -> Workspace:
    """The cluster's configuration, initialized, nothing applied; for plans and copies."""
    return _initialized("cluster", tmp_path_factory.mktemp("terraform"), terraform_environment)


@pytest.fixture(scope="session")
def bootstrap(terraform_environment, tmp_path_factory) -> Workspace:
    """Bootstrap's configuration, initialized, nothing applied; for plans and copies."""
    return _initialized("bootstrap", tmp_path_factory.mktemp("terraform"), terraform_environment)


@pytest.fixture(scope="session")
def applied_cluster(cluster, tmp_path_factory) -> Workspace:
    """A cluster with every variable at its default; for copies, in which it can be changed."""
    workspace = cluster.copy(tmp_path_factory.mktemp("applied"))
    workspace.apply({"results_bucket": BUCKET})
    return workspace


@pytest.fixture(scope="session")
def applied(applied_cluster) -> dict[str, Any]:
    """The state of a cluster with every variable at its default."""
    return applied_cluster.state()


@pytest.fixture(scope="session")
def applied_bootstrap(bootstrap, tmp_path_factory) -> Workspace:
    """The applied configuration of all that outlives clusters. Tests do not change it."""
    workspace = bootstrap.copy(tmp_path_factory.mktemp("applied"))
    workspace.apply({"budget_emails": ["you@example.com"]})
    return workspace


@pytest.fixture
def apply_cluster(cluster, tmp_path) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Applies a new cluster with some variables; returns its state."""
    return lambda variables: cluster.copy(tmp_path).apply({"results_bucket": BUCKET} | variables)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The address of this machine at which the machines of a cluster find AWS."""
    rootfs.require()
    find_terraform()
    with site.host_address() as address:
        yield address


@pytest.fixture(scope="module")
def cloud(address, tmp_path_factory) -> Iterator[Aws]:
    """AWS with the results bucket of a cluster of machines."""
    with moto_server(tmp_path_factory.mktemp("aws") / "moto.log", address) as aws:
        aws.client("s3").create_bucket(Bucket=BUCKET)
        yield aws
