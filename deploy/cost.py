"""The price of a cluster: an hour, until its time limit, and for 200 million frames, by the dated table prices.json.

It sends no request.
"""

import dataclasses
import functools
import json
import operator
from pathlib import Path
from typing import Any

from deploy.cluster import CONFIGURATION, Cluster, packer_default
from deploy.steps import DeployError

PRICES = Path(__file__).resolve().parent / "prices.json"
LIMITS = CONFIGURATION / "limits.json"
FRAMES = 200_000_000
STEPS_A_VCPU = 1_856
"""Agent steps a second and vCPU with the paper's network, as docs/benchmarks.md has it, of another processor."""
HOURS_A_MONTH = 730
JOURNAL_MEGABYTES_PER_SECOND = 125
"""Throughput of the journal's volume beyond that which a volume has anyway (replay.tf)."""
CERTAIN = ("catalog", "multiple")


@dataclasses.dataclass(frozen=True)
class Price:
    """Dollars: with everything on demand, and as planned, at the lowest and at the highest price of what may start."""

    on_demand: float
    low: float
    high: float
    is_certain: bool  # looked up, else from memory

    def __add__(self, other: "Price") -> "Price":
        certain = self.is_certain and other.is_certain
        return Price(self.on_demand + other.on_demand, self.low + other.low, self.high + other.high, certain)

    def __mul__(self, factor: float) -> "Price":
        return Price(self.on_demand * factor, self.low * factor, self.high * factor, self.is_certain)


@functools.cache
def table() -> dict[str, Any]:
    """Returns the price table."""
    return dict(json.loads(PRICES.read_text(encoding="utf-8")))


def instance_price(types: tuple[str, ...], kind: str) -> Price:
    """Returns what an instance costs an hour: on demand of the first type, as planned of any of them.

    Raises: DeployError when the table lacks a price.
    """
    found = []
    for name, wanted in ((types[0], "on_demand"), *((name, kind) for name in types)):
        entry = table()["instances"].get(name, {})
        if wanted not in entry:
            raise DeployError(f"no {wanted} price of {name}: add it to {PRICES}, with its source, or choose another")
        found.append(entry[wanted])
    numbers = [number for *each, _ in found[1:] for number in each]
    return Price(found[0][0], min(numbers), max(numbers), all(source in CERTAIN for *_, source in found))


def other_price(name: str) -> Price:
    """Returns what something else costs, by its name in the table."""
    number, source = table()[name]
    return Price(number, number, number, source in CERTAIN)


def journal_throughput() -> Price:
    """Returns what the journal's throughput costs a month."""
    return other_price("gp3_mbps_month") * JOURNAL_MEGABYTES_PER_SECOND


def hourly_prices(cluster: Cluster) -> dict[str, Price]:
    """Returns the items that cost money by the hour.

    The group of actors takes the first type on demand; on spot, any type with spare capacity. Those of learners take
    the first type, another one only where EC2 has none of it.

    Raises: DeployError when a price is missing.
    """
    learners, actors = cluster.learner_instance_types, cluster.actor_instance_types
    hosts = cluster.learner_hosts
    acting = instance_price(actors[:1], "on_demand") * cluster.actor_on_demand_hosts
    if cluster.spot_hosts:
        acting += instance_price(actors, "spot") * cluster.spot_hosts
    gibibytes = cluster.replay_volume_gib + hosts * cluster.learner_volume_gib
    gibibytes += (1 + cluster.actor_hosts) * int(packer_default("cpu_volume_gib"))  # their own disk is their image
    disks = other_price("gp3_gib_month") * gibibytes + journal_throughput()
    addresses = 1 + hosts + cluster.actor_hosts
    return {
        f"replay: 1 x {cluster.replay_instance_type}": instance_price((cluster.replay_instance_type,), "on_demand"),
        f"learner: {hosts} x {_first_of(learners)}": instance_price(learners, "on_demand") * hosts,
        f"actors: {cluster.actor_hosts} x {_first_of(actors)}": acting,
        f"volumes: {gibibytes} GiB gp3": disks * (1 / HOURS_A_MONTH),
        f"addresses: {addresses} public IPv4": other_price("public_ipv4_hour") * addresses,
    }


def _first_of(types: tuple[str, ...]) -> str:
    return types[0] + (f" (or {', '.join(types[1:])})" if types[1:] else "")


def hourly_total(cluster: Cluster) -> Price:
    """Returns the price of an hour.

    Raises: DeployError when a price is missing.
    """
    return functools.reduce(operator.add, hourly_prices(cluster).values())


def hosts_of_learner(cluster: Cluster, updates_per_second: float) -> str:
    """Returns how many actor hosts keep a learner busy; more of them only wait for it.

    Raises: DeployError when the table lacks the actors' type, or it is not known what a learner of this kind takes.
    """
    by_preset = json.loads(LIMITS.read_text(encoding="utf-8"))["learning"].get(cluster.agent, {})
    if cluster.preset not in by_preset:
        raise DeployError(
            f"--updates-per-second: how many transitions a learner of agent {cluster.agent} and preset "
            f"{cluster.preset} takes is not known; leave it out"
        )
    flags, name = dict(cluster.learner_flags + cluster.replay_flags), cluster.actor_instance_types[0]
    learning = {flag: float(flags.get(flag, number)) for flag, number in by_preset[cluster.preset].items()}
    if name not in table()["instances"]:
        raise DeployError(f"no {name} in {PRICES}: add it, with its source, or choose another")
    if not learning["samples_per_insert"]:
        raise DeployError("--updates-per-second: with samples_per_insert 0 nobody waits for the learner; leave it out")
    steps_per_second = updates_per_second * learning["batch_size"] / learning["samples_per_insert"]
    hosts = steps_per_second / (table()["instances"][name]["vcpus"] * STEPS_A_VCPU)
    return (
        f"a learner of {updates_per_second:g} updates/s of {learning['batch_size']:g} takes {steps_per_second:,.0f} "
        f"transitions/s at {learning['samples_per_insert']:g} samples an insert: {hosts:.1f} hosts of {name} make "
        f"them, if a vCPU makes {STEPS_A_VCPU:,} (docs/benchmarks.md); the plan has {cluster.actor_hosts}"
    )


def report(
    cluster: Cluster, frames_per_second: float | None = None, updates_per_second: float | None = None
) -> list[str]:
    """Returns the lines that tell what a cluster costs.

    Args:
      frames_per_second: environment frames of the whole cluster, measured on such a cluster.
      updates_per_second: of the learner alone; tells how many actor hosts it can use.
    Raises: DeployError when a rate is no positive number, or a price is missing.
    """
    for name, rate in {"--frames-per-second": frames_per_second, "--updates-per-second": updates_per_second}.items():
        if rate is not None and not 0 < rate < float("inf"):
            raise DeployError(f"{name} {rate:g}: a positive number is needed")
    rows, total = hourly_prices(cluster), hourly_total(cluster)
    sums = {"an hour": total, f"until the time limit of {cluster.max_hours} h": total * cluster.max_hours}
    if frames_per_second:
        hours = FRAMES / frames_per_second / 3600
        sums[f"200M frames at {frames_per_second:g} frames/s: {hours:.1f} h"] = total * hours
    width = max(map(len, rows | sums)) + 2
    planned = f"{cluster.spot_hosts} of {cluster.actor_hosts} actor hosts on spot"
    lines = [
        f"{cluster.name}: {table()['currency']}, prices of {table()['region']}, {table()['compiled']}",
        f"{'':{width}}{'on demand':>12}   {planned}",
        *(_line(name, price, width) + ("" if price.is_certain else " *") for name, price in rows.items()),
        "-" * (width + 12),
        *(_line(name, price, width) for name, price in sums.items()),
    ]
    if not total.is_certain:
        lines.append("* from memory: look it up before you rely on it (sources: prices.json)")
    if cluster.region != table()["region"]:
        lines.append(f"{cluster.region} is not in the table: its prices differ")
    if not frames_per_second:
        lines.append("for the price of 200M frames: --frames-per-second, as measured on such a cluster")
    journal = other_price("gp3_gib_month") * cluster.replay_volume_gib + journal_throughput()
    lines.append(f"after the time limit, until terraform destroy: the journal's volume, {journal.high:.2f} a month")
    lines.append("not counted: S3, CloudWatch logs and alarms, the images' snapshots, traffic out of the region")
    if updates_per_second is not None:
        lines.append(hosts_of_learner(cluster, updates_per_second))
    return lines


def _line(name: str, price: Price, width: int) -> str:
    low, high = f"{price.low:.2f}", f"{price.high:.2f}"
    return f"{name:{width}}{price.on_demand:>12.2f}   {low if low == high else f'{low} to {high}'}"
