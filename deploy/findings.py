"""A finding about the account, and the questions to AWS whose answers several checks need."""

import functools
from typing import Any, NamedTuple

from deploy.aws import AwsError, client, code_of, listed, tags_of
from deploy.cluster import NEWEST, Cluster

IMAGE_ROLES = {"cpu": "replay and actors", "gpu": "learner"}
NO_BUCKET = "does not exist"


class Line(NamedTuple):
    """The finding of one check. With a cure it is a failure."""

    name: str
    finding: str
    cure: str = ""


@functools.cache
def account_of(region: str) -> dict[str, Any]:
    """Returns whose credentials these are: the number of the account, and the name of the user or role."""
    return dict(client("sts", region).get_caller_identity())


def fault_of_bucket(bucket: str, region: str) -> str:
    """Returns why a bucket is none of this account, empty if it is one: all accounts share the names."""
    try:
        client("s3", region).head_bucket(Bucket=bucket, ExpectedBucketOwner=account_of(region)["Account"])
    except AwsError as error:
        faults = {"404": NO_BUCKET, "403": "belongs to somebody else, or access to it is denied"}
        if code_of(error) not in faults:
            raise
        return faults[code_of(error)]
    return ""


@functools.cache
def zones_of_types(cluster: Cluster) -> dict[str, set[str]]:
    """Returns the zones that offer each of the cluster's instance types, of those that the account may use."""
    standard = {"opt-in-status": "opt-in-not-required", "state": "available"}
    filters = [{"Name": name, "Values": [value]} for name, value in standard.items()]
    answer = client("ec2", cluster.region).describe_availability_zones(Filters=filters)
    known = {zone["ZoneName"] for zone in answer["AvailabilityZones"]}
    zones: dict[str, set[str]] = {name: set() for name in cluster.instance_types}
    filters = [{"Name": "instance-type", "Values": list(zones)}]
    where = {"LocationType": "availability-zone", "Filters": filters}
    for offer in listed(cluster.region, "ec2", "describe_instance_type_offerings", "InstanceTypeOfferings[]", **where):
        zones[offer["InstanceType"]] |= {offer["Location"]} & known
    return zones


@functools.cache
def subnets_of(cluster: Cluster) -> dict[str, dict[str, Any]]:
    """Returns EC2's descriptions of the cluster's subnets that exist, by their ids in the plan's order."""
    filters = [{"Name": "subnet-id", "Values": list(cluster.subnet_ids)}]
    answer = client("ec2", cluster.region).describe_subnets(Filters=filters) if cluster.subnet_ids else {"Subnets": []}
    found = {subnet["SubnetId"]: subnet for subnet in answer["Subnets"]}
    return {name: found[name] for name in cluster.subnet_ids if name in found}


def zones_for(cluster: Cluster) -> list[str]:
    """Returns the zones in which a cluster can be: they offer all types, and have one of its subnets, if it has any."""
    zones = set.intersection(*zones_of_types(cluster).values())
    own = {subnet["AvailabilityZone"] for subnet in subnets_of(cluster).values()}
    return sorted(zones & own if cluster.subnet_ids else zones)


def images_of(cluster: Cluster) -> dict[str, tuple[str, str]]:
    """Returns the version and the id of the newest image that the cluster may use, by its role, where there is one."""
    filters = [{"Name": "tag:Project", "Values": ["apexrl"]}, {"Name": "state", "Values": ["available"]}]
    found = client("ec2", cluster.region).describe_images(Owners=["self"], Filters=filters)["Images"]
    newest: dict[str, tuple[str, str]] = {}
    for image in sorted(found, key=lambda image: image["CreationDate"]):
        tags = tags_of(image)
        if cluster.image_version in ("", NEWEST, tags.get("Version")):
            newest[tags.get("Role", "")] = tags.get("Version", "unknown"), image["ImageId"]
    return {role: newest[role] for role in IMAGE_ROLES if role in newest}
