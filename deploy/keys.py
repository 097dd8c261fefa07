"""`python deploy/keys.py --cluster NAME --region REGION`: makes a cluster's CURVE keys and stores them in SSM.

Each role gets a pair, /apexrl/NAME/keys/ROLE.public and ROLE.secret, encrypted (SecureString). The script makes the
values and sends them to AWS only: to no file and no output. terraform/cluster/iam.tf says which role may read which.
"""

import re
import sys
from typing import Any

import tyro
import zmq
from aws import AwsError, client, code_of, explain
from tfvars import DeployError

ROLES = ("replay", "learner", "actor")
CLUSTER_NAME = re.compile(r"[a-z][a-z0-9-]{1,18}[a-z0-9]")


def key_names(cluster: str) -> list[str]:
    """Returns the names of the parameters that a cluster needs: for each role the public key, then the secret one."""
    return [f"/apexrl/{cluster}/keys/{role}.{half}" for role in ROLES for half in ("public", "secret")]


def stored_keys(ssm: Any, cluster: str) -> dict[str, str]:
    """Returns the types of the stored parameters by name, without reading their values."""
    pages = ssm.get_paginator("describe_parameters").paginate(
        ParameterFilters=[{"Key": "Path", "Option": "Recursive", "Values": [f"/apexrl/{cluster}/keys"]}]
    )
    return {found["Name"]: found["Type"] for page in pages for found in page["Parameters"]}


def store_keys(ssm: Any, cluster: str, rotate: bool) -> list[str]:
    """Makes all keys of a cluster and stores them; returns their names.

    Raises: DeployError when some exist already and `rotate` is not set, or when only some could be stored.
    """
    existing = sorted(stored_keys(ssm, cluster))
    if existing and not rotate:
        raise DeployError(
            f"{existing[0]} exists already ({len(existing)} of {len(key_names(cluster))} are there): use them, "
            "or make new ones with --rotate and restart all hosts: old and new keys do not know each other"
        )
    names = key_names(cluster)
    tags = [{"Key": "Project", "Value": "apexrl"}, {"Key": "Cluster", "Value": cluster}]
    stored = 0
    try:
        for name, key in zip(names, (key for _ in ROLES for key in zmq.curve_keypair()), strict=True):
            ssm.put_parameter(Name=name, Value=key.decode(), Type="SecureString", Overwrite=rotate)
            stored += 1
            # The tags need a request of their own, because AWS refuses them together with Overwrite.
            ssm.add_tags_to_resource(ResourceType="Parameter", ResourceId=name, Tags=tags)
    except AwsError as error:
        if code_of(error) == "ParameterAlreadyExists":
            raise DeployError("somebody else is making this cluster's keys: look again in a minute") from error
        if stored:
            what, cure = explain(error)
            raise DeployError(
                f"{what} after {stored} of {len(names)} keys: {cure}; then again, with --rotate"
            ) from error
        raise
    return names


def main(cluster: str, region: str, rotate: bool = False) -> int:
    """Makes a cluster's CURVE keys and stores them in SSM as SecureStrings.

    Args:
      cluster: Name of the cluster, the variable `name` of Terraform.
      region: Region of the cluster.
      rotate: Replace existing keys. Running hosts keep the old ones until they are restarted.
    """
    try:
        if not CLUSTER_NAME.fullmatch(cluster):
            raise DeployError(f"--cluster {cluster}: 3 to 20 small letters, digits and dashes, first a letter")
        for name in store_keys(client("ssm", region), cluster, rotate):
            print(name)
    except AwsError as error:
        what, cure = explain(error)
        print(f"cannot store keys: {what}: {cure}", file=sys.stderr)
        return 1
    except DeployError as error:
        print(f"cannot store keys: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
