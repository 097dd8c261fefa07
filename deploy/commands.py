"""The commands beside `up`: preflight, cost, keys of a plan; status, watch, logs, scale, down of one that is up."""

import argparse
import datetime
import re
import shlex
import sys
import time
from pathlib import Path

from deploy import place
from deploy.aws import AwsError, client, code_of, listed, tags_of
from deploy.cluster import Cluster, read_cluster
from deploy.cost import report
from deploy.keys import store_keys
from deploy.place import CLUSTER, terraform
from deploy.preflight import failures
from deploy.steps import DeployError, StepError, require, run, run_until_interrupted

APPLY_SECONDS = 3600.0
TUNNEL_SECONDS = 300.0
SHORT_SECONDS = 30.0
RETRY_SECONDS = 10.0
LOOK_BACK_SECONDS = 180.0  # the replay server writes a summary every minute
POLL_SECONDS = 10.0
SUMMARY = re.compile(r"([\d,]+) transitions \(\d+%\);.*")
STATES = ("pending", "running", "stopping", "stopped", "shutting-down")


def _outputs(*names: str) -> dict[str, str]:
    """Returns the outputs of the cluster that is up.

    Raises: DeployError when none is, or its start did not come to the outputs of these names.
    """
    require("terraform")
    place.described()
    found = place.outputs()
    if not found:
        raise DeployError("no cluster is up from here: `python -m deploy up` starts the one that is described")
    if not set(names) <= found.keys():
        raise DeployError("`up` has not come to its end: the same `up` goes on")
    return found


def status(_: argparse.Namespace) -> None:
    """Prints the hosts, the deadline, the replay's summary and the results."""
    cluster, found = place.described(), _outputs("results")
    print(f"cluster   {cluster.name} in {cluster.region}; runs until {deadline(cluster)}")
    for role, kind, state, zone, name in hosts(cluster):
        print(f"{role:9} {kind}  {state}  {zone}  {name}")
    print(f"running   {standing(cluster)}")
    print(f"replay    {newest_summary(cluster)[1] or 'no summary in the last minutes'}")
    print(f"results   {found['results']}")


def newest_summary(cluster: Cluster) -> tuple[int, str]:
    """Returns the transitions that the replay holds, and its newest summary; 0 and an empty text without any."""
    since = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=LOOK_BACK_SECONDS)
    group = {"logGroupName": f"/apexrl/{cluster.name}", "logStreamNamePrefix": "replay/"}
    asked = group | {"startTime": int(since.timestamp() * 1000)}
    newest = (0, "")
    try:
        for message in listed(cluster.region, "logs", "filter_log_events", "events[].message", **asked):
            if found := SUMMARY.search(message):
                newest = (int(found[1].replace(",", "")), found[0])
    except AwsError as error:
        if code_of(error) != "ResourceNotFoundException":
            raise
    return newest


def deadline(cluster: Cluster) -> str:
    """Returns when the hosts end, as they read it themselves: a learner that has finished its run sets it to now.

    Raises: DeployError when there is none yet.
    """
    try:
        found = client("ssm", cluster.region).get_parameter(Name=f"/apexrl/{cluster.name}/deadline")
    except AwsError as error:
        if code_of(error) != "ParameterNotFound":
            raise
        raise DeployError("`up` has not come to its end: the same `up` goes on") from error
    return str(found["Parameter"]["Value"])


def hosts(cluster: Cluster) -> list[tuple[str, str, str, str, str]]:
    """Returns the name, type, state, zone and id of each host of the cluster: replay, learner, learner-1 ..., actor."""
    filters = [
        {"Name": "tag:Project", "Values": ["apexrl"]},
        {"Name": "tag:Cluster", "Values": [cluster.name]},
        {"Name": "instance-state-name", "Values": list(STATES)},
    ]
    found = []
    for host in listed(cluster.region, "ec2", "describe_instances", "Reservations[].Instances[]", Filters=filters):
        tags = tags_of(host)
        name = tags.get("Name", "").removeprefix(f"{cluster.name}-") or tags.get("Role", "?")
        zone = host["Placement"]["AvailabilityZone"]
        found.append((name, host["InstanceType"], host["State"]["Name"], zone, host["InstanceId"]))
    return sorted(sorted(found), key=lambda host: host[0][0], reverse=True)


def standing(cluster: Cluster) -> str:
    """Returns how many hosts run, in one line."""
    found = hosts(cluster)
    roles = {"replay": 1, "learner": cluster.learner_hosts, "actor": cluster.actor_hosts}
    count = {role: sum(each[0].startswith(role) and each[2] == "running" for each in found) for role in roles}
    return ", ".join(f"{role} {count[role]} of {wanted}" for role, wanted in roles.items())


def wait_for_frames(cluster: Cluster, minutes: int) -> None:
    """Waits until the replay holds experience.

    Raises: StepError when it holds none after `minutes`.
    """
    started = time.monotonic()
    told = ""
    while True:
        transitions, summary = newest_summary(cluster)
        if transitions:
            print(f"frames arrive: {summary}", flush=True)
            return
        passed = time.monotonic() - started
        if passed >= minutes * 60:
            break
        text = f"waiting for the first frames: hosts that run: {standing(cluster)}"
        if text != told:
            told = text
            print(f"{text} (at most {minutes} minutes)", flush=True)
        time.sleep(POLL_SECONDS)
    raise StepError(
        f"no frames within {minutes} minutes, and the hosts cost on: `python -m deploy logs` tells why; where that "
        f"is empty, `aws ec2 get-console-output --latest --output text --region {cluster.region} --instance-id ID` "
        "shows how a host installs (`python -m deploy status` tells the ids); `python -m deploy down` ends them"
    )


def watch(_: argparse.Namespace) -> None:
    """Opens the tunnel to TensorBoard, and keeps it open until Ctrl-C.

    Raises: StepError when it cannot be opened.
    """
    require("aws", "session-manager-plugin")
    command = ("bash", "-c", _outputs("tensorboard_command")["tensorboard_command"])  # it asks for the host's id
    print("\nTensorBoard: http://127.0.0.1:6006 (Ctrl-C closes the tunnel, and not the cluster)")
    deadline = time.monotonic() + TUNNEL_SECONDS
    while time.monotonic() < deadline:
        started = time.monotonic()
        if run_until_interrupted(*command) == 0:
            return
        if time.monotonic() - started > SHORT_SECONDS:  # it was open
            deadline = time.monotonic() + TUNNEL_SECONDS
        time.sleep(RETRY_SECONDS)
    raise StepError(f"no tunnel within {TUNNEL_SECONDS:.0f} s: see above")


def logs(chosen: argparse.Namespace) -> None:
    """Follows the logs until Ctrl-C.

    Raises: StepError when they cannot be read.
    """
    require("aws")
    stream = ("--log-stream-name-prefix", f"{chosen.role}/") if chosen.role else ()
    command = [*shlex.split(_outputs("logs_command")["logs_command"]), "--since", chosen.since, *stream]
    if run_until_interrupted(*command):
        raise StepError("the logs cannot be read: see above")


def scale(chosen: argparse.Namespace) -> None:
    """Changes actor_hosts, and applies.

    Raises: DeployError when the number is out of range; StepError when `terraform apply` fails.
    """
    _can_answer(chosen.yes)
    _outputs()
    place.set_actor_hosts(chosen.hosts)
    print(f"{CLUSTER}/terraform.tfvars: actor_hosts = {chosen.hosts}")
    run(*terraform(CLUSTER, "apply", *_approval(chosen.yes)), seconds=APPLY_SECONDS)


def down(chosen: argparse.Namespace) -> None:
    """Destroys the cluster and the volume with its experience. The bucket, the keys and the images stay.

    Raises: StepError when `terraform destroy` fails.
    """
    _can_answer(chosen.yes)
    require("terraform")
    cluster = place.described()
    if not place.exists():
        print(f"{cluster.name}: nothing is up")
        return
    print("\nThe experience goes, too: its volume is the cluster's. Results, keys and images stay.")
    run(*terraform(CLUSTER, "destroy", *_approval(chosen.yes)), seconds=APPLY_SECONDS)
    place.ZONE.unlink(missing_ok=True)
    print(f"{cluster.name}: no host and no volume costs any more. `up` goes on with the same run and an empty replay;")
    print('"To leave nothing behind" in deploy/README.md removes results, keys and images.')


def _can_answer(yes: bool) -> None:
    if not yes and not sys.stdin.isatty():
        raise DeployError("nobody can answer here what Terraform asks: give --yes")


def _approval(yes: bool) -> tuple[str, ...]:
    return ("-input=false", "-auto-approve") if yes else ()


def _cluster(chosen: argparse.Namespace) -> Cluster:
    """Returns the plan's variables, else those of the cluster that is described, with those of the command line.

    Raises: DeployError when there is no such plan, or Terraform refuses a variable.
    """
    files = [word for file in chosen.var_file for word in ("-var-file", str(Path(file).resolve()))]
    variables = [word for variable in chosen.var for word in ("-var", variable)]
    return read_cluster(place.find_plan(chosen.plan) if chosen.plan else None, [*files, *variables])


def preflight(chosen: argparse.Namespace) -> int:
    """Asks AWS whether the account can run a plan; returns 1 when something has to be cured first."""
    return 1 if failures(_cluster(chosen), chosen.request_quotas) else 0


def cost(chosen: argparse.Namespace) -> None:
    """Prints the price of a plan.

    Raises: DeployError when it cannot be told.
    """
    print("\n".join(report(_cluster(chosen), chosen.frames_per_second, chosen.updates_per_second)))


def keys(chosen: argparse.Namespace) -> None:
    """Makes the keys of a cluster, and prints the names of those that were made.

    Raises: DeployError when they are there already, or cannot be stored.
    """
    print("\n".join(store_keys(chosen.region, chosen.cluster, chosen.rotate)))
