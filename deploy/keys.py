"""The CURVE keys of a cluster: a pair for each role, /apexrl/NAME/keys/ROLE.public and ROLE.secret, encrypted in SSM.

The values go to AWS only: to no file and no output. terraform/cluster/iam.tf says which role may read which.
"""

import re
from typing import Any

import zmq

from deploy.aws import AwsError, client, code_of, explain, listed
from deploy.steps import DeployError

ROLES = ("replay", "learner", "actor")
CLUSTER_NAME = re.compile(r"[a-z][a-z0-9-]{1,18}[a-z0-9]")


def key_names(cluster: str) -> list[str]:
    """Returns the names of the parameters that a cluster needs: for each role the public key, then the secret one."""
    return [f"/apexrl/{cluster}/keys/{role}.{half}" for role in ROLES for half in ("public", "secret")]


def stored_keys(region: str, cluster: str) -> dict[str, str]:
    """Returns the types of the stored parameters by name, without reading their values."""
    below = [{"Key": "Path", "Option": "Recursive", "Values": [f"/apexrl/{cluster}/keys"]}]
    found = listed(region, "ssm", "describe_parameters", "Parameters[]", ParameterFilters=below)
    return {parameter["Name"]: parameter["Type"] for parameter in found}


def store_keys(region: str, cluster: str, rotate: bool = False) -> list[str]:
    """Makes the keys of a cluster that are missing, and stores them; returns their names.

    A public key is made from its secret one, so that it fits those of the hosts. A pair without its secret key is new.

    Args:
      rotate: make all of them, also those that are there.
    Raises: DeployError when the name is wrong, none is missing, or only some could be stored.
    """
    if not CLUSTER_NAME.fullmatch(cluster):
        raise DeployError(f"--cluster {cluster}: 3 to 20 small letters, digits and dashes, first a letter")
    if not region:
        raise DeployError("--region is empty: give the cluster's, such as us-east-1")
    ssm, stored = client("ssm", region), {} if rotate else stored_keys(region, cluster)
    names = key_names(cluster)
    if stored.keys() >= set(names):
        raise DeployError(
            f"all {len(names)} keys of {cluster} exist already: use them, or make new ones with --rotate and restart "
            "all hosts: old and new keys do not know each other"
        )
    made: list[str] = []
    try:
        for public, secret in zip(names[::2], names[1::2], strict=True):
            new_public, new_secret = (key.decode() for key in zmq.curve_keypair())
            pair = {secret: new_secret, public: new_public}  # who sees the first half alone makes the same second one
            if secret in stored:
                kept = ssm.get_parameter(Name=secret, WithDecryption=True)["Parameter"]["Value"].encode()
                pair = {} if public in stored else {public: zmq.curve_public(kept).decode()}
            for name, value in pair.items():
                _store(ssm, cluster, name, value, overwrite=rotate or name in stored)
                made.append(name)
    except AwsError as error:
        if code_of(error) == "ParameterAlreadyExists":
            raise DeployError("somebody else is making this cluster's keys: look again in a minute") from error
        if not made:
            raise
        what, cure = explain(error)
        again = "again, with --rotate" if rotate else "the same command again"
        raise DeployError(f"{what} after {len(made)} of {len(names)} keys: {cure}; then {again}") from error
    return [name for name in names if name in made]


def _store(ssm: Any, cluster: str, name: str, value: str, overwrite: bool) -> None:
    ssm.put_parameter(Name=name, Value=value, Type="SecureString", Overwrite=overwrite)
    # The tags need a request of their own, because AWS refuses them together with Overwrite.
    tags = [{"Key": "Project", "Value": "apexrl"}, {"Key": "Cluster", "Value": cluster}]
    ssm.add_tags_to_resource(ResourceType="Parameter", ResourceId=name, Tags=tags)
