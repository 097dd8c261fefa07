"""The questions to AWS whether `terraform apply` can work in an account, before it costs anything.

Every line says PASS or FAIL; a FAIL comes with its cure. Nothing is changed and no key is read, but that higher quotas
are asked for where somebody says so. Terraform itself checks, before it makes anything, whether the plan fits together:
that instance types fit their roles, that images are of one version, that the bucket is in the region.
"""

import ipaddress
import urllib.request
from collections.abc import Iterator

from deploy.aws import AwsError, client, code_of, explain, listed, partition_of, tags_of
from deploy.cluster import NEWEST, Cluster
from deploy.findings import (
    IMAGE_ROLES,
    Line,
    account_of,
    fault_of_bucket,
    images_of,
    subnets_of,
    zones_for,
    zones_of_types,
)
from deploy.keys import key_names, stored_keys
from deploy.quotas import VPCS, allowed_quota, check_quotas

PLAN_REGION = "us-east-1"
"""Where AWS answers about the account's plan, whatever the cluster's region."""
ADDRESS_SERVICE = "https://checkip.amazonaws.com"


def check_credentials(cluster: Cluster) -> Iterator[Line]:
    """Reports the account and the user of the credentials."""
    caller = account_of(cluster.region)
    yield Line("credentials", f"account {caller['Account']} as {caller['Arn'].rsplit(':', 1)[-1]}")


def check_region(cluster: Cluster) -> Iterator[Line]:
    """Checks whether the account may use the region. A misspelled region does not answer at all."""
    answer = client("ec2", cluster.region).describe_regions(RegionNames=[cluster.region], AllRegions=True)
    if any(region["OptInStatus"] == "not-opted-in" for region in answer["Regions"]):
        yield Line("region", f"{cluster.region} is not enabled", "enable it in the console: Account, AWS Regions")
    else:
        yield Line("region", cluster.region)


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


def check_zone(cluster: Cluster) -> Iterator[Line]:
    """Checks whether one zone offers all types."""
    chosen, everywhere = cluster.availability_zone, zones_for(cluster)
    if everywhere and chosen in ("", *everywhere):
        yield Line("zone", f"{chosen or everywhere[0]} (all types are in {', '.join(everywhere)})")
        return
    zones = zones_of_types(cluster)
    offers = "; ".join(f"{name}: {', '.join(sorted(found)) or 'none'}" for name, found in zones.items())
    cure = f"availability_zone: one of {', '.join(everywhere)}" if everywhere else "replace the rarest type"
    yield Line("zone", f"{chosen or 'none'} does not offer all types ({offers})", cure)


def check_network(cluster: Cluster) -> Iterator[Line]:
    """Checks whether there is room for one more VPC, or whether the network that was given is there and free."""
    if cluster.subnet_ids:
        yield _subnets(cluster)
        return
    vpcs = client("ec2", cluster.region).describe_vpcs()["Vpcs"]
    if cluster.vpc_id:
        is_known = cluster.vpc_id in {vpc["VpcId"] for vpc in vpcs}
        cure = "" if is_known else "vpc_id: a VPC of this account and region"
        yield Line("VPCs", f"{cluster.vpc_id} is {'' if is_known else 'not '}there", cure)
        return
    is_there = any(tags_of(vpc).get("Cluster") == cluster.name for vpc in vpcs)
    allowed = allowed_quota(cluster, "vpc", VPCS)
    finding = f"{len(vpcs)} in use, {allowed:g} allowed" + (", this cluster's among them" if is_there else "")
    cure = "" if is_there or len(vpcs) < allowed else "delete one that nobody uses, or ask for a higher quota"
    yield Line("VPCs", finding, cure)


def _subnets(cluster: Cluster) -> Line:
    """Returns whether the subnets exist, and whether the addresses of replay and learners are free there."""
    found = subnets_of(cluster)
    if missing := [name for name in cluster.subnet_ids if name not in found]:
        return Line("subnets", f"{', '.join(missing)} not there", "subnet_ids: subnets of this account and region")
    zone = cluster.availability_zone or next(iter(zones_for(cluster)), "")
    here = [subnet for subnet in found.values() if subnet["AvailabilityZone"] == zone]
    if not here:
        return Line("subnets", f"none in zone {zone or 'that offers all types'}", "a subnet of another zone")
    name, network = here[0]["SubnetId"], ipaddress.ip_network(here[0]["CidrBlock"])
    wanted = [str(network[-10 - place]) for place in range(1 + cluster.learner_hosts)]  # as network.tf takes them
    filters = [{"Name": "subnet-id", "Values": [name]}]
    used = {
        address["PrivateIpAddress"]
        for interface in listed(
            cluster.region, "ec2", "describe_network_interfaces", "NetworkInterfaces[]", Filters=filters
        )
        if {"Key": "Cluster", "Value": cluster.name} not in interface.get("TagSet", [])
        for address in interface["PrivateIpAddresses"]
    }
    taken = [address for address in wanted if address in used]
    told = f", where {', '.join(taken)} is in use and the cluster's" if taken else ""
    return Line("subnets", f"{name} in {zone}{told}", "free it, or put another subnet first" if taken else "")


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


def check_bucket(cluster: Cluster) -> Iterator[Line]:
    """Checks whether the results bucket exists, and belongs to this account."""
    bucket = cluster.results_bucket
    fault = fault_of_bucket(bucket, cluster.region) if bucket else "variable results_bucket is not given"
    cure = "apply deploy/terraform/bootstrap, and give its output results_bucket in a file of variables"
    yield Line("bucket", f"{bucket} {fault}".strip(), cure if fault else "")


def check_images(cluster: Cluster) -> Iterator[Line]:
    """Checks whether there is an image of each role, or the release that hosts install instead."""
    if cluster.release:
        yield _release(cluster)
        return
    found = images_of(cluster)
    which = f" of version {cluster.image_version}" if cluster.image_version not in ("", NEWEST) else ""
    cure = f"packer build in deploy/packer, in {cluster.region} (deploy/README.md), or another image_version"
    for role, hosts in IMAGE_ROLES.items():
        if role in found:
            yield Line("image", "{1}, version {0}, for {2}".format(*found[role], hosts))
        else:
            yield Line("image", f"none for {hosts} (role {role}){which}", cure)


def _release(cluster: Cluster) -> Line:
    """Returns whether the release that hosts install at their first start is in the results bucket."""
    key = f"releases/{cluster.release}.tar"
    cure = "`python -m deploy up --upgrade` puts the version that is checked out there"
    if not cluster.results_bucket:
        return Line("release", f"there is no results bucket for {key} yet", cure)
    try:
        client("s3", cluster.region).head_object(Bucket=cluster.results_bucket, Key=key)
    except AwsError as error:
        if code_of(error) not in ("403", "404"):
            raise
        return Line("release", f"s3://{cluster.results_bucket}/{key} is not there", cure)
    return Line("release", f"{cluster.release}, which hosts install at their first start")


def check_keys(cluster: Cluster) -> Iterator[Line]:
    """Checks whether the CURVE keys are stored, without reading their values."""
    stored = stored_keys(cluster.region, cluster.name)
    missing = [name for name in key_names(cluster.name) if name not in stored]
    exposed = [name for name in key_names(cluster.name) if stored.get(name, "SecureString") != "SecureString"]
    make = f"python -m deploy keys --cluster {cluster.name} --region {cluster.region}"
    if missing:
        yield Line("keys", f"missing: {', '.join(missing)}", make)
    elif exposed:
        yield Line("keys", f"not encrypted: {', '.join(exposed)}", f"{make} --rotate, and restart all hosts")
    else:
        yield Line("keys", f"{len(stored)} under /apexrl/{cluster.name}/keys")


def check_addresses(cluster: Cluster, address: str) -> Iterator[Line]:
    """Checks whether this machine may open TensorBoard."""
    if not cluster.operator_cidrs:
        yield Line("address", "operator_cidrs is empty: TensorBoard through `aws ssm start-session` only")
        return
    try:
        ours = ipaddress.ip_address(address or _public_address())
    except (OSError, ValueError) as error:
        yield Line("address", f"this machine's public address is unknown ({error})", "give it with --address")
        return
    finding = f"{ours}: operator_cidrs is {', '.join(cluster.operator_cidrs)}"
    covered = any(ours in ipaddress.ip_network(text) for text in cluster.operator_cidrs)
    yield Line("address", finding, "" if covered else f"add {ours}/32 to operator_cidrs, or leave it empty")


def _public_address() -> str:
    with urllib.request.urlopen(ADDRESS_SERVICE, timeout=10) as answer:
        return answer.read(64).decode("ascii", "replace").strip()


def failures(
    cluster: Cluster, address: str = "", only_account: bool = False, request_quotas: bool = False
) -> list[Line]:
    """Prints a line for each finding; returns those with a cure.

    Args:
      address: this machine's public IPv4 address, where checkip.amazonaws.com shall not be asked for it.
      only_account: leave out bucket, images and keys, in an account in which nothing was made yet.
      request_quotas: ask AWS for each quota that is too low.
    """
    first = {"credentials": check_credentials(cluster), "region": check_region(cluster)}
    account = {
        "plan": check_plan(cluster),
        "zone": check_zone(cluster),
        "VPCs": check_network(cluster),
        "roles": check_roles(cluster),
        "quotas": check_quotas(cluster, request_quotas),
    }
    made = {"bucket": check_bucket(cluster), "images": check_images(cluster), "keys": check_keys(cluster)}
    last = {"address": check_addresses(cluster, address)}
    found: list[Line] = []
    for name, lines in (first | account | ({} if only_account else made) | last).items():
        found += _failures_in(name, lines)
        if found and name in first:
            print("      the rest can only be asked when that passes")
            return found
    ready = "the account is ready" if only_account else "ready for terraform apply"
    print("not ready: see the lines with FAIL" if found else ready)
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
