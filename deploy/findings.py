"""A finding about the account, and the questions to AWS whose answers several steps need."""

import functools
from typing import Any, NamedTuple

from deploy.aws import client, listed, tags_of
from deploy.cluster import NEWEST, Cluster


class Line(NamedTuple):
    """The finding of one check. With a cure it is a failure."""

    name: str
    finding: str
    cure: str = ""


@functools.cache
def account_of(region: str) -> dict[str, Any]:
    """Returns whose credentials these are: the number of the account, and the name of the user or role."""
    return dict(client("sts", region).get_caller_identity())


@functools.cache
def subnets_of(cluster: Cluster) -> dict[str, dict[str, Any]]:
    """Returns EC2's descriptions of the cluster's subnets that exist, by their ids in the plan's order."""
    filters = [{"Name": "subnet-id", "Values": list(cluster.subnet_ids)}]
    answer = client("ec2", cluster.region).describe_subnets(Filters=filters) if cluster.subnet_ids else {"Subnets": []}
    found = {subnet["SubnetId"]: subnet for subnet in answer["Subnets"]}
    return {name: found[name] for name in cluster.subnet_ids if name in found}


@functools.cache
def zones_for(cluster: Cluster) -> list[str]:
    """Returns the zones in which a cluster can be: they offer all types, and have one of its subnets, if it has any."""
    standard = {"opt-in-status": "opt-in-not-required", "state": "available"}
    filters = [{"Name": name, "Values": [value]} for name, value in standard.items()]
    answer = client("ec2", cluster.region).describe_availability_zones(Filters=filters)
    zones = {zone["ZoneName"] for zone in answer["AvailabilityZones"]}
    if cluster.subnet_ids:
        zones &= {subnet["AvailabilityZone"] for subnet in subnets_of(cluster).values()}
    offered: dict[str, set[str]] = {name: set() for name in cluster.instance_types}
    filters = [{"Name": "instance-type", "Values": list(offered)}]
    where = {"LocationType": "availability-zone", "Filters": filters}
    for offer in listed(cluster.region, "ec2", "describe_instance_type_offerings", "InstanceTypeOfferings[]", **where):
        offered[offer["InstanceType"]].add(offer["Location"])
    return sorted(zones.intersection(*offered.values()))


def has_images(cluster: Cluster) -> bool:
    """Returns whether the newest images that the cluster may use are there for both kinds of hosts, of one version."""
    filters = [{"Name": "tag:Project", "Values": ["apexrl"]}, {"Name": "state", "Values": ["available"]}]
    found = client("ec2", cluster.region).describe_images(Owners=["self"], Filters=filters)["Images"]
    newest: dict[str, str] = {}
    for image in sorted(found, key=lambda image: image["CreationDate"]):
        tags = tags_of(image)
        if cluster.image_version in ("", NEWEST, tags.get("Version")):
            newest[tags.get("Role", "")] = tags.get("Version", "unknown")
    return "cpu" in newest and newest["cpu"] == newest.get("gpu")
