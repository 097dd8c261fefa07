"""A finding about the account, and the questions to AWS whose answers several checks need."""

import functools
from typing import Any, NamedTuple

from deploy.aws import client
from deploy.cluster import NEWEST, Cluster

IMAGE_ROLES = {"cpu": "replay and actors", "gpu": "learner"}


class Line(NamedTuple):
    """The finding of one check. With a cure it is a failure."""

    name: str
    finding: str
    cure: str = ""


@functools.cache
def describe_types(cluster: Cluster) -> dict[str, dict[str, Any]]:
    """Returns EC2's descriptions of the cluster's instance types by name, without those that EC2 does not know."""
    filters = [{"Name": "instance-type", "Values": list(cluster.instance_types)}]
    answer = client("ec2", cluster.region).describe_instance_types(Filters=filters)
    return {entry["InstanceType"]: entry for entry in answer["InstanceTypes"]}


@functools.cache
def zones_of_types(cluster: Cluster) -> dict[str, set[str]]:
    """Returns the zones that offer each of the cluster's instance types, of those that the account may use."""
    ec2 = client("ec2", cluster.region)
    standard = [
        {"Name": "opt-in-status", "Values": ["opt-in-not-required"]},
        {"Name": "state", "Values": ["available"]},
    ]
    known = {zone["ZoneName"] for zone in ec2.describe_availability_zones(Filters=standard)["AvailabilityZones"]}
    zones: dict[str, set[str]] = {name: set() for name in cluster.instance_types}
    for page in ec2.get_paginator("describe_instance_type_offerings").paginate(
        LocationType="availability-zone", Filters=[{"Name": "instance-type", "Values": list(zones)}]
    ):
        for offer in page["InstanceTypeOfferings"]:
            if offer["Location"] in known:
                zones[offer["InstanceType"]].add(offer["Location"])
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


def images_of(cluster: Cluster) -> dict[str, list[tuple[str, str, str]]]:
    """Returns the images by role: the creation date, the version and the id of each that the cluster may use."""
    images = client("ec2", cluster.region).describe_images(
        Owners=["self"], Filters=[{"Name": "tag:Project", "Values": ["apexrl"]}]
    )["Images"]
    found: dict[str, list[tuple[str, str, str]]] = {role: [] for role in IMAGE_ROLES}
    for image in images:
        tags = {tag["Key"]: tag["Value"] for tag in image.get("Tags", [])}
        right_version = cluster.image_version in ("", NEWEST, tags.get("Version"))
        if tags.get("Role") in found and right_version and image["State"] == "available":
            found[tags["Role"]].append((image["CreationDate"], tags.get("Version", "unknown"), image["ImageId"]))
    return found


def has_to_build(cluster: Cluster) -> bool:
    """Returns whether Packer has to build images first: hosts that install a release need none."""
    return not cluster.release and not all(images_of(cluster).values())
