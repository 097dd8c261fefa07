"""A host in AWS: it takes its address, fetches its keys from the Parameter Store, and copies the run from and to S3.

boto3 finds region, endpoint and credentials itself, in the environment and the instance's profile.
"""

import contextlib
import datetime
import itertools
import json
import logging
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import boto3
from boto3.exceptions import Boto3Error
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from host_environment import HostError, metadata, role, variable

logger = logging.getLogger("apexrl_host")

AWS_ERRORS = (BotoCoreError, ClientError, Boto3Error)
SECRETS = {"replay": ("replay", "actor"), "learner": ("learner",), "actor": ("actor",)}
"""The secret keys of a host, by its role. The replay's host also runs the evaluator, which is an actor."""
NUMBERED = re.compile(r"checkpoints/update-[0-9]{12}\.safetensors")
"""The checkpoints that `--keep-checkpoints` keeps; the learner forgets the older ones, and S3 does not."""
COMMAND_SECONDS = 10.0
QUICKLY = Config(connect_timeout=5, read_timeout=10, retries={"mode": "standard", "max_attempts": 2})


@contextlib.contextmanager
def _told_by_aws() -> Iterator[None]:
    """Makes errors of AWS those of the host."""
    try:
        yield
    except AWS_ERRORS as error:
        raise HostError(str(error)) from error


@_told_by_aws()
def keys(directory: Path) -> None:
    """Fetches the secret keys of this host and all public ones into files that only this user may read.

    Raises: HostError when one is missing; the unit tries again, as somebody may make it yet.
    """
    secrets = [f"{name}.secret" for name in SECRETS[role()]]
    names = [*secrets, *(f"{name}.public" for name in SECRETS)]
    prefix = variable("APEXRL_KEYS_PATH")
    answer = boto3.client("ssm").get_parameters(Names=[f"{prefix}/{name}" for name in names], WithDecryption=True)
    values = {PurePosixPath(entry["Name"]).name: entry["Value"].strip() for entry in answer["Parameters"]}
    bad = [name for name in names if not re.fullmatch(r"[!-~]{40}", values.get(name, ""))]
    if bad:
        cluster, region = os.environ.get("APEXRL_CLUSTER"), os.environ.get("AWS_DEFAULT_REGION")
        raise HostError(
            f"the Parameter Store has no key as {', '.join(f'{prefix}/{name}' for name in bad)}: "
            f"run python -m deploy keys --cluster {cluster} --region {region}"
        )
    for name in names:
        path = directory / name
        temporary = directory / f".{name}.tmp"
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(values[name] + "\n")
        temporary.replace(path)
    logger.info("%d keys are in %s", len(names), directory)


class Bucket:
    """The run's place in S3: bucket/cluster/run/."""

    def __init__(self) -> None:
        self.name = variable("APEXRL_BUCKET")
        self.prefix = f"{variable('APEXRL_CLUSTER')}/{variable('APEXRL_RUN')}/"
        self.client: Any = boto3.client("s3")

    def files(self) -> list[str]:
        """Returns the names of all files, relative to the prefix, in the order of their uploads.

        Raises: HostError for a name that would lead out of the run directory.
        """
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.name, Prefix=self.prefix)
        entries = [entry for page in pages for entry in page.get("Contents", [])]
        entries.sort(key=lambda entry: (entry["LastModified"], entry["Key"]))
        names = [entry["Key"].removeprefix(self.prefix) for entry in entries]
        for name in names:
            if ".." in PurePosixPath(name).parts or PurePosixPath(name).is_absolute():
                raise HostError(f"s3://{self.name}/{self.prefix}{name} is no file of a run: remove it")
        return [name for name in names if not name.endswith("/")]  # as the "folders" that the console makes


@_told_by_aws()
def restore(run_dir: Path) -> None:
    """Fetches the run so far from S3, all of it or nothing, unless the directory already holds something.

    S3 has every numbered checkpoint that there was. The run gets the newest, as many as its learner keeps.

    Raises: HostError when S3 does not give all of it; the unit tries again.
    """
    if run_dir.is_dir() and any(run_dir.iterdir()):
        logger.info("%s is not empty: the run goes on with what is here", run_dir)
        return
    bucket = Bucket()
    names = bucket.files()
    if not names:
        logger.info("s3://%s/%s is empty: a new run", bucket.name, bucket.prefix)
        return
    numbered = [name for name in names if NUMBERED.fullmatch(name)]
    kept = int(_flags().get("--keep-checkpoints", "0"))
    old = set(numbered[: max(len(numbered) - kept, 0)])
    names = [name for name in names if name not in old]
    arriving = run_dir.with_name(run_dir.name + ".arriving")  # no partial copy can pass for the run
    shutil.rmtree(arriving, ignore_errors=True)
    uploaded = Uploaded(run_dir)
    for name in names:
        path = arriving / name
        path.parent.mkdir(parents=True, exist_ok=True)
        bucket.client.download_file(bucket.name, bucket.prefix + name, str(path))
        uploaded.add(name, _state(path.stat()))
    uploaded.save()
    arriving.rename(run_dir)
    logger.info("%d files of s3://%s/%s are in %s", len(names), bucket.name, bucket.prefix, run_dir)


class Uploaded:
    """Remembers which state of each file S3 has, in a file next to the run directory."""

    def __init__(self, run_dir: Path):
        self._path = run_dir.with_name(run_dir.name + ".uploaded.json")
        self._states: dict[str, str] = {}
        with contextlib.suppress(FileNotFoundError, ValueError):  # without this file everything is uploaded again
            self._states = json.loads(self._path.read_text())

    def has(self, name: str, path: Path) -> bool:
        """Returns whether S3 has the file as it is."""
        return self._states.get(name) == _state(path.stat())

    def add(self, name: str, state: str) -> None:
        """Notes that S3 has a file in a state."""
        self._states[name] = state

    def save(self) -> None:
        """Writes the states to the file."""
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self._states))
        temporary.replace(self._path)


@_told_by_aws()
def deadline() -> None:
    """Prints the deadline of the cluster.

    Raises: HostError when the Parameter Store does not tell it.
    """
    answer = boto3.client("ssm", config=QUICKLY).get_parameter(Name=variable("APEXRL_DEADLINE"))
    print(answer["Parameter"]["Value"])


@_told_by_aws()
def finish(run_dir: Path) -> None:
    """Ends the cluster when its run has reached its end: all groups at zero, and a deadline that is now.

    Raises: HostError when something was not done; then the cluster stays, and the unit tries again.
    """
    if not _is_complete(run_dir):
        logger.info("the learner has stopped before the end of its run: the cluster stays")
        return
    sync(run_dir)
    now = datetime.datetime.now(datetime.UTC)
    for group in variable("APEXRL_GROUPS").split():
        _scale_to_zero(group)
    end = f"{now:%Y-%m-%dT%H:%M:%SZ}"
    boto3.client("ssm").put_parameter(Name=variable("APEXRL_DEADLINE"), Value=end, Type="String", Overwrite=True)
    leave()  # at last, as AWS then ends this host
    logger.info("the run is complete: all hosts power off within two minutes")


@_told_by_aws()
def leave() -> None:
    """Scales the group of this learner host to zero: a host that ends by itself would be replaced for ever.

    Raises: HostError when AWS does not do it.
    """
    _scale_to_zero(variable("APEXRL_GROUP"))


def _scale_to_zero(group: str) -> None:
    boto3.client("autoscaling", config=QUICKLY).set_desired_capacity(AutoScalingGroupName=group, DesiredCapacity=0)


def _is_complete(run_dir: Path) -> bool:
    """Returns whether the run has made the updates or frames that the learner's flags ask for."""
    wanted = _flags()
    status = json.loads((run_dir / "status.json").read_text())
    made = {"--total-frames": status["frames"], "--total-updates": status["counters"]["updates"]}
    return any(0 < int(wanted.get(flag, "0")) <= count for flag, count in made.items())


def _flags() -> dict[str, str]:
    """Returns the words that follow each of the learner's flags."""
    return dict(itertools.pairwise(shlex.split(variable("APEXRL_FLAGS"))))


def address() -> None:
    """Takes the private address of this host's rank, also from an instance that hangs, and lets Linux answer to it.

    A group gives each new instance another address. That of the rank is added to its network interface.

    Raises: HostError when AWS does not give it. OSError when the metadata service does not answer.
    """
    own = variable("APEXRL_ADDRESS", r"([0-9]{1,3}\.){3}[0-9]{1,3}")
    known = f"network/interfaces/macs/{metadata('mac')}"
    interface = metadata(f"{known}/interface-id")
    if own not in metadata(f"{known}/local-ipv4s").split():
        assign(own, interface)
    # On lo, as systemd-networkd removes from the other interfaces what it does not know. Linux answers there, too.
    subprocess.run(["ip", "address", "replace", f"{own}/32", "dev", "lo"], check=True, timeout=COMMAND_SECONDS)
    logger.info("%s is the address of this host, at %s", own, interface)


@_told_by_aws()
def assign(own: str, interface: str) -> None:
    """Gives an address to a network interface of this host.

    Raises: HostError when AWS does not.
    """
    answer = boto3.client("ec2", config=QUICKLY).assign_private_ip_addresses(
        NetworkInterfaceId=interface, PrivateIpAddresses=[own], AllowReassignment=True
    )
    if own not in [entry["PrivateIpAddress"] for entry in answer["AssignedPrivateIpAddresses"]]:
        raise HostError(f"AWS has not given {own} to {interface}")


def _state(stat: os.stat_result) -> str:
    return f"{stat.st_size} {stat.st_mtime_ns}"


def sync(run_dir: Path) -> None:
    """Uploads the files that have changed since the last time. A file that fails does not stop the others.

    The units let one process at a time do it: the last upload of a learner waits for the timer's.

    Raises: HostError when a file was not uploaded.
    """
    if not run_dir.is_dir():
        logger.info("%s is not there yet: nothing to upload", run_dir)
        return
    bucket, uploaded = Bucket(), Uploaded(run_dir)
    names = sorted(
        str(path.relative_to(run_dir))
        for path in run_dir.rglob("*")
        if path.is_file() and not path.is_symlink() and path.suffix not in (".tmp", ".lock")
    )
    changed = [name for name in names if not uploaded.has(name, run_dir / name)]
    failures = [failure for name in changed if (failure := _upload(bucket, uploaded, run_dir, name))]
    if failures:
        raise HostError(f"{len(failures)} of {len(changed)} files were not uploaded, the first: {failures[0]}")
    logger.info("%d files went to s3://%s/%s", len(changed), bucket.name, bucket.prefix)


def _upload(bucket: Bucket, uploaded: Uploaded, run_dir: Path, name: str) -> str:
    """Uploads one file; returns the error as text, or an empty string."""
    try:
        with (run_dir / name).open("rb") as file:  # opened once: all parts are of one file, also when it is replaced
            state = _state(os.fstat(file.fileno()))
            bucket.client.upload_fileobj(file, bucket.name, bucket.prefix + name)
    except FileNotFoundError:  # it was removed meanwhile
        return ""
    except (*AWS_ERRORS, OSError) as error:  # OSError: for example root's file, which we may not read
        return f"{name}: {error}"
    uploaded.add(name, state)
    uploaded.save()
    return ""
