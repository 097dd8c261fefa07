"""Whether the account can run the cluster: preflight.py asks, and the cures that cost nothing are run."""

import re
import shlex
import time
from typing import NamedTuple

from tfvars import DeployError

from commands.steps import StepError, copy_output, run

PREFLIGHT_SECONDS = 300.0
CURE_SECONDS = 60.0
QUOTA_MINUTES = 15
QUOTA_POLL_SECONDS = 60.0
MADE_LATER = ("bucket", "image", "release", "keys")
"""Findings of preflight.py that later steps of `up` cure."""
FAIL = re.compile(r"^FAIL  ([^:\n]+): ((?:.|\n)*?)\n      cure: (.*)$", re.MULTILINE)  # texts of AWS have lines
ROLE = re.compile(r"aws iam create-service-linked-role --aws-service-name [a-z]+\.amazonaws\.com")


class Failure(NamedTuple):
    """A finding of preflight.py that is no PASS."""

    name: str
    finding: str
    cure: str


def failures(release: str | None = None, request_quotas: bool = False) -> list[Failure]:
    """Runs preflight.py, and returns its failures.

    Args:
      release: that hosts will install, empty with images; None: as the cluster is described.

    Raises: StepError when it did not come to its end.
    """
    given = (*(() if release is None else ("--release", release)), *(("--request-quotas",) if request_quotas else ()))
    printed = copy_output("python", "deploy/preflight.py", *given, seconds=PREFLIGHT_SECONDS)
    if not re.search(r"^(ready for terraform apply|not ready: )", printed, re.MULTILINE):
        raise StepError("deploy/preflight.py did not come to its end; see above")
    return [Failure(*found) for found in FAIL.findall(printed)]


def check_account(release: str, request_quotas: bool) -> None:
    """Checks all that `up` cannot make itself. The roles that AWS wants, which cost nothing, it makes.

    Args:
      release: the version that hosts will install, empty with images.
      request_quotas: whether to ask AWS for quotas that are too low, and to wait some minutes for them.
    Raises: DeployError when something has to be changed first. StepError when AWS has not granted the quotas yet.
    """
    blocking = _blocking(release, request_quotas)
    for failure in blocking:
        if found := ROLE.match(failure.cure):
            run(*shlex.split(found[0]), seconds=CURE_SECONDS)
    blocking = [failure for failure in blocking if not ROLE.match(failure.cure)]
    if others := [failure for failure in blocking if failure.name != "quota"]:
        raise DeployError(f"{_text(others)}; then the same command again")
    if not blocking:
        return
    if not request_quotas:
        raise DeployError(f"{_text(blocking)}; or the same command with --request-quotas, which asks AWS")
    _wait_for_quotas(release)


def _wait_for_quotas(release: str) -> None:
    deadline = time.monotonic() + QUOTA_MINUTES * 60
    while time.monotonic() < deadline:
        print(f"waiting for AWS to grant the quotas (at most {QUOTA_MINUTES} minutes here)", flush=True)
        time.sleep(QUOTA_POLL_SECONDS)
        if not _blocking(release):
            return
    raise StepError("AWS has the requests for quotas; it writes when they are granted. Then the same command again")


def check_ready() -> None:
    """Checks that everything is there.

    Raises: DeployError when something is missing.
    """
    found = failures()
    if found:
        raise DeployError(_text(found))


def _blocking(release: str, request_quotas: bool = False) -> list[Failure]:
    return [failure for failure in failures(release, request_quotas) if failure.name not in MADE_LATER]


def _text(found: list[Failure]) -> str:
    return "; ".join(f"{failure.name}: {failure.finding} ({failure.cure})" for failure in found)
