"""The questions to AWS whether `terraform apply` can work, before it costs anything.

Every line says PASS or FAIL; a FAIL comes with its cure. Nothing is changed and no key is read, but that higher quotas
are asked for where somebody says so.
"""

import ipaddress
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

from deploy.aws import AwsError, client, code_of, explain, partition_of
from deploy.cluster import NEWEST, Cluster
from deploy.findings import (
    IMAGE_ROLES,
    Line,
    describe_types,
    has_to_build,
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
    caller = client("sts", cluster.region).get_caller_identity()
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


def check_bucket(cluster: Cluster) -> Iterator[Line]:
    """Checks whether the results bucket exists, belongs to this account, and is in the region."""
    bucket = cluster.results_bucket
    cure = "apply deploy/terraform/bootstrap, and give its output results_bucket in a file of variables"
    if not bucket:
        yield Line("bucket", "variable results_bucket is not given", cure)
        return
    try:
        owner = client("sts", cluster.region).get_caller_identity()["Account"]
        answer = client("s3", cluster.region).head_bucket(Bucket=bucket, ExpectedBucketOwner=owner)
    except AwsError as error:
        problems = {"404": "does not exist", "403": "belongs to somebody else, or access to it is denied"}
        if code_of(error) not in problems:
            raise
        yield Line("bucket", f"{bucket} {problems[code_of(error)]}", cure)
        return
    region = answer.get("BucketRegion") or cluster.region
    if region != cluster.region:
        yield Line("bucket", f"{bucket} is in {region}, not in {cluster.region}", "a bucket in the cluster's region")
    else:
        yield Line("bucket", bucket)


def check_types(cluster: Cluster) -> Iterator[Line]:
    """Checks whether the instance types fit their roles."""
    names = cluster.instance_types
    found = describe_types(cluster)
    learning = cluster.learner_instance_types
    grouped = (cluster.replay_instance_type, *learning) if cluster.use_placement_group else ()
    good = True
    for name in names:
        entry = found.get(name)
        problem = ""
        if entry is None:
            problem = f"is not offered in {cluster.region}"
        elif "x86_64" not in entry["ProcessorInfo"]["SupportedArchitectures"]:
            problem = "is not x86_64, the images are"
        elif name in grouped and "cluster" not in entry["PlacementGroupInfo"]["SupportedStrategies"]:
            problem = "cannot stand in a cluster placement group, where replay and learners are"
        elif name in learning and not _nvidia_gpus(entry):
            problem = "has no NVIDIA GPU, the learner needs one"
        elif name in learning and name.partition(".")[0] not in cluster.learner_families:
            problem = f"has no whole GPU that the image's driver drives; {', '.join(cluster.learner_families)} have"
        elif name in learning and _nvidia_gpus(entry) < cluster.learner_gpus:
            problem = f"has fewer GPUs ({_nvidia_gpus(entry)}) than learner_gpus ({cluster.learner_gpus})"
        elif name in cluster.actor_instance_types and _workers(cluster, entry) < cluster.shards:
            problem = f"has fewer vCPUs, so actor processes, than there are replay servers ({cluster.shards})"
        if problem:
            good = False
            yield Line("instance type", f"{name} {problem}", f"another type in {_variable_of(cluster, name)}")
    if good:
        yield Line("instance types", ", ".join(names))
        for name in learning:
            count = _nvidia_gpus(found[name])
            idle = count - cluster.learner_gpus
            told = f"; {idle} do nothing and cost the same: learner_gpus = {count} uses all" if idle else ""
            each = "a" if cluster.learner_hosts == 1 else f"each of {cluster.learner_hosts} x"
            yield Line("GPUs", f"{cluster.learner_gpus} of {count} in {each} {name} learn{told}")


def _nvidia_gpus(entry: dict[str, Any]) -> int:
    return sum(gpu["Count"] for gpu in entry.get("GpuInfo", {}).get("Gpus", []) if gpu["Manufacturer"] == "NVIDIA")


def _workers(cluster: Cluster, entry: dict[str, Any]) -> int:
    return cluster.actor_workers_per_host or int(entry["VCpuInfo"]["DefaultVCpus"])


def _variable_of(cluster: Cluster, name: str) -> str:
    if name == cluster.replay_instance_type:
        return "replay_instance_type"
    return "learner_instance_types" if name in cluster.learner_instance_types else "actor_instance_types"


def check_zone(cluster: Cluster) -> Iterator[Line]:
    """Checks whether one zone offers all types."""
    names, zones = cluster.instance_types, zones_of_types(cluster)
    everywhere = zones_for(cluster)
    chosen = cluster.availability_zone
    missing = [name for name in names if chosen and chosen not in zones[name]]
    if missing:
        choice = f"one of {', '.join(everywhere)}" if everywhere else "no zone offers all types: change the types"
        yield Line("zone", f"{chosen} does not offer {', '.join(missing)}", f"availability_zone: {choice}")
    elif not everywhere:
        offers = "; ".join(f"{name}: {', '.join(sorted(found)) or 'none'}" for name, found in zones.items())
        yield Line("zone", f"no zone offers all types ({offers})", "leave out or replace the rarest type")
    else:
        yield Line("zone", chosen or f"{everywhere[0]} (all types are in {', '.join(everywhere)})")


def check_network(cluster: Cluster) -> Iterator[Line]:
    """Checks whether there is room for one more VPC, and a default one while images have to be built."""
    if cluster.subnet_ids:
        yield _subnets(cluster)
        return
    vpcs = client("ec2", cluster.region).describe_vpcs()["Vpcs"]
    if cluster.vpc_id:
        is_known = cluster.vpc_id in {vpc["VpcId"] for vpc in vpcs}
        cure = "" if is_known else "vpc_id: a VPC of this account and region"
        yield Line("VPCs", f"{cluster.vpc_id} is {'' if is_known else 'not '}there", cure)
        return
    is_there = any({"Key": "Cluster", "Value": cluster.name} in vpc.get("Tags", []) for vpc in vpcs)
    allowed = allowed_quota(cluster, "vpc", VPCS)
    finding = f"{len(vpcs)} in use, {allowed:g} allowed" + (", this cluster's among them" if is_there else "")
    cure = "" if is_there or len(vpcs) < allowed else "delete one that nobody uses, or ask for a higher quota"
    yield Line("VPCs", finding, cure)
    if has_to_build(cluster) and not any(vpc.get("IsDefault") for vpc in vpcs):
        cure = f"aws ec2 create-default-vpc --region {cluster.region}, or packer build -var subnet_id=..."
        yield Line("VPCs", "there is no default VPC, in which Packer builds the images", cure)


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
    pages = client("ec2", cluster.region).get_paginator("describe_network_interfaces")
    interfaces = [
        interface
        for page in pages.paginate(Filters=[{"Name": "subnet-id", "Values": [name]}])
        for interface in page["NetworkInterfaces"]
        if {"Key": "Cluster", "Value": cluster.name} not in interface.get("TagSet", [])
    ]
    used = {address["PrivateIpAddress"] for interface in interfaces for address in interface["PrivateIpAddresses"]}
    taken = [address for address in wanted if address in used]
    told = f", where {', '.join(taken)} is in use and the cluster's" if taken else ""
    return Line("subnets", f"{name} in {zone}{told}", "free it, or put another subnet first" if taken else "")


def check_images(cluster: Cluster) -> Iterator[Line]:
    """Checks whether both images exist in one version, or the release that hosts install instead."""
    if cluster.release:
        yield _release(cluster)
        return
    versions = {}
    for role, found in images_of(cluster).items():
        hosts = IMAGE_ROLES[role]
        if not found:
            which = f" of version {cluster.image_version}" if cluster.image_version not in ("", NEWEST) else ""
            cure = f"packer build in deploy/packer, in {cluster.region} (deploy/README.md), or another image_version"
            yield Line("image", f"none for {hosts} (role {role}){which}", cure)
            continue
        _, versions[role], identifier = max(found)
        yield Line("image", f"{identifier}, version {versions[role]}, for {hosts}")
    if len(set(versions.values())) > 1:
        both = " and ".join(f"{role} {version}" for role, version in versions.items())
        yield Line("image", f"the newest versions differ: {both}", "build both, or set image_version to one of them")


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
    stored = stored_keys(client("ssm", cluster.region), cluster.name)
    missing = [name for name in key_names(cluster.name) if name not in stored]
    exposed = [name for name in key_names(cluster.name) if stored.get(name, "SecureString") != "SecureString"]
    make = f"python -m deploy keys --cluster {cluster.name} --region {cluster.region}"
    if missing:
        yield Line("keys", f"missing: {', '.join(missing)}", make)
    elif exposed:
        yield Line("keys", f"not encrypted: {', '.join(exposed)}", f"{make} --rotate, and restart all hosts")
    else:
        yield Line("keys", f"{len(stored)} under /apexrl/{cluster.name}/keys")


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


Check = Callable[[Cluster], Iterator[Line]]
FIRST: tuple[tuple[str, Check], ...] = (("credentials", check_credentials), ("region", check_region))
ACCOUNT: tuple[tuple[str, Check], ...] = (
    ("plan", check_plan),
    ("instance types", check_types),
    ("zone", check_zone),
    ("VPCs", check_network),
    ("roles", check_roles),
)
"""About the account, whatever was made in it."""
PREPARED: tuple[tuple[str, Check], ...] = (("bucket", check_bucket), ("images", check_images), ("keys", check_keys))
"""About all that has to be there before `terraform apply`."""


def failures(
    cluster: Cluster, address: str = "", only_account: bool = False, request_quotas: bool = False
) -> list[Line]:
    """Prints a line for each finding; returns those with a cure.

    Args:
      address: this machine's public IPv4 address, where checkip.amazonaws.com shall not be asked for it.
      only_account: leave out bucket, images and keys, in an account in which nothing was made yet.
      request_quotas: ask AWS for each quota that is too low.
    """
    found: list[Line] = []
    for name, check in FIRST:
        found += _failures_of(name, check, cluster)
        if found:
            print("      the rest can only be asked when that passes")
            return found
    quotas = ("quotas", lambda cluster: check_quotas(cluster, request_quotas))
    last = ("address", lambda cluster: check_addresses(cluster, address))
    for name, check in (*ACCOUNT, quotas, *(() if only_account else PREPARED), last):
        found += _failures_of(name, check, cluster)
    ready = "the account is ready" if only_account else "ready for terraform apply"
    print("not ready: see the lines with FAIL" if found else ready)
    return found


def _failures_of(name: str, check: Check, cluster: Cluster) -> list[Line]:
    """Prints the findings of a check, or an error of AWS as a finding; returns the failures."""
    try:
        lines = list(check(cluster))
    except AwsError as error:
        lines = [Line(name, *explain(error))]
    for line in lines:
        print(f"{'FAIL' if line.cure else 'PASS'}  {line.name}: {line.finding}", flush=True)
        if line.cure:
            print(f"      cure: {line.cure}", flush=True)
    return [line for line in lines if line.cure]
