"""The replay host's own account of the training, from its log in CloudWatch."""

import datetime
import re
import time

from deploy.aws import AwsError, client, code_of
from deploy.cluster import Cluster
from deploy.steps import DeployError, StepError

LOOK_BACK_SECONDS = 180.0  # the replay server writes a summary every minute
POLL_SECONDS = 10.0
SUMMARY = re.compile(r"([\d,]+) transitions \(\d+%\);.*")
STATES = ("pending", "running", "stopping", "stopped", "shutting-down")


def newest_summary(cluster: Cluster) -> tuple[int, str]:
    """Returns the transitions that the replay holds, and its newest summary; 0 and an empty text without any."""
    since = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=LOOK_BACK_SECONDS)
    pages = client("logs", cluster.region).get_paginator("filter_log_events")
    group = {"logGroupName": f"/apexrl/{cluster.name}", "logStreamNamePrefix": "replay/"}
    newest = (0, "")
    try:
        for page in pages.paginate(**group, startTime=int(since.timestamp() * 1000)):
            for event in page["events"]:
                if found := SUMMARY.search(event["message"]):
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
    for page in client("ec2", cluster.region).get_paginator("describe_instances").paginate(Filters=filters):
        for instance in (host for reservation in page["Reservations"] for host in reservation["Instances"]):
            tags = {tag["Key"]: tag["Value"] for tag in instance["Tags"]}
            name = tags.get("Name", "").removeprefix(f"{cluster.name}-") or tags.get("Role", "?")
            state, zone = instance["State"]["Name"], instance["Placement"]["AvailabilityZone"]
            found.append((name, instance["InstanceType"], state, zone, instance["InstanceId"]))
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
