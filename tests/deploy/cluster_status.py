"""The state of a running cluster: what its learner writes, and waiting for it."""

import datetime
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from apexrl.learning.record.status_file import Status, read_status
from apexrl.networks.checkpoint import Checkpoint, load_checkpoint
from apexrl.networks.headers import LATEST, Counters
from tests.deploy.machine import Machine, wait_until
from tests.deploy.moto_process import REGION, Aws
from tests.deploy.running_cluster import RunningCluster
from tests.deploy.terraform import BUCKET, resources
from tests.system.processes import ROOT

RUN_DIR = "var/lib/apexrl/run"


def store_keys(aws: Aws, name: str, *flags: str) -> None:
    """Makes the keys of a cluster, as a user does."""
    command = [sys.executable, "-m", "deploy", "keys", "--cluster", name, "--region", REGION, *flags]
    subprocess.run(command, cwd=ROOT, env=aws.environment, check=True, capture_output=True, timeout=100)


def put_deadline(aws: Aws, state: dict[str, Any], when: datetime.datetime | None = None) -> None:
    """Stores a deadline where the hosts of a state read it, by default that of the state."""
    parameter = resources(state)["aws_ssm_parameter.deadline"]
    value = f"{when:%Y-%m-%dT%H:%M:%SZ}" if when else parameter["value"]
    aws.client("ssm").put_parameter(Name=parameter["name"], Value=value, Type=parameter["type"], Overwrite=True)


def status(running: RunningCluster) -> Status:
    """Returns the learner's status, from the file that it writes."""
    return read_status(running.hosts["learner"].root / RUN_DIR) or Status("", 0, Counters(), {}, "")


def updates(running: RunningCluster) -> int:
    """Returns the number of updates so far."""
    return status(running).counters.updates


def figure(running: RunningCluster, tag: str) -> float:
    """Returns a metric, -1 where there is none."""
    return status(running).metrics.get(tag, -1.0)


def stored_checkpoint(aws: Aws, cluster: str, directory: Path) -> Checkpoint:
    """Returns the newest checkpoint in S3 of a cluster's run."""
    aws.client("s3").download_file(BUCKET, f"{cluster}/run-1/checkpoints/{LATEST}", str(directory / LATEST))
    return load_checkpoint(directory / LATEST)


def describe(running: RunningCluster) -> str:
    """Returns the state of the cluster, for a test that has waited in vain."""
    journals = [f"{name}:\n{host.journal('apexrl-*')[-3000:]}" for name, host in running.hosts.items()]
    return "\n".join(["the cluster", str(status(running)), *journals])


def wait_for(running: RunningCluster, condition, seconds: float = 90) -> None:
    """Waits until a condition holds."""
    wait_until(condition, seconds, lambda: describe(running))


def continued_from(host: Machine) -> list[int]:
    """Returns the updates from which the learner of a host went on."""
    return [int(found) for found in re.findall(r"continuing from update (\d+)", host.journal("apexrl-learner"))]
