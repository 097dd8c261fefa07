"""The price of a cluster: an hour, until its time limit, and for 200 million frames, by the dated table prices.json.

It sends no request.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

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


class Row(NamedTuple):
    """Dollars an hour: with everything on demand, and as planned, at the lowest and at the highest spot price."""

    name: str
    on_demand: float
    low: float
    high: float
    is_certain: bool = True


def read_prices() -> dict[str, Any]:
    """Returns the price table."""
    return dict(json.loads(PRICES.read_text(encoding="utf-8")))


def price_of(prices: dict[str, Any], instance_type: str, kind: str) -> tuple[list[float], bool]:
    """Returns the numbers of one price, and whether they were looked up (else they are from memory).

    Raises: DeployError when the table lacks the price.
    """
    entry = prices["instances"].get(instance_type, {})
    if kind not in entry:
        raise DeployError(f"no {kind} price of {instance_type}: add it to {PRICES}, with its source, or choose another")
    *numbers, source = entry[kind]
    return numbers, source in CERTAIN


def hourly_rows(cluster: Cluster, prices: dict[str, Any]) -> list[Row]:
    """Returns the items that cost money by the hour.

    Raises: DeployError when a price is missing.
    """
    (each,), is_certain = price_of(prices, cluster.replay_instance_type, "on_demand")
    rows = [Row(f"replay: 1 x {cluster.replay_instance_type}", each, each, each, is_certain)]
    rows += [_learners(cluster, prices), _actors(cluster, prices)]
    gibibytes = cluster.replay_volume_gib + cluster.learner_hosts * cluster.learner_volume_gib
    gibibytes += (1 + cluster.actor_hosts) * int(packer_default("cpu_volume_gib"))  # their own disk is their image
    per_month, source = prices["gp3_gib_month"]
    per_megabyte, _ = prices["gp3_mbps_month"]
    disks = (gibibytes * per_month + JOURNAL_MEGABYTES_PER_SECOND * per_megabyte) / HOURS_A_MONTH
    rows.append(Row(f"volumes: {gibibytes} GiB gp3", disks, disks, disks, source in CERTAIN))
    per_hour, source = prices["public_ipv4_hour"]
    count = 1 + cluster.learner_hosts + cluster.actor_hosts
    addresses = count * per_hour
    rows.append(Row(f"addresses: {count} public IPv4", addresses, addresses, addresses, source in CERTAIN))
    return rows


def _learners(cluster: Cluster, prices: dict[str, Any]) -> Row:
    """Returns the learners' row. Their groups take the first type, another one only where EC2 has none of it."""
    types, hosts = cluster.learner_instance_types, cluster.learner_hosts
    found = [price_of(prices, name, "on_demand") for name in types]
    each = [hosts * number for (number,), _ in found]
    is_certain = all(certain for _, certain in found)
    return Row(f"learner: {hosts} x {_first_of(types)}", each[0], min(each), max(each), is_certain)


def _first_of(types: tuple[str, ...]) -> str:
    return types[0] + (f" (or {', '.join(types[1:])})" if types[1:] else "")


def _actors(cluster: Cluster, prices: dict[str, Any]) -> Row:
    """Returns the actors' row. The group takes the first type on demand; on spot, any type with spare capacity."""
    first = cluster.actor_instance_types[0]
    (each,), is_certain = price_of(prices, first, "on_demand")
    low = high = cluster.actor_on_demand_hosts * each
    if cluster.spot_hosts:
        spots = [price_of(prices, name, "spot") for name in cluster.actor_instance_types]
        low += cluster.spot_hosts * min(numbers[0] for numbers, _ in spots)
        high += cluster.spot_hosts * max(numbers[1] for numbers, _ in spots)
        is_certain = is_certain and all(certain for _, certain in spots)
    name = f"actors: {cluster.actor_hosts} x {_first_of(cluster.actor_instance_types)}"
    return Row(name, cluster.actor_hosts * each, low, high, is_certain)


def learning_of(cluster: Cluster) -> dict[str, float]:
    """Returns the transitions of an update and the samples of a transition, by the plan's flags or its preset.

    Raises: DeployError when they are not known of the plan's agent and preset, or a flag is no number.
    """
    by_preset = json.loads(LIMITS.read_text(encoding="utf-8"))["learning"].get(cluster.agent, {})
    if cluster.preset not in by_preset:
        raise DeployError(
            f"--updates-per-second: how many transitions a learner of agent {cluster.agent} and preset "
            f"{cluster.preset} takes is not known; leave it out"
        )
    flags = dict(cluster.learner_flags + cluster.replay_flags)
    try:
        return {name: float(flags.get(name, number)) for name, number in by_preset[cluster.preset].items()}
    except ValueError as error:
        raise DeployError(f"batch_size and samples_per_insert of the plan have to be numbers: {error}") from error


def hosts_of_learner(cluster: Cluster, prices: dict[str, Any], updates_per_second: float) -> str:
    """Returns how many actor hosts keep a learner busy; more of them only wait for it.

    Raises: DeployError when the table lacks the type of the actors, or `learning_of` knows too little.
    """
    name, learning = cluster.actor_instance_types[0], learning_of(cluster)
    if name not in prices["instances"]:
        raise DeployError(f"no {name} in {PRICES}: add it, with its source, or choose another")
    steps_per_second = updates_per_second * learning["batch_size"] / learning["samples_per_insert"]
    hosts = steps_per_second / (prices["instances"][name]["vcpus"] * STEPS_A_VCPU)
    return (
        f"a learner of {updates_per_second:g} updates/s of {learning['batch_size']:g} takes {steps_per_second:,.0f} "
        f"transitions/s at {learning['samples_per_insert']:g} samples an insert: {hosts:.1f} hosts of {name} make "
        f"them, if a vCPU makes {STEPS_A_VCPU:,} (docs/benchmarks.md); the plan has {cluster.actor_hosts}"
    )


def total_of(rows: list[Row]) -> Row:
    """Returns the sum of an hour."""
    return Row("an hour", sum(row.on_demand for row in rows), sum(row.low for row in rows), sum(r.high for r in rows))


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
    prices = read_prices()
    rows = hourly_rows(cluster, prices)
    total = total_of(rows)
    sums = [total, _times(total, cluster.max_hours, f"until the time limit of {cluster.max_hours} h")]
    if frames_per_second:
        hours = FRAMES / frames_per_second / 3600
        sums.append(_times(total, hours, f"200M frames at {frames_per_second:g} frames/s: {hours:.1f} h"))
    width = max(len(row.name) for row in [*rows, *sums]) + 2
    planned = f"{cluster.spot_hosts} of {cluster.actor_hosts} actor hosts on spot"
    lines = [
        f"{cluster.name}: {prices['currency']}, prices of {prices['region']}, {prices['compiled']}",
        f"{'':{width}}{'on demand':>12}   {planned}",
        *(_line(row, width) for row in rows),
        "-" * (width + 12),
        *(_line(row, width) for row in sums),
    ]
    if not all(row.is_certain for row in rows):
        lines.append("* from memory: look it up before you rely on it (sources: prices.json)")
    if cluster.region != prices["region"]:
        lines.append(f"{cluster.region} is not in the table: its prices differ")
    if not frames_per_second:
        lines.append("for the price of 200M frames: --frames-per-second, as measured on such a cluster")
    journal = cluster.replay_volume_gib * prices["gp3_gib_month"][0]
    journal += JOURNAL_MEGABYTES_PER_SECOND * prices["gp3_mbps_month"][0]
    lines.append(f"after the time limit, until terraform destroy: the journal's volume, {journal:.2f} a month")
    lines.append("not counted: S3, CloudWatch logs and alarms, the images' snapshots, traffic out of the region")
    if updates_per_second is not None:
        lines.append(hosts_of_learner(cluster, prices, updates_per_second))
    return lines


def _times(row: Row, factor: float, name: str) -> Row:
    return Row(name, row.on_demand * factor, row.low * factor, row.high * factor)


def _line(row: Row, width: int) -> str:
    planned = f"{row.low:.2f}" if f"{row.low:.2f}" == f"{row.high:.2f}" else f"{row.low:.2f} to {row.high:.2f}"
    return f"{row.name:{width}}{row.on_demand:>12.2f}   {planned}{'' if row.is_certain else ' *'}"
