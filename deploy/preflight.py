"""`python deploy/preflight.py`: asks AWS whether `terraform apply` can work, before it costs anything.

It reads the same variables as Terraform (see cluster.py), and reads no key. Every line says PASS or FAIL. A FAIL comes
with its cure, and makes the exit status 1. With --only-account it asks for nothing that the steps before `terraform
apply` make: bucket, images, keys. It changes nothing, unless --request-quotas tells it to ask AWS for higher quotas.
"""

import ipaddress
import sys
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import tyro
from aws import AwsError, client, code_of, explain
from cluster import LEARNER_FAMILIES, NEWEST, Cluster, ClusterFlags, read_cluster
from findings import IMAGE_ROLES, Line, describe_types, has_to_build, images_of, zones_of_types
from keys import key_names, stored_keys
from quotas import VPCS, allowed_quota, check_quotas
from release import check_release
from tfvars import DeployError

PLAN_REGION = "us-east-1"
"""Where AWS answers about the account's plan, whatever the cluster's region."""
WIDEST_PREFIX = 16
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
    try:
        plan = client("freetier", PLAN_REGION).get_account_plan_state()["accountPlanType"]
    except AwsError as error:
        if code_of(error) != "ResourceNotFoundException":
            raise
        plan = "PAID"  # accounts from before July 2025, and those of an organization, have no plan
    if plan == "FREE":
        cure = "aws freetier upgrade-account-plan --account-plan-type PAID --region us-east-1 (the credits stay)"
        yield Line("plan", "the account is on AWS's free plan, which starts none of these instance types", cure)
    else:
        yield Line("plan", "not AWS's free plan")


def check_bucket(cluster: Cluster) -> Iterator[Line]:
    """Checks whether the results bucket exists, belongs to this account, and is in the region."""
    bucket = cluster.results_bucket
    cure = "apply deploy/terraform/bootstrap, and give its output results_bucket as --results-bucket or in a var-file"
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
        elif name in learning and name.partition(".")[0] not in LEARNER_FAMILIES:
            problem = f"has no whole GPU that the image's driver drives; {', '.join(LEARNER_FAMILIES)} have"
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


def check_network(cluster: Cluster) -> Iterator[Line]:
    """Checks whether there is room for one more VPC, and a default one while images have to be built."""
    vpcs = client("ec2", cluster.region).describe_vpcs()["Vpcs"]
    is_there = any({"Key": "Cluster", "Value": cluster.name} in vpc.get("Tags", []) for vpc in vpcs)
    allowed = allowed_quota(cluster, "vpc", VPCS)
    finding = f"{len(vpcs)} in use, {allowed:g} allowed" + (", this cluster's among them" if is_there else "")
    cure = "" if is_there or len(vpcs) < allowed else "delete one that nobody uses, or ask for a higher quota"
    yield Line("VPCs", finding, cure)
    if has_to_build(cluster) and not any(vpc.get("IsDefault") for vpc in vpcs):
        cure = f"aws ec2 create-default-vpc --region {cluster.region}, or packer build -var subnet_id=..."
        yield Line("VPCs", "there is no default VPC, in which Packer builds the images", cure)


def check_images(cluster: Cluster) -> Iterator[Line]:
    """Checks whether both images exist in one version, or the release that hosts install instead."""
    if cluster.release:
        yield Line("release", *check_release(cluster))
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


def run_checks(cluster: Cluster, address: str, only_account: bool = False, request_quotas: bool = False) -> bool:
    """Prints a line for each finding; returns whether all passed. `main` describes the arguments."""
    if not all(_passes(name, check, cluster) for name, check in FIRST):  # stops at the first failure
        print("      the rest can only be asked when that passes")
        return False
    quotas = ("quotas", lambda cluster: check_quotas(cluster, request_quotas))
    last = ("address", lambda cluster: check_addresses(cluster, address))
    checks = (*ACCOUNT, quotas, last) if only_account else (*ACCOUNT, quotas, *PREPARED, last)
    return all([_passes(name, check, cluster) for name, check in checks])  # runs all of them


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


def main(
    flags: tyro.conf.OmitArgPrefixes[ClusterFlags],
    address: str = "",
    only_account: bool = False,
    request_quotas: bool = False,
) -> int:
    """Asks AWS whether `terraform apply` can work.

    Args:
      flags: The description of the cluster.
      address: This machine's public IPv4 address. If needed and not given, checkip.amazonaws.com is asked for it.
      only_account: Leave out bucket, images and keys: for an account in which nothing was made yet.
      request_quotas: Ask AWS for each quota that is too low. This is the only change that the script makes.
    """
    try:
        cluster = read_cluster(flags)
        if not cluster.region:
            raise DeployError("variable region is not given: give --region, or region in a var-file")
        passed = run_checks(cluster, address, only_account, request_quotas)
    except DeployError as error:
        print(f"cannot look: {error}", file=sys.stderr)
        return 1
    ready = "the account is ready" if only_account else "ready for terraform apply"
    print(ready if passed else "not ready: see the lines with FAIL")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
