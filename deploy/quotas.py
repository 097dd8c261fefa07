"""The quotas of an account beside what a cluster needs: vCPUs, by families of instances."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator

from deploy.aws import AwsError, client, code_of, listed, tags_of
from deploy.cluster import Cluster
from deploy.findings import Line

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
    """Returns the code of the vCPU quota that an instance counts against; its name where this script knows none."""
    family = re.sub(r"[^a-z].*", "", instance_type)
    if family in STANDARD_FAMILIES:
        return SPOT if spot else ON_DEMAND
    return f"{instance_type} on spot" if spot else GPU_FAMILIES.get(family, instance_type)


def check_quotas(cluster: Cluster, request: bool = False) -> Iterator[Line]:
    """Checks whether the account may start so many vCPUs in addition to those that run already.

    Args:
      request: Ask AWS for each quota that is too low.
    """
    used = _vcpus_in_use(cluster)
    for code, needed in _vcpus_wanted(cluster).items():
        if code not in QUOTA_NAMES:
            cure = "look for its quota in the console (Service Quotas, Amazon EC2), or choose types of other families"
            yield Line("quota", f"not checked: this script knows no quota of {code}", cure)
            continue
        limit, desired = allowed_quota(cluster, "ec2", code), math.ceil(needed + used[code])
        finding = f"{QUOTA_NAMES[code]}: {needed} wanted, {used[code]} in use, {limit:g} allowed"
        yield Line("quota", finding, _cure_of_quota(cluster, code, desired, request) if desired > limit else "")


def _cure_of_quota(cluster: Cluster, code: str, desired: int, request: bool) -> str:
    """Returns what to do about a quota; asks AWS for it when told to, unless somebody has asked for as much."""
    quotas = client("service-quotas", cluster.region)
    history = quotas.list_requested_service_quota_change_history_by_quota(ServiceCode="ec2", QuotaCode=code)
    asked = [one for one in history["RequestedQuotas"] if one["Status"] in OPEN_REQUEST]
    if not asked and request:
        answer = quotas.request_service_quota_increase(ServiceCode="ec2", QuotaCode=code, DesiredValue=float(desired))
        asked = [answer["RequestedQuota"]]
    if asked:
        state = f"{asked[-1]['DesiredValue']:g} asked for, {asked[-1]['Status']}"
        return f"wait until AWS has answered ({state}; hours to days)"
    return (
        f"aws service-quotas request-service-quota-increase --service-code ec2 --quota-code {code} "
        f"--desired-value {desired} --region {cluster.region} (hours to days), or --request-quotas"
    )


def allowed_quota(cluster: Cluster, service: str, code: str) -> float:
    """Returns a quota of the account, or AWS's default when the account has none of its own."""
    quotas = client("service-quotas", cluster.region)
    try:
        return float(quotas.get_service_quota(ServiceCode=service, QuotaCode=code)["Quota"]["Value"])
    except AwsError as error:
        if code_of(error) != "NoSuchResourceException":
            raise
    return float(quotas.get_aws_default_service_quota(ServiceCode=service, QuotaCode=code)["Quota"]["Value"])


def _vcpus_of(cluster: Cluster, names: Iterable[str]) -> dict[str, int]:
    """Returns the vCPUs of instance types, of those that EC2 has."""
    filters = [{"Name": "instance-type", "Values": sorted(names)}]
    found = listed(cluster.region, "ec2", "describe_instance_types", "InstanceTypes[]", Filters=filters)
    return {entry["InstanceType"]: int(entry["VCpuInfo"]["DefaultVCpus"]) for entry in found}


def _vcpus_wanted(cluster: Cluster) -> Counter[str]:
    """Counts the cluster's vCPUs by quota, or by instance type where this script knows no quota.

    A group may start hosts of any of its types. So each quota that one of them counts against has to be enough.
    """
    vcpus = _vcpus_of(cluster, cluster.instance_types)
    wanted: Counter[str] = Counter()
    for types, hosts, spot in (
        ((cluster.replay_instance_type,), 1, False),
        (cluster.learner_instance_types, cluster.learner_hosts, False),
        (cluster.actor_instance_types, cluster.actor_on_demand_hosts, False),
        (cluster.actor_instance_types, cluster.spot_hosts, True),
    ):
        largest: Counter[str] = Counter()
        for name in types:
            largest |= Counter({quota_of(name, spot): hosts * vcpus.get(name, 0)})
        wanted += largest
    return wanted


def _vcpus_in_use(cluster: Cluster) -> Counter[str]:
    """Counts the vCPUs of the account's other instances by quota."""
    states = [{"Name": "instance-state-name", "Values": ["pending", "running"]}]
    running: Counter[tuple[str, bool]] = Counter()
    for host in listed(cluster.region, "ec2", "describe_instances", "Reservations[].Instances[]", Filters=states):
        if {"Project": "apexrl", "Cluster": cluster.name}.items() - tags_of(host).items():
            running[host["InstanceType"], host.get("InstanceLifecycle") == "spot"] += 1
    vcpus = _vcpus_of(cluster, {name for name, _ in running}) if running else {}
    used: Counter[str] = Counter()
    for (name, spot), count in running.items():
        used[quota_of(name, spot)] += count * vcpus[name]
    return used
