"""The commands for a cluster that is planned: preflight, cost, keys."""

import argparse
from pathlib import Path

from deploy import place
from deploy.aws import client
from deploy.cluster import Cluster, read_cluster
from deploy.cost import report
from deploy.keys import store_keys
from deploy.preflight import failures


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
