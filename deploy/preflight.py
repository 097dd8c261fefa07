"""`python deploy/preflight.py`: asks AWS whether `terraform apply` can work, before it costs anything.

It reads the same variables as Terraform (see cluster.py), changes nothing, and reads no key. Every line says PASS or
FAIL. A FAIL comes with its cure, and makes the exit status 1.
"""

import functools
import ipaddress
import math
import re
import sys
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import tyro
from aws import AwsError, client, code_of, explain
from cluster import Cluster, ClusterFlags, read_cluster
from keys import key_names, stored_keys
from release import check_release
from tfvars import DeployError

ON_DEMAND, SPOT, GPU, GPU_P, VPCS = "L-1216C47A", "L-34B43A08", "L-DB2E81BA", "L-417A185B", "L-F678F1CE"
QUOTA_NAMES = {
    ON_DEMAND: "vCPUs of on-demand standard instances",
    SPOT: "vCPUs of spot standard instances",
    GPU: "vCPUs of on-demand G and VT instances",
    GPU_P: "vCPUs of on-demand P instances",
}
STANDARD_FAMILIES = frozenset(("a", "c", "d", "h", "i", "im", "is", "m", "r", "t", "z"))
GPU_FAMILIES = {"g": GPU, "gr": GPU, "vt": GPU, "p": GPU_P}
IMAGE_ROLES = {"cpu": "replay and actors", "gpu": "learner"}
WIDEST_PREFIX = 16
ADDRESS_SERVICE = "https://checkip.amazonaws.com"


class Line(NamedTuple):
    """The finding of one check. With a cure it is a failure."""

    name: str
    finding: str
    cure: str = ""


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


def check_bucket(cluster: Cluster) -> Iterator[Line]:
    """Checks whether the results bucket exists, belongs to this account, and is in the region."""
    bucket = cluster.results_bucket
    cure = "apply deploy/terraform/bootstrap, and give its output results_bucket as --results-bucket or in a var-file"
    if not bucket:
        yield Line("bucket", "variable results_bucket is not given", cure)
        return
    try:
        answer = client("s3", cluster.region).head_bucket(Bucket=bucket)
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


@functools.cache
def describe_types(cluster: Cluster) -> dict[str, dict[str, Any]]:
    """Returns EC2's descriptions of the cluster's instance types by name, without those that EC2 does not know."""
    filters = [{"Name": "instance-type", "Values": list(cluster.instance_types)}]
    answer = client("ec2", cluster.region).describe_instance_types(Filters=filters)
    return {entry["InstanceType"]: entry for entry in answer["InstanceTypes"]}


def check_types(cluster: Cluster) -> Iterator[Line]:
    """Checks whether the instance types fit their roles."""
    names = cluster.instance_types
    found = describe_types(cluster)
    pair = (cluster.replay_instance_type, cluster.learner_instance_type)
    needs_group = cluster.use_placement_group
    good = True
    for name in names:
        entry = found.get(name)
        problem = ""
        if entry is None:
            problem = f"is not offered in {cluster.region}"
        elif "x86_64" not in entry["ProcessorInfo"]["SupportedArchitectures"]:
            problem = "is not x86_64, the images are"
        elif needs_group and name in pair and "cluster" not in entry["PlacementGroupInfo"]["SupportedStrategies"]:
            problem = "cannot stand in a cluster placement group, where replay and learner are"
        elif name == cluster.learner_instance_type and not _nvidia_gpus(entry):
            problem = "has no NVIDIA GPU, the learner needs one"
        elif name == cluster.learner_instance_type and _nvidia_gpus(entry) < cluster.learner_gpus:
            problem = f"has fewer GPUs ({_nvidia_gpus(entry)}) than learner_gpus ({cluster.learner_gpus})"
        elif name in cluster.actor_instance_types and _workers(cluster, entry) < cluster.shards:
            problem = f"has fewer vCPUs, so actor processes, than there are replay servers ({cluster.shards})"
        if problem:
            good = False
            yield Line("instance type", f"{name} {problem}", f"another type in {_variable_of(cluster, name)}")
    if good:
        yield Line("instance types", ", ".join(names))
        count = _nvidia_gpus(found[cluster.learner_instance_type])
        yield Line("GPUs", f"{cluster.learner_gpus} of {count} in a {cluster.learner_instance_type} learn")


def _nvidia_gpus(entry: dict[str, Any]) -> int:
    return sum(gpu["Count"] for gpu in entry.get("GpuInfo", {}).get("Gpus", []) if gpu["Manufacturer"] == "NVIDIA")


def _workers(cluster: Cluster, entry: dict[str, Any]) -> int:
    return cluster.actor_workers_per_host or int(entry["VCpuInfo"]["DefaultVCpus"])


def _variable_of(cluster: Cluster, name: str) -> str:
    if name == cluster.replay_instance_type:
        return "replay_instance_type"
    return "learner_instance_type" if name == cluster.learner_instance_type else "actor_instance_types"


def check_zone(cluster: Cluster) -> Iterator[Line]:
    """Checks whether one zone offers all types."""
    names = cluster.instance_types
    ec2 = client("ec2", cluster.region)
    standard = [
        {"Name": "opt-in-status", "Values": ["opt-in-not-required"]},
        {"Name": "state", "Values": ["available"]},
    ]
    known = {zone["ZoneName"] for zone in ec2.describe_availability_zones(Filters=standard)["AvailabilityZones"]}
    zones: dict[str, set[str]] = {name: set() for name in names}
    for page in ec2.get_paginator("describe_instance_type_offerings").paginate(
        LocationType="availability-zone", Filters=[{"Name": "instance-type", "Values": list(names)}]
    ):
        for offer in page["InstanceTypeOfferings"]:
            if offer["Location"] in known:
                zones[offer["InstanceType"]].add(offer["Location"])
    everywhere = sorted(set.intersection(*zones.values()))
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


def quota_of(instance_type: str, spot: bool) -> str:
    """Returns the code of the vCPU quota that an instance counts against; empty when this script knows none."""
    family = re.match(r"[a-z]+", instance_type)
    name = family[0] if family else ""
    if name in STANDARD_FAMILIES:
        return SPOT if spot else ON_DEMAND
    return "" if spot else GPU_FAMILIES.get(name, "")


def check_quotas(cluster: Cluster) -> Iterator[Line]:
    """Checks whether the account may start so many vCPUs in addition to those that run already."""
    used = _vcpus_in_use(cluster)
    for code, needed in _vcpus_wanted(cluster).items():
        if code not in QUOTA_NAMES:
            cure = "look for its quota in the console (Service Quotas, Amazon EC2), or choose types of other families"
            yield Line("quota", f"not checked: this script knows no quota of {code}", cure)
            continue
        limit = _allowed(cluster, "ec2", code)
        finding = f"{QUOTA_NAMES[code]}: {needed} wanted, {used[code]} in use, {limit:g} allowed"
        cure = ""
        if needed + used[code] > limit:
            cure = (
                f"aws service-quotas request-service-quota-increase --service-code ec2 --quota-code {code} "
                f"--desired-value {math.ceil(needed + used[code])} --region {cluster.region} (hours to days)"
            )
        yield Line("quota", finding, cure)


def _vcpus_wanted(cluster: Cluster) -> Counter[str]:
    """Counts the cluster's vCPUs by quota, or by instance type where this script knows no quota.

    The group may start hosts of any of its types. So each quota that one of them counts against has to be enough.
    """
    vcpus = {name: int(entry["VCpuInfo"]["DefaultVCpus"]) for name, entry in describe_types(cluster).items()}
    wanted: Counter[str] = Counter()
    for types, hosts, spot in (
        ((cluster.replay_instance_type,), 1, False),
        ((cluster.learner_instance_type,), 1, False),
        (cluster.actor_instance_types, cluster.actor_on_demand_hosts, False),
        (cluster.actor_instance_types, cluster.spot_hosts, True),
    ):
        largest: Counter[str] = Counter()
        for name in types if hosts else ():
            code = quota_of(name, spot) or f"{name}{' on spot' if spot else ''}"
            largest[code] = max(largest[code], hosts * vcpus.get(name, 0))
        wanted += largest
    return wanted


def _allowed(cluster: Cluster, service: str, code: str) -> float:
    """Returns a quota of the account, or AWS's default when the account has none of its own."""
    quotas = client("service-quotas", cluster.region)
    try:
        return float(quotas.get_service_quota(ServiceCode=service, QuotaCode=code)["Quota"]["Value"])
    except AwsError as error:
        if code_of(error) != "NoSuchResourceException":
            raise
    return float(quotas.get_aws_default_service_quota(ServiceCode=service, QuotaCode=code)["Quota"]["Value"])


def _vcpus_in_use(cluster: Cluster) -> Counter[str]:
    """Counts the vCPUs of the account's other instances by quota."""
    states = [{"Name": "instance-state-name", "Values": ["pending", "running"]}]
    running: Counter[tuple[str, bool]] = Counter()
    ec2 = client("ec2", cluster.region)
    for page in ec2.get_paginator("describe_instances").paginate(Filters=states):
        for instance in (instance for group in page["Reservations"] for instance in group["Instances"]):
            tags = {tag["Key"]: tag["Value"] for tag in instance.get("Tags", [])}
            if (tags.get("Project"), tags.get("Cluster")) != ("apexrl", cluster.name):
                running[instance["InstanceType"], instance.get("InstanceLifecycle") == "spot"] += 1
    names = sorted({name for name, _ in running})
    vcpus: dict[str, int] = {}
    for start in range(0, len(names), 100):
        for entry in ec2.describe_instance_types(InstanceTypes=names[start : start + 100])["InstanceTypes"]:
            vcpus[entry["InstanceType"]] = entry["VCpuInfo"]["DefaultVCpus"]
    used: Counter[str] = Counter()
    for (name, spot), count in running.items():
        used[quota_of(name, spot)] += count * vcpus[name]
    return used


def check_network(cluster: Cluster) -> Iterator[Line]:
    """Checks whether there is room for one more VPC."""
    vpcs = client("ec2", cluster.region).describe_vpcs()["Vpcs"]
    is_there = any({"Key": "Cluster", "Value": cluster.name} in vpc.get("Tags", []) for vpc in vpcs)
    allowed = _allowed(cluster, "vpc", VPCS)
    finding = f"{len(vpcs)} in use, {allowed:g} allowed" + (", this cluster's among them" if is_there else "")
    cure = "" if is_there or len(vpcs) < allowed else "delete one that nobody uses, or ask for a higher quota"
    yield Line("VPCs", finding, cure)


def check_images(cluster: Cluster) -> Iterator[Line]:
    """Checks whether both images exist in one version, or the release that hosts install instead."""
    if cluster.release:
        yield Line("release", *check_release(cluster))
        return
    images = client("ec2", cluster.region).describe_images(
        Owners=["self"], Filters=[{"Name": "tag:Project", "Values": ["apexrl"]}]
    )["Images"]
    versions = {}
    for role, hosts in IMAGE_ROLES.items():
        found = []
        for image in images:
            tags = {tag["Key"]: tag["Value"] for tag in image.get("Tags", [])}
            right_version = cluster.image_version in ("", tags.get("Version"))
            if tags.get("Role") == role and right_version and image["State"] == "available":
                found.append((image["CreationDate"], tags.get("Version", "unknown"), image["ImageId"]))
        if not found:
            which = f" of version {cluster.image_version}" if cluster.image_version else ""
            cure = f"packer build in deploy/packer, in {cluster.region} (deploy/README.md), or another image_version"
            yield Line("image", f"none for {hosts} (role {role}){which}", cure)
            continue
        _, versions[role], identifier = max(found)
        yield Line("image", f"{identifier}, version {versions[role]}, for {hosts}")
    if len(set(versions.values())) > 1:
        both = " and ".join(f"{role} {version}" for role, version in versions.items())
        yield Line("image", f"the newest versions differ: {both}", "build both, or set image_version to one of them")


def check_keys(cluster: Cluster) -> Iterator[Line]:
    """Checks whether the CURVE keys are stored, without reading their values."""
    stored = stored_keys(client("ssm", cluster.region), cluster.name)
    missing = [name for name in key_names(cluster.name) if name not in stored]
    exposed = [name for name in key_names(cluster.name) if stored.get(name, "SecureString") != "SecureString"]
    make = f"python deploy/keys.py --cluster {cluster.name} --region {cluster.region}"
    if missing:
        rotate = " --rotate" if stored else ""
        yield Line("keys", f"missing: {', '.join(missing)}", make + rotate)
    elif exposed:
        yield Line("keys", f"not encrypted: {', '.join(exposed)}", f"delete them, then {make} --rotate")
    else:
        yield Line("keys", f"{len(stored)} under /apexrl/{cluster.name}/keys")


def check_spot_role(cluster: Cluster) -> Iterator[Line]:
    """Checks whether EC2 has its role for spot instances. Without it a group of actors stays empty."""
    if not cluster.spot_hosts:
        return
    path = "/aws-service-role/spot.amazonaws.com/"
    if client("iam", cluster.region).list_roles(PathPrefix=path)["Roles"]:
        yield Line("spot", f"{cluster.spot_hosts} hosts; the account has EC2's role for spot instances")
    else:
        cure = "aws iam create-service-linked-role --aws-service-name spot.amazonaws.com"
        yield Line("spot", "the account lacks EC2's role for spot instances", cure)


def check_addresses(cluster: Cluster, address: str) -> Iterator[Line]:
    """Checks whether this machine may open TensorBoard."""
    if not cluster.operator_cidrs:
        yield Line("address", "operator_cidrs is empty: TensorBoard through `aws ssm start-session` only")
        return
    networks = []
    for text in cluster.operator_cidrs:
        try:
            network = ipaddress.ip_network(text)
        except ValueError as error:
            yield Line("address", f"operator_cidrs: {error}", "write networks as 203.0.113.7/32")
            return
        if network.version != 4 or network.prefixlen < WIDEST_PREFIX:
            yield Line("address", f"operator_cidrs: {text} is too wide or not IPv4", "at most a /16, better a /32")
            return
        networks.append(network)
    try:
        ours = ipaddress.ip_address(address or _public_address())
    except (OSError, ValueError) as error:
        yield Line("address", f"this machine's public address is unknown ({error})", "give it with --address")
        return
    finding = f"{ours}: operator_cidrs is {', '.join(cluster.operator_cidrs)}"
    covered = any(ours in network for network in networks)
    yield Line("address", finding, "" if covered else f"add {ours}/32 to operator_cidrs, or leave it empty")


def _public_address() -> str:
    with urllib.request.urlopen(ADDRESS_SERVICE, timeout=10) as answer:
        return answer.read(64).decode("ascii", "replace").strip()


Check = Callable[[Cluster], Iterator[Line]]
FIRST: tuple[tuple[str, Check], ...] = (("credentials", check_credentials), ("region", check_region))
FURTHER: tuple[tuple[str, Check], ...] = (
    ("bucket", check_bucket),
    ("instance types", check_types),
    ("zone", check_zone),
    ("quotas", check_quotas),
    ("VPCs", check_network),
    ("images", check_images),
    ("keys", check_keys),
    ("spot", check_spot_role),
)


def run_checks(cluster: Cluster, address: str) -> bool:
    """Prints a line for each finding; returns whether all passed."""
    if not all(_passes(name, check, cluster) for name, check in FIRST):  # stops at the first failure
        print("      the rest can only be asked when that passes")
        return False
    last = ("address", lambda cluster: check_addresses(cluster, address))
    return all([_passes(name, check, cluster) for name, check in (*FURTHER, last)])  # runs all of them


def _passes(name: str, check: Check, cluster: Cluster) -> bool:
    """Prints the findings of a check, or an error of AWS as a finding; returns whether all passed."""
    passes = True
    try:
        lines = list(check(cluster))
    except AwsError as error:
        lines = [Line(name, *explain(error))]
    for line in lines:
        print(f"{'FAIL' if line.cure else 'PASS'}  {line.name}: {line.finding}", flush=True)
        if line.cure:
            print(f"      cure: {line.cure}", flush=True)
            passes = False
    return passes


def main(flags: tyro.conf.OmitArgPrefixes[ClusterFlags], address: str = "") -> int:
    """Asks AWS whether `terraform apply` can work.

    Args:
      flags: The description of the cluster.
      address: This machine's public IPv4 address. If needed and not given, checkip.amazonaws.com is asked for it.
    """
    try:
        cluster = read_cluster(flags)
        if not cluster.region:
            raise DeployError("variable region is not given: give --region, or region in a var-file")
        passed = run_checks(cluster, address)
    except DeployError as error:
        print(f"cannot look: {error}", file=sys.stderr)
        return 1
    print("ready for terraform apply" if passed else "not ready: see the lines with FAIL")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
