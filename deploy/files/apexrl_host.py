"""The tasks of a cluster's host besides its role. The units in `systemd/` run `apexrl_host.py COMMAND [PATH]`.

check     checks that /etc/apexrl/role.env is complete
start     starts the units of this host's role, on the replay's host a server for each shard
keys      fetches the CURVE keys of this host's role from the Parameter Store into a directory
restore   fetches the run so far from S3 into an empty run directory
sync      uploads changed files of the run directory to S3
spot      waits for the notice that AWS takes the spot instance back, then stops the actors
limit     waits for the deadline of the cluster, then powers the host off
logs      writes the configuration of the CloudWatch agent

All settings come from the environment (role.env). An error ends the program with status 1 and a line that says what to
do. The unit then starts it again. `limit` must work when nothing else does: only keys, restore and sync import boto3.
"""

import datetime
import logging
import os
import shlex
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from host_environment import HostError, role, variable

logger = logging.getLogger("apexrl_host")

SPOT_PERIOD_SECONDS = 5.0
LIMIT_PERIOD_SECONDS = 10.0
NO_DEADLINE_SECONDS = 3600.0
POWEROFF_SECONDS = 300.0
METADATA_SECONDS = 2.0
TOKEN_SECONDS = 21600
AGENT_CONFIG = Path(__file__).with_name("cloudwatch-agent.json")


def deadline() -> datetime.datetime:
    """Returns the time at which the host has to be off.

    Raises: HostError when APEXRL_DEADLINE is not a time like 2026-01-02T03:04:05Z.
    """
    text = variable("APEXRL_DEADLINE")
    try:
        return datetime.datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=datetime.UTC)
    except ValueError as error:
        raise HostError(f"APEXRL_DEADLINE={text!r}: a time like 2026-01-02T03:04:05Z was expected") from error


def shards() -> int:
    """Returns the number of replay servers on the replay's host.

    Raises: HostError when APEXRL_SHARDS is not a number from 1 to 64.
    """
    return int(variable("APEXRL_SHARDS", r"[1-9]|[1-5][0-9]|6[0-4]"))


def check() -> None:
    """Raises HostError when role.env differs from the form that Terraform writes."""
    host_role = role()
    deadline()
    variable("APEXRL_CLUSTER", r"[a-z0-9-]+")
    variable("AWS_DEFAULT_REGION")
    variable("APEXRL_KEYS_PATH", r"(/[A-Za-z0-9_.-]+)+")
    if host_role == "replay":
        shards()
    if host_role == "learner":
        variable("APEXRL_BUCKET", r"[a-z0-9.-]+")
        variable("APEXRL_RUN", r"[A-Za-z0-9._-]+")
    for name in ("APEXRL_FLAGS", "APEXRL_EVALUATOR_FLAGS"):
        try:
            shlex.split(os.environ.get(name, ""))
        except ValueError as error:
            raise HostError(f"{name}: {error}") from error


def start() -> None:
    """Starts the units of this host's role. It does not wait for them, or cloud-init would wait for missing keys."""
    units = [f"apexrl-{role()}.target"]
    if role() == "replay":
        units += [f"apexrl-replay@{shard}.service" for shard in range(shards())]
    subprocess.run(["systemctl", "start", "--no-block", *units], check=True, timeout=60)


class Metadata:
    """A client of the instance metadata service, version 2."""

    def __init__(self) -> None:
        self._url = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://169.254.169.254").rstrip("/")
        self._token = ""
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open

    def get(self, path: str) -> str | None:
        """Returns the text at a path, None when there is none.

        Raises: OSError when the service does not answer, or answers with an error.
        """
        if not self._token:
            self._token = self._ask("PUT", "/latest/api/token", "ttl-seconds", str(TOKEN_SECONDS))
        try:
            return self._ask("GET", path, "", self._token)
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            self._token = ""  # 401: the token has expired
            raise

    def _ask(self, method: str, path: str, header: str, value: str) -> str:
        name = f"X-aws-ec2-metadata-token-{header}".rstrip("-")
        request = urllib.request.Request(self._url + path, method=method, headers={name: value})
        with self._open(request, timeout=METADATA_SECONDS) as answer:
            return str(answer.read().decode())


def spot() -> None:
    """Stops the actors when AWS takes the instance back. The notice comes two minutes before."""
    metadata = Metadata()
    told = ""
    while True:
        try:
            notice = metadata.get("/latest/meta-data/spot/instance-action")
        except OSError as error:
            notice = None
            if str(error) != told:
                told = str(error)
                logger.warning("the metadata service does not answer: %s", told)
        if notice is not None:
            logger.warning("this spot instance is taken back: %s", notice.strip())
            subprocess.run(["systemctl", "stop", "apexrl-actor.service"], check=True, timeout=110)
            logger.info("the actors have stopped")
            return
        time.sleep(SPOT_PERIOD_SECONDS)


def limit() -> None:
    """Powers the host off at the deadline. A host without a readable deadline gets an hour from its start."""
    try:
        end = deadline()
    except HostError as error:
        started = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        end = datetime.datetime.fromtimestamp(started + NO_DEADLINE_SECONDS, datetime.UTC)
        logger.error("%s", error)
    logger.info("this host is powered off at %s", end.isoformat())
    while datetime.datetime.now(datetime.UTC) < end:
        left = (end - datetime.datetime.now(datetime.UTC)).total_seconds()
        time.sleep(min(max(left, 0.0), LIMIT_PERIOD_SECONDS))  # in short steps, because the clock may be set meanwhile
    logger.warning("the time of the cluster is up: powering off")
    subprocess.run(["systemctl", "poweroff"], check=True, timeout=60)
    time.sleep(POWEROFF_SECONDS)  # the shutdown stops this process; if it does not, the unit asks again


def logs(path: Path) -> None:
    """Writes the configuration of the CloudWatch agent with this host's log group and role."""
    text = (
        AGENT_CONFIG.read_text().replace("CLUSTER", variable("APEXRL_CLUSTER", r"[a-z0-9-]+")).replace("ROLE", role())
    )
    path.write_text(text)


def main(arguments: list[str]) -> int:
    """Runs one command of the command line; returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    plain: dict[str, Callable[[], None]] = {"check": check, "start": start, "spot": spot, "limit": limit}
    try:
        match arguments:
            case [name] if name in plain:
                plain[name]()
            case ["logs", path]:
                logs(Path(path))
            case ["keys" | "restore" | "sync" as name, path]:
                import apexrl_store  # noqa: PLC0415 - see above

                getattr(apexrl_store, name)(Path(path))
            case _:
                print(__doc__, file=sys.stderr)
                return 2
    except (HostError, OSError, subprocess.SubprocessError) as error:
        logger.error("%s: %s", arguments[0], error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
