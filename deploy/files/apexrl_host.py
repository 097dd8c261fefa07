"""What a host of a cluster does beside its role; the units in `systemd/` run it: `apexrl_host.py COMMAND [DIRECTORY]`.

check     is /etc/apexrl/role.env complete?
keys      CURVE keys of this host's role, from the Parameter Store into a directory
restore   the run so far, from S3 into an empty run directory
sync      what has changed in the run directory, to S3
spot      waits for the notice that a spot instance is taken back, then stops the actors
limit     waits for the deadline of the cluster, then powers the host off
logs      writes the configuration of the CloudWatch agent

Everything comes from the environment (role.env); credentials are the instance's own. Only keys, restore and sync import
boto3. An error ends the program with status 1 and a line that says what to do; the unit starts it again.
"""

import contextlib
import datetime
import fcntl
import json
import logging
import os
import re
import shlex
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

logger = logging.getLogger("apexrl_host")

SECRETS = {"replay": ("replay", "actor"), "learner": ("learner",), "actor": ("actor",)}
"""Secret keys of a host by its role: the evaluator on the replay's host is an actor."""
PUBLIC = ("replay", "learner", "actor")
PATIENCE_SECONDS = 600.0
RETRY_SECONDS = 5.0
SPOT_PERIOD_SECONDS = 5.0
LIMIT_PERIOD_SECONDS = 10.0
NO_DEADLINE_SECONDS = 3600.0
LOCK_SECONDS = 120.0
METADATA_SECONDS = 2.0
TOKEN_SECONDS = 21600
AGENT_CONFIG = Path(__file__).with_name("cloudwatch-agent.json")


class HostError(Exception):
    """Something that a person has to mend; the message says how."""


def variable(name: str, pattern: str = r".+") -> str:
    """Returns a variable of role.env.

    Raises: HostError when it is missing or malformed.
    """
    value = os.environ.get(name, "")
    if not re.fullmatch(pattern, value):
        raise HostError(f"{name}={value!r} in /etc/apexrl/role.env: a value like {pattern} was expected")
    return value


def role() -> str:
    """Returns what this host is for."""
    return variable("APEXRL_ROLE", "replay|learner|actor")


def deadline() -> datetime.datetime:
    """Returns when the host has to be off.

    Raises: HostError when it is not a time like 2026-01-02T03:04:05Z.
    """
    text = variable("APEXRL_DEADLINE")
    try:
        return datetime.datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=datetime.UTC)
    except ValueError as error:
        raise HostError(f"APEXRL_DEADLINE={text!r}: a time like 2026-01-02T03:04:05Z was expected") from error


def check() -> None:
    """Raises HostError when role.env cannot be what Terraform writes."""
    host_role = role()
    deadline()
    variable("APEXRL_CLUSTER", r"[a-z0-9-]+")
    variable("AWS_DEFAULT_REGION")
    variable("APEXRL_KEYS_PATH", r"(/[A-Za-z0-9_.-]+)+")
    if host_role == "learner":
        variable("APEXRL_BUCKET", r"[a-z0-9.-]+")
        variable("APEXRL_RUN", r"[A-Za-z0-9._-]+")
    for name in ("APEXRL_FLAGS", "APEXRL_EVALUATOR_FLAGS"):
        try:
            shlex.split(os.environ.get(name, ""))
        except ValueError as error:
            raise HostError(f"{name}: {error}") from error


def until_it_works(attempt: Callable[[], None], patience_seconds: float = PATIENCE_SECONDS) -> None:
    """Calls again and again until no AWS error and no HostError comes; the last one ends it after the patience.

    A host is up before its profile has its rights everywhere, and perhaps before somebody has made the keys.
    """
    import boto3.exceptions
    import botocore.exceptions

    errors = (
        HostError,
        botocore.exceptions.BotoCoreError,
        botocore.exceptions.ClientError,
        boto3.exceptions.Boto3Error,
    )
    end = time.monotonic() + patience_seconds
    told = ""
    while True:
        try:
            return attempt()
        except errors as error:
            if time.monotonic() >= end:
                raise HostError(str(error)) from error
            if str(error) != told:
                told = str(error)
                logger.warning("%s (trying again for %.0f s)", told, end - time.monotonic())
        time.sleep(RETRY_SECONDS)


def keys(directory: Path) -> None:
    """Fetches the secret keys of this host and all public ones into a directory that only we may read."""
    secrets = [f"{name}.secret" for name in SECRETS[role()]]
    names = [*secrets, *(f"{name}.public" for name in PUBLIC)]
    until_it_works(lambda: _fetch_keys(directory, names))
    logger.info("%d keys are in %s", len(names), directory)


def _fetch_keys(directory: Path, names: list[str]) -> None:
    import boto3

    prefix = variable("APEXRL_KEYS_PATH")
    answer = boto3.client("ssm").get_parameters(Names=[f"{prefix}/{name}" for name in names], WithDecryption=True)
    values = {PurePosixPath(entry["Name"]).name: entry["Value"].strip() for entry in answer["Parameters"]}
    bad = [name for name in names if not re.fullmatch(r"[!-~]{40}", values.get(name, ""))]
    if bad:
        cluster, region = os.environ.get("APEXRL_CLUSTER"), os.environ.get("AWS_DEFAULT_REGION")
        raise HostError(
            f"the Parameter Store has no key as {', '.join(f'{prefix}/{name}' for name in bad)}: "
            f"run python deploy/keys.py --cluster {cluster} --region {region}"
        )
    for name in names:
        path = directory / name
        temporary = directory / f".{name}.tmp"
        mode = 0o600 if name.endswith(".secret") else 0o644
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w") as file:
            file.write(values[name] + "\n")
        temporary.replace(path)


class Bucket:
    """The run's place in S3: bucket/cluster/run/."""

    def __init__(self) -> None:
        import boto3

        self.name = variable("APEXRL_BUCKET")
        self.prefix = f"{variable('APEXRL_CLUSTER')}/{variable('APEXRL_RUN')}/"
        self.client: Any = boto3.client("s3")

    def files(self) -> Iterator[str]:
        """Yields the names of all files, below the prefix.

        Raises: HostError for a name that would lead out of the run directory.
        """
        for page in self.client.get_paginator("list_objects_v2").paginate(Bucket=self.name, Prefix=self.prefix):
            for entry in page.get("Contents", []):
                name = entry["Key"].removeprefix(self.prefix)
                if name.endswith("/"):  # the "folders" that the console makes
                    continue
                if ".." in PurePosixPath(name).parts or PurePosixPath(name).is_absolute():
                    raise HostError(f"s3://{self.name}/{entry['Key']} is no file of a run: remove it")
                yield name


def restore(run_dir: Path) -> None:
    """Brings the run so far from S3, all of it or nothing, unless there is something in the directory already."""
    if run_dir.is_dir() and any(run_dir.iterdir()):
        logger.info("%s is not empty: the run goes on with what is here", run_dir)
        return
    until_it_works(lambda: _restore(run_dir))


def _restore(run_dir: Path) -> None:
    bucket = Bucket()
    names = list(bucket.files())
    if not names:
        logger.info("s3://%s/%s is empty: a new run", bucket.name, bucket.prefix)
        return
    arriving = run_dir.with_name(run_dir.name + ".arriving")  # never taken for the run when we are cut off
    uploaded = Uploaded(run_dir)
    for name in names:
        path = arriving / name
        path.parent.mkdir(parents=True, exist_ok=True)
        bucket.client.download_file(bucket.name, bucket.prefix + name, str(path))
        uploaded.add(name, path)
    uploaded.save()
    arriving.rename(run_dir)
    logger.info("%d files of s3://%s/%s are in %s", len(names), bucket.name, bucket.prefix, run_dir)


class Uploaded:
    """Which state of each file S3 has, kept beside the run directory."""

    def __init__(self, run_dir: Path):
        self._path = run_dir.with_name(run_dir.name + ".uploaded.json")
        self._states: dict[str, str] = {}
        with contextlib.suppress(FileNotFoundError, ValueError):  # without it everything is uploaded again
            self._states = json.loads(self._path.read_text())

    def has(self, name: str, path: Path) -> bool:
        """Returns whether S3 has the file as it is."""
        return self._states.get(name) == _state(path)

    def add(self, name: str, path: Path) -> None:
        """Takes note that S3 has the file as it is."""
        self._states[name] = _state(path)

    def save(self) -> None:
        """Writes it down."""
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self._states))
        temporary.replace(self._path)


def _state(path: Path) -> str:
    stat = path.stat()
    return f"{stat.st_size} {stat.st_mtime_ns}"


def sync(run_dir: Path) -> None:
    """Uploads what has changed since the last time; a file that fails does not keep the others back."""
    if not run_dir.is_dir():
        logger.info("%s is not there yet: nothing to upload", run_dir)
        return
    with _alone(run_dir.with_name(run_dir.name + ".sync.lock")):
        bucket, uploaded = Bucket(), Uploaded(run_dir)
        names = sorted(
            str(path.relative_to(run_dir))
            for path in run_dir.rglob("*")
            if path.is_file() and not path.is_symlink() and path.suffix != ".tmp"
        )
        changed = [name for name in names if not uploaded.has(name, run_dir / name)]
        failures = [failure for name in changed if (failure := _upload(bucket, uploaded, run_dir, name))]
    if failures:
        raise HostError(f"{len(failures)} of {len(changed)} files were not uploaded, the first: {failures[0]}")
    logger.info("%d files went to s3://%s/%s", len(changed), bucket.name, bucket.prefix)


def _upload(bucket: Bucket, uploaded: Uploaded, run_dir: Path, name: str) -> str:
    """Uploads one file; returns what went wrong, or nothing."""
    import boto3.exceptions
    import botocore.exceptions

    # A large file is read in parts, each by opening its name again. A second name keeps the checkpoint that it was.
    steady = run_dir.with_name(run_dir.name + ".uploading")
    steady.unlink(missing_ok=True)
    try:
        os.link(run_dir / name, steady)
        bucket.client.upload_file(str(steady), bucket.name, bucket.prefix + name)
        uploaded.add(name, steady)
        uploaded.save()
    except FileNotFoundError:  # removed meanwhile
        return ""
    except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError, boto3.exceptions.Boto3Error) as error:
        return f"{name}: {error}"
    finally:
        steady.unlink(missing_ok=True)
    return ""


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Holds a lock, so that the last upload of a learner waits for the timer's.

    Raises: HostError when another one holds it for too long.
    """
    end = time.monotonic() + LOCK_SECONDS
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise HostError(f"another upload has held {path} for {LOCK_SECONDS:.0f} s") from None
            time.sleep(0.2)
        yield


class Metadata:
    """The instance metadata service, version 2."""

    def __init__(self) -> None:
        self._url = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://169.254.169.254").rstrip("/")
        self._token = ""
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open

    def get(self, path: str) -> str | None:
        """Returns what is at a path, None when there is nothing.

        Raises: OSError when the service does not answer, or not as it should.
        """
        if not self._token:
            self._token = self._ask("PUT", "/latest/api/token", "ttl-seconds", str(TOKEN_SECONDS))
        try:
            return self._ask("GET", path, "", self._token)
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            self._token = ""  # 401: it has run out
            raise

    def _ask(self, method: str, path: str, header: str, value: str) -> str:
        name = f"X-aws-ec2-metadata-token-{header}".rstrip("-")
        request = urllib.request.Request(self._url + path, method=method, headers={name: value})
        with self._open(request, timeout=METADATA_SECONDS) as answer:
            return str(answer.read().decode())


def spot() -> None:
    """Stops the actors when the instance is to be taken back: the notice comes two minutes before."""
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
    """Powers the host off at the deadline; one without a deadline that can be read gets an hour from its start."""
    try:
        end = deadline()
    except HostError as error:
        started = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        end = datetime.datetime.fromtimestamp(started + NO_DEADLINE_SECONDS, datetime.UTC)
        logger.error("%s", error)
    logger.info("this host is powered off at %s", end.isoformat())
    while datetime.datetime.now(datetime.UTC) < end:
        left = (end - datetime.datetime.now(datetime.UTC)).total_seconds()
        time.sleep(min(max(left, 0.0), LIMIT_PERIOD_SECONDS))  # in short steps: the clock may be set meanwhile
    logger.warning("the time of the cluster is up: powering off")
    subprocess.run(["systemctl", "poweroff"], check=True, timeout=60)
    time.sleep(PATIENCE_SECONDS)  # stopped on the way down; if not, the unit asks again


def logs(path: Path) -> None:
    """Writes the configuration of the CloudWatch agent with this host's log group and role."""
    text = (
        AGENT_CONFIG.read_text().replace("CLUSTER", variable("APEXRL_CLUSTER", r"[a-z0-9-]+")).replace("ROLE", role())
    )
    path.write_text(text)


def main(arguments: list[str]) -> int:
    """Runs a command; returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    plain: dict[str, Callable[[], None]] = {"check": check, "spot": spot, "limit": limit}
    placed: dict[str, Callable[[Path], None]] = {"keys": keys, "restore": restore, "sync": sync, "logs": logs}
    try:
        match arguments:
            case [name] if name in plain:
                plain[name]()
            case [name, place] if name in placed:
                placed[name](Path(place))
            case _:
                print(__doc__, file=sys.stderr)
                return 2
    except (HostError, OSError, subprocess.SubprocessError) as error:
        logger.error("%s: %s", arguments[0], error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
