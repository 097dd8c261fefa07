"""The commands beside `up`: preflight, cost, keys of a plan; status, watch, logs, scale, down of one that is up."""

import argparse
import shlex
import sys
import time
from pathlib import Path

from deploy import frames, place
from deploy.aws import client
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
    print(f"cluster   {cluster.name} in {cluster.region}; runs until {frames.deadline(cluster)}")
    for role, kind, state, zone, name in frames.hosts(cluster):
        print(f"{role:9} {kind}  {state}  {zone}  {name}")
    print(f"running   {frames.standing(cluster)}")
    print(f"replay    {frames.newest_summary(cluster)[1] or 'no summary in the last minutes'}")
    print(f"results   {found['results']}")


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
    """Asks AWS whether `terraform apply` can work; returns 1 when something has to be cured first."""
    found = failures(_cluster(chosen), chosen.address, chosen.only_account, chosen.request_quotas)
    return 1 if found else 0


def cost(chosen: argparse.Namespace) -> None:
    """Prints the price of a plan.

    Raises: DeployError when it cannot be told.
    """
    print("\n".join(report(_cluster(chosen), chosen.frames_per_second, chosen.updates_per_second)))


def keys(chosen: argparse.Namespace) -> None:
    """Makes the keys of a cluster, and prints the names of those that were made.

    Raises: DeployError when they are there already, or cannot be stored.
    """
    print("\n".join(store_keys(client("ssm", chosen.region), chosen.cluster, chosen.rotate)))
