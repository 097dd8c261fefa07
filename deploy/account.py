"""The checks of the account before a start, and the cures that cost nothing."""

import re
import shlex
import time

from deploy.cluster import Cluster
from deploy.findings import Line
from deploy.preflight import failures
from deploy.steps import DeployError, StepError, run, show

CURE_SECONDS = 60.0
QUOTA_MINUTES = 15
QUOTA_POLL_SECONDS = 60.0
MADE_LATER = ("bucket", "image", "release", "keys")
"""Findings that later steps of `up` cure."""
ROLE = re.compile(r"aws iam create-service-linked-role --aws-service-name [a-z]+\.amazonaws\.com")


def check_account(cluster: Cluster, request_quotas: bool) -> None:
    """Checks all that `up` cannot make itself. The roles that AWS wants, which cost nothing, it makes.

    Args:
      cluster: with the release that its hosts will install, if any.
      request_quotas: whether to ask AWS for quotas that are too low, and to wait some minutes for them.
    Raises: DeployError when something has to be changed first. StepError when AWS has not granted the quotas yet.
    """
    blocking = _blocking(cluster, request_quotas)
    for line in blocking:
        if found := ROLE.match(line.cure):
            run(*shlex.split(found[0]), seconds=CURE_SECONDS)
    blocking = [line for line in blocking if not ROLE.match(line.cure)]
    if others := [line for line in blocking if line.name != "quota"]:
        raise DeployError(f"{_text(others)}; then the same command again")
    if not blocking:
        return
    if not request_quotas:
        raise DeployError(f"{_text(blocking)}; or the same command with --request-quotas, which asks AWS")
    deadline = time.monotonic() + QUOTA_MINUTES * 60
    while time.monotonic() < deadline:
        print(f"waiting for AWS to grant the quotas (at most {QUOTA_MINUTES} minutes here)", flush=True)
        time.sleep(QUOTA_POLL_SECONDS)
        if not _blocking(cluster):
            return
    raise StepError("AWS has the requests for quotas; it writes when they are granted. Then the same command again")


def check_ready(cluster: Cluster) -> None:
    """Checks that everything is there.

    Raises: DeployError when something is missing.
    """
    show("python", "-m", "deploy", "preflight")
    if found := failures(cluster):
        raise DeployError(_text(found))


def _blocking(cluster: Cluster, request_quotas: bool = False) -> list[Line]:
    show("python", "-m", "deploy", "preflight", *(("--request-quotas",) if request_quotas else ()))
    return [line for line in failures(cluster, request_quotas=request_quotas) if line.name not in MADE_LATER]


def _text(found: list[Line]) -> str:
    return "; ".join(f"{line.name}: {line.finding} ({line.cure})" for line in found)
