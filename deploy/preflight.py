"""The questions to AWS whether an account can run a cluster, before anything is made in it.

Every line says PASS or FAIL; a FAIL comes with its cure. Nothing is changed, but that higher quotas are asked for where
somebody says so. Terraform itself checks, before it makes anything, whether the plan fits together and is there: that
one zone offers all types and they fit their roles, that images are of one version, that bucket and subnets exist.
"""

import ipaddress
from collections.abc import Iterator

from deploy.aws import AwsError, client, code_of, explain, listed, partition_of, tags_of
from deploy.cluster import Cluster
from deploy.findings import Line, account_of, subnets_of, zones_for
from deploy.quotas import VPCS, allowed_quota, check_quotas

PLAN_REGION = "us-east-1"
"""Where AWS answers about the account's plan, whatever the cluster's region."""


def check_credentials(cluster: Cluster) -> Iterator[Line]:
    """Reports the account and the user of the credentials."""
    caller = account_of(cluster.region)
    yield Line("credentials", f"account {caller['Account']} as {caller['Arn'].rsplit(':', 1)[-1]}")


def check_plan(cluster: Cluster) -> Iterator[Line]:
    """Checks whether the account may start more than the smallest instances: those of AWS's free plan may not."""
    partition = partition_of(cluster.region)
    if partition != "aws":
        yield Line("plan", f"{partition} has no free plan")
        return
    try:
        plan = client("freetier", PLAN_REGION).get_account_plan_state()["accountPlanType"]
    except AwsError as error:
        if code_of(error) != "ResourceNotFoundException":  # an organization may forbid the region, or the question
            yield Line("plan", f"not asked: {explain(error)[0]}")
            return
        plan = "PAID"  # accounts from before July 2025, and those of an organization, have no plan
    if plan == "FREE":
        cure = "aws freetier upgrade-account-plan --account-plan-type PAID --region us-east-1 (the credits stay)"
        yield Line("plan", "the account is on AWS's free plan, which starts none of these instance types", cure)
    else:
        yield Line("plan", "not AWS's free plan")


def check_network(cluster: Cluster) -> Iterator[Line]:
    """Checks whether there is room for one more VPC, or whether a subnet that exists has the fixed addresses free."""
    if cluster.subnet_ids:
        yield from _fixed_addresses(cluster)
    elif not cluster.vpc_id:
        vpcs = client("ec2", cluster.region).describe_vpcs()["Vpcs"]
        is_there = any(tags_of(vpc).get("Cluster") == cluster.name for vpc in vpcs)
        allowed = allowed_quota(cluster, "vpc", VPCS)
        finding = f"{len(vpcs)} in use, {allowed:g} allowed" + (", this cluster's among them" if is_there else "")
        cure = "" if is_there or len(vpcs) < allowed else "delete one that nobody uses, or ask for a higher quota"
        yield Line("VPCs", finding, cure)


def _fixed_addresses(cluster: Cluster) -> Iterator[Line]:
    """Checks whether the addresses of replay and learners are free in the first subnet of the zone."""
    zone = cluster.availability_zone or next(iter(zones_for(cluster)), "")
    here = [subnet for subnet in subnets_of(cluster).values() if subnet["AvailabilityZone"] == zone]
    if not here:  # Terraform's plan says which zones there are
        return
    name, network = here[0]["SubnetId"], ipaddress.ip_network(here[0]["CidrBlock"])
    wanted = [str(network[-10 - place]) for place in range(1 + cluster.learner_hosts)]  # as network.tf takes them
    asked = {"Filters": [{"Name": "subnet-id", "Values": [name]}]}
    tagged = {"Filters": [{"Name": "tag:Cluster", "Values": [cluster.name]}]}  # Terraform tags hosts, not what AWS adds
    own = set(listed(cluster.region, "ec2", "describe_instances", "Reservations[].Instances[].InstanceId", **tagged))
    used = {
        address["PrivateIpAddress"]
        for interface in listed(cluster.region, "ec2", "describe_network_interfaces", "NetworkInterfaces[]", **asked)
        if interface.get("Attachment", {}).get("InstanceId") not in own
        for address in interface["PrivateIpAddresses"]
    }
    taken = [address for address in wanted if address in used]
    told = f", where {', '.join(taken)} is in use and the cluster's" if taken else ""
    yield Line("subnets", f"{name} in {zone}{told}", "free it, or put another subnet first" if taken else "")


def check_roles(cluster: Cluster) -> Iterator[Line]:
    """Checks whether AWS has its roles for groups, alarms that reboot, and spot instances."""
    wanted = {"autoscaling": "groups of instances", "events": "alarms that reboot a host"}
    wanted |= {"spot": "spot instances"} if cluster.spot_hosts else {}
    for service, purpose in wanted.items():
        path = f"/aws-service-role/{service}.amazonaws.com/"
        if client("iam", cluster.region).list_roles(PathPrefix=path)["Roles"]:
            yield Line("role", f"AWS has its role for {purpose}")
        else:
            cure = f"aws iam create-service-linked-role --aws-service-name {service}.amazonaws.com"
            yield Line("role", f"the account lacks AWS's role for {purpose}", cure)


def failures(cluster: Cluster, request_quotas: bool = False) -> list[Line]:
    """Prints a line for each finding; returns those with a cure.

    Args:
      request_quotas: ask AWS for each quota that is too low.
    """
    found = _failures_in("credentials", check_credentials(cluster))
    if found:
        print("      the rest can only be asked when that passes")
        return found
    for name, lines in {
        "plan": check_plan(cluster),
        "network": check_network(cluster),
        "roles": check_roles(cluster),
        "quotas": check_quotas(cluster, request_quotas),
    }.items():
        found += _failures_in(name, lines)
    print("not ready: see the lines with FAIL" if found else "the account is ready")
    return found


def _failures_in(name: str, lines: Iterator[Line]) -> list[Line]:
    """Prints the findings of a check, or an error of AWS as a finding; returns the failures."""
    try:
        found = list(lines)
    except AwsError as error:
        found = [Line(name, *explain(error))]
    for line in found:
        print(f"{'FAIL' if line.cure else 'PASS'}  {line.name}: {line.finding}", flush=True)
        if line.cure:
            print(f"      cure: {line.cure}", flush=True)
    return [line for line in found if line.cure]
