"""The quotas of an account beside what a cluster and the builds of its images need: vCPUs, by families of instances."""

import math
import re
from collections import Counter
from collections.abc import Iterator

from deploy.aws import AwsError, client, code_of
from deploy.cluster import Cluster, packer_default
from deploy.findings import IMAGE_ROLES, Line, describe_types, has_to_build

ON_DEMAND, SPOT, GPU, GPU_P, VPCS = "L-1216C47A", "L-34B43A08", "L-DB2E81BA", "L-417A185B", "L-F678F1CE"
QUOTA_NAMES = {
    ON_DEMAND: "vCPUs of on-demand standard instances",
    SPOT: "vCPUs of spot standard instances",
    GPU: "vCPUs of on-demand G and VT instances",
    GPU_P: "vCPUs of on-demand P instances",
}
STANDARD_FAMILIES = frozenset(("a", "c", "d", "h", "i", "im", "is", "m", "r", "t", "z"))
GPU_FAMILIES = {"g": GPU, "gr": GPU, "vt": GPU, "p": GPU_P}
OPEN_REQUEST = ("PENDING", "CASE_OPENED")


def quota_of(instance_type: str, spot: bool) -> str:
    """Returns the code of the vCPU quota that an instance counts against; empty when this script knows none."""
    family = re.match(r"[a-z]+", instance_type)
    name = family[0] if family else ""
    if name in STANDARD_FAMILIES:
        return SPOT if spot else ON_DEMAND
    return "" if spot else GPU_FAMILIES.get(name, "")


def check_quotas(cluster: Cluster, request: bool = False) -> Iterator[Line]:
    """Checks whether the account may start so many vCPUs in addition to those that run already.

    Args:
      request: Ask AWS for each quota that is too low.
    """
    used = _vcpus_in_use(cluster)
    wanted = _vcpus_wanted(cluster)
    # The images are built before the cluster starts: they need no more than the larger of both.
    if has_to_build(cluster):
        wanted |= _vcpus_of_builds(cluster)
    for code, needed in wanted.items():
        if code not in QUOTA_NAMES:
            cure = "look for its quota in the console (Service Quotas, Amazon EC2), or choose types of other families"
            yield Line("quota", f"not checked: this script knows no quota of {code}", cure)
            continue
        limit = allowed_quota(cluster, "ec2", code)
        finding = f"{QUOTA_NAMES[code]}: {needed} wanted, {used[code]} in use, {limit:g} allowed"
        missing = math.ceil(needed + used[code]) if needed + used[code] > limit else 0
        yield Line("quota", finding, _cure_of_quota(cluster, code, missing, request) if missing else "")


def _cure_of_quota(cluster: Cluster, code: str, desired: int, request: bool) -> str:
    """Returns what to do about a quota; asks AWS for it when told to, unless somebody has asked for as much."""
    quotas = client("service-quotas", cluster.region)
    history = quotas.list_requested_service_quota_change_history_by_quota(ServiceCode="ec2", QuotaCode=code)
    asked = [one for one in history["RequestedQuotas"] if one["Status"] in OPEN_REQUEST]
    if not asked and request:
        answer = quotas.request_service_quota_increase(ServiceCode="ec2", QuotaCode=code, DesiredValue=float(desired))
        asked = [answer["RequestedQuota"]]
    if asked:
        newest = asked[-1]
        state = f"{newest['DesiredValue']:g} asked for, {newest['Status']}"
        return f"wait until AWS has answered ({state}; hours to days)"
    return (
        f"aws service-quotas request-service-quota-increase --service-code ec2 --quota-code {code} "
        f"--desired-value {desired} --region {cluster.region} (hours to days), or --request-quotas"
    )


def _vcpus_of_builds(cluster: Cluster) -> Counter[str]:
    """Counts the vCPUs of the instances on which Packer builds the images, all at once, by quota."""
    name = packer_default("instance_type")
    [entry] = client("ec2", cluster.region).describe_instance_types(InstanceTypes=[name])["InstanceTypes"]
    return Counter({quota_of(name, spot=False): len(IMAGE_ROLES) * int(entry["VCpuInfo"]["DefaultVCpus"])})


def _vcpus_wanted(cluster: Cluster) -> Counter[str]:
    """Counts the cluster's vCPUs by quota, or by instance type where this script knows no quota.

    A group may start hosts of any of its types. So each quota that one of them counts against has to be enough.
    """
    vcpus = {name: int(entry["VCpuInfo"]["DefaultVCpus"]) for name, entry in describe_types(cluster).items()}
    wanted: Counter[str] = Counter()
    for types, hosts, spot in (
        ((cluster.replay_instance_type,), 1, False),
        (cluster.learner_instance_types, cluster.learner_hosts, False),
        (cluster.actor_instance_types, cluster.actor_on_demand_hosts, False),
        (cluster.actor_instance_types, cluster.spot_hosts, True),
    ):
        largest: Counter[str] = Counter()
        for name in types if hosts else ():
            code = quota_of(name, spot) or f"{name}{' on spot' if spot else ''}"
            largest[code] = max(largest[code], hosts * vcpus.get(name, 0))
        wanted += largest
    return wanted


def allowed_quota(cluster: Cluster, service: str, code: str) -> float:
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
