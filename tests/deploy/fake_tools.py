"""Stand-ins for terraform, aws and the Session Manager plugin, which do in moto as much as `up` looks at.

`install` makes them. Each writes its command line into a file. FAKE_FAILS names a file with a command
that fails once, and FAKE_FULL one with the zones in which EC2 has no capacity.
"""

import json
import os
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from tests.deploy.needed import find_terraform
from tests.system.processes import ROOT

PROGRAMS = ("terraform", "aws", "session-manager-plugin")
ACCOUNT, REGION = "123456789012", "us-east-1"
OUTPUTS = {
    "deadline": "2099-01-01T00:00:00Z",
    "results": "s3://bucket/apexrl-smoke/run-1/",
    "tensorboard_command": 'aws ssm start-session --region us-east-1 --target "$(aws ec2 describe-instances)"',
    "logs_command": "aws logs tail /apexrl/apexrl-smoke --region us-east-1 --follow",
}
NO_HOST = "Error: creating EC2 Instance: InsufficientInstanceCapacity: no g6.xlarge"
NO_HOST_OF_GROUP = """│ Error: waiting for Auto Scaling Group (apexrl-smoke-learner): We currently do not have
│ sufficient g6.xlarge capacity in the Availability Zone you requested"""
SUMMARY = "2026-11-22T10:00:00.000000+00:00 apexrl-replay: {} transitions (1%); oldest 3 s; in 64/s, out 0/s"


def install(directory: Path, names: tuple[str, ...] = PROGRAMS) -> dict[str, str]:
    """Makes the programs; returns the environment in which they are found, and no others of their names."""
    directory.mkdir()
    for name in names:
        path = directory / name
        lines = ["#!/bin/sh", f'exec {sys.executable} -m tests.deploy.fake_tools {name} "$@"', ""]
        if name == "terraform":  # the real one reads the variables
            lines.insert(1, f"""case "$*" in *-state=state*) exec {find_terraform()} "$@";; esac""")
        path.write_text("\n".join(lines))
        path.chmod(0o755)
    return {
        "PATH": f"{directory}:/usr/bin:/bin",
        "PYTHONPATH": str(ROOT),
        "FAKE_CALLS": str(directory / "calls"),
        "FAKE_FAILS": str(directory / "fails"),
        "FAKE_FULL": str(directory / "full"),
    }


def calls(environment: dict[str, str]) -> list[str]:
    """Returns the command lines since the last call."""
    path = Path(environment["FAKE_CALLS"])
    found = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return found


def main(name: str, arguments: list[str]) -> int:
    """Does what a program would do; returns its status."""
    line = " ".join([name, *arguments])
    with Path(os.environ["FAKE_CALLS"]).open("a") as file:
        file.write(line + "\n")
    fails = Path(os.environ["FAKE_FAILS"])
    if fails.exists() and re.search(fails.read_text(), line):
        fails.unlink()
        print("it fails", file=sys.stderr)
        return 1
    match name, arguments:
        case "terraform", [directory, *rest]:
            return _terraform(Path(directory.removeprefix("-chdir=")), rest)
        case "aws", ["ec2", "describe-instances"]:
            print("i-1")
        case "aws", ["s3", "cp", "--region", _, file, target]:
            bucket, _, key = target.removeprefix("s3://").partition("/")
            _client("s3").upload_file(file, bucket, key)
        case "aws", ["iam", "create-service-linked-role", _, service]:
            _client("iam").create_service_linked_role(AWSServiceName=service)
    return 0


def _client(service: str):
    import boto3

    return boto3.client(service, region_name=REGION)


def _tag(resource: str, **tags: str) -> None:
    tags |= {"Project": "apexrl"}
    _client("ec2").create_tags(Resources=[resource], Tags=[{"Key": key, "Value": tags[key]} for key in tags])


def _terraform(directory: Path, arguments: list[str]) -> int:
    is_bootstrap = directory.name == "bootstrap"
    state = directory / ("terraform.tfstate" if is_bootstrap else "fake.tfstate")
    if arguments[0] != "init" and not (directory / ".terraform").exists():
        print("Backend initialization required", file=sys.stderr)
        return 1
    match arguments:
        case ["init", *_]:
            (directory / ".terraform").mkdir(exist_ok=True)
        case ["apply", *_] if is_bootstrap:
            _bootstrap()
            state.touch()
        case ["apply", *options]:
            held = re.search(f'"({REGION}.)"', state.read_text() if state.exists() else "")
            asked = _zone(directory)
            is_kept = held and "-replace=terraform_data.zone" not in options
            zone = held[1] if is_kept else asked or f"{REGION}a"
            if asked not in ("", zone):
                print(f"The cluster is in {zone}, and availability_zone asks for {asked}", file=sys.stderr)
                return 1
            if zone in _full():
                state.touch() if is_kept else state.write_text(_state_of(zone))
                print(NO_HOST if zone == f"{REGION}a" else NO_HOST_OF_GROUP, file=sys.stderr)
                return 1
            _cluster(directory)
            state.write_text(_state_of(zone, "experience", outputs=OUTPUTS))
        case ["destroy", *_]:
            _terminate()
            state.unlink()
        case ["state", "pull"] if state.exists():
            print(state.read_text())
        case ["output", "-raw", "cluster_backend"]:
            print(f'bucket = "apexrl-state-{ACCOUNT}-{REGION}"\nregion = "{REGION}"')
        case ["output", "-raw", "cluster_tfvars"]:
            print(f'region         = "{REGION}"\nresults_bucket = "apexrl-results-{ACCOUNT}-{REGION}"')
    return 0


def _state_of(zone: str, *names: str, outputs: Mapping[str, str] = MappingProxyType({})) -> str:
    """Returns Terraform's state of a zone, of further facts, and of outputs."""
    instances = [{"attributes": {"input": {"value": zone, "type": "string"}}}]
    of_all = {"mode": "managed", "type": "terraform_data", "instances": instances}
    made = [of_all | {"name": name} for name in ("zone", *names)]
    return json.dumps({"resources": made, "outputs": {name: {"value": value} for name, value in outputs.items()}})


def _full() -> list[str]:
    """Returns the zones without capacity."""
    full = Path(os.environ["FAKE_FULL"])
    return full.read_text().split() if full.exists() else []


def _zone(directory: Path) -> str:
    """Returns the zone that `up` has chosen, empty without one."""
    chosen = directory / "zone.auto.tfvars"
    return re.search('"(.*)"', chosen.read_text())[1] if chosen.exists() else ""


def _bootstrap() -> None:
    for purpose in ("state", "results"):
        _client("s3").create_bucket(Bucket=f"apexrl-{purpose}-{ACCOUNT}-{REGION}")


def _cluster(directory: Path) -> None:
    """Starts the hosts that terraform.tfvars describes, and lets the replay's log tell of experience."""
    text = (directory / "terraform.tfvars").read_text()
    [name] = re.findall(r'^name += "(.*)"', text, re.MULTILINE)
    [actors] = re.findall(r"^actor_hosts += (\d+)", text, re.MULTILINE)
    _terminate()
    image = _client("ec2").register_image(Name=f"base-{time.monotonic_ns()}")["ImageId"]
    for role in ("replay", "learner", *["actor"] * int(actors)):
        started = _client("ec2").run_instances(ImageId=image, InstanceType="m6i.xlarge", MinCount=1, MaxCount=1)
        _tag(started["Instances"][0]["InstanceId"], Role=role, Cluster=name)
    group, stream = {"logGroupName": f"/apexrl/{name}"}, f"replay/{time.monotonic_ns()}"
    if not _client("logs").describe_log_groups(logGroupNamePrefix=group["logGroupName"])["logGroups"]:
        _client("logs").create_log_group(**group)
    _client("logs").create_log_stream(**group, logStreamName=stream)
    now = int(time.time() * 1000)
    told = [
        {"timestamp": now - 1000, "message": SUMMARY.format("0")},
        {"timestamp": now, "message": SUMMARY.format("1,234")},
    ]
    _client("ssm").put_parameter(
        Name=f"/apexrl/{name}/deadline", Value=OUTPUTS["deadline"], Type="String", Overwrite=True
    )
    _client("logs").put_log_events(**group, logStreamName=stream, logEvents=told)


def _terminate() -> None:
    ours = [{"Name": "tag:Project", "Values": ["apexrl"]}]
    found = _client("ec2").describe_instances(Filters=ours)["Reservations"]
    hosts = [host["InstanceId"] for reservation in found for host in reservation["Instances"]]
    if hosts:
        _client("ec2").terminate_instances(InstanceIds=hosts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
