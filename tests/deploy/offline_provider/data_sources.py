"""Data sources of an imaginary account: instance types and zones as AWS had them (moto ships its answers).

The account has images of several versions; which, depends on the region (IMAGES). A filter that is not known here is
refused.
"""

import fnmatch
import functools
import gzip
import json
from collections.abc import Callable
from importlib import resources
from typing import Any, NamedTuple

ACCOUNT = "123456789012"


class NotFoundError(Exception):
    """AWS has no such thing."""


class Image(NamedTuple):
    """A machine image of the account."""

    ami: str
    role: str
    version: str
    created: str
    gib: int
    architecture: str = "x86_64"

    @property
    def facts(self) -> dict[str, str]:
        """The facts that filters of images look at."""
        tags = {"tag:Project": "apexrl", "tag:Role": self.role, "tag:Version": self.version}
        return tags | {"state": "available", "image-id": self.ami, "architecture": self.architecture}

    @property
    def attributes(self) -> dict[str, Any]:
        """The data source's attributes."""
        disk = {"volume_size": str(self.gib), "volume_type": "gp3", "encrypted": "true"}
        return {
            "id": self.ami,
            "image_id": self.ami,
            "name": f"apexrl-{self.role}-{self.version}",
            "architecture": self.architecture,
            "creation_date": self.created,
            "root_device_name": "/dev/sda1",
            "block_device_mappings": [{"device_name": "/dev/sda1", "ebs": disk, "no_device": "", "virtual_name": ""}],
            "tags": {"Project": "apexrl", "Role": self.role, "Version": self.version},
        }


OLD_CPU = Image("ami-0000000000000c090", "cpu", "0.9.0", "2026-01-01T00:00:00.000Z", 16)
OLD_GPU = Image("ami-0000000000000a090", "gpu", "0.9.0", "2026-01-01T00:00:00.000Z", 90)
CPU = Image("ami-0000000000000c100", "cpu", "1.0.0", "2026-02-01T00:00:00.000Z", 16)
GPU = Image("ami-0000000000000a100", "gpu", "1.0.0", "2026-02-01T00:00:00.000Z", 90)
BASE_CPU, BASE_GPU = "ami-0000000000000cba5", "ami-0000000000000aba5"
IMAGES = {
    "us-east-1": (OLD_CPU, CPU, OLD_GPU, GPU),
    "eu-west-1": (CPU, GPU),
    "us-east-2": (OLD_CPU, OLD_GPU, CPU),  # the newest are of different versions
    "us-west-2": (),
}


def read(name: str, config: dict[str, Any], region: str) -> dict[str, Any]:
    """Returns the attributes that a data source finds.

    Raises: NotFoundError as the real provider ends with an error.
    """
    return READERS[name](config, region)


def _matches(config: dict[str, Any], facts: Callable[[str], str]) -> bool:
    """Returns whether all filters of a data source let something through; `*` stands for anything, as in EC2."""
    return all(
        any(fnmatch.fnmatchcase(facts(entry["name"]), value) for value in entry["values"])
        for entry in config.get("filter") or []
    )


def _image_ids(config: dict[str, Any], region: str) -> dict[str, Any]:
    found = [image for image in IMAGES.get(region, ()) if _matches(config, image.facts.__getitem__)]
    found.sort(key=lambda image: image.created, reverse=not config["sort_ascending"])
    return {"id": "images", "ids": [image.ami for image in found]}


def _image(config: dict[str, Any], region: str) -> dict[str, Any]:
    found = [image for image in IMAGES.get(region, ()) if _matches(config, image.facts.__getitem__)]
    if not found:
        raise NotFoundError("Your query returned no results. Please change your search criteria and try again.")
    if len(found) > 1 and not config["most_recent"]:
        raise NotFoundError("Your query returned more than one result.")
    return max(found, key=lambda image: image.created).attributes


@functools.cache
def _table(*path: str) -> Any:
    with resources.files("moto.ec2").joinpath("resources", *path).open("rb") as packed:
        return json.loads(gzip.decompress(packed.read()))


@functools.cache
def instance_types() -> dict[str, dict[str, Any]]:
    """Returns EC2's description of each instance type."""
    return _table("instance_types.json.gz")


@functools.cache
def offerings(region: str) -> tuple[tuple[str, str], ...]:
    """Returns (instance type, zone) of all that a region offers."""
    rows = _table("instance_type_offerings", "availability-zone", f"{region}.json.gz")
    return tuple((row["InstanceType"], row["Location"]) for row in rows)


def _instance_type(config: dict[str, Any], region: str) -> dict[str, Any]:
    name = config["instance_type"]
    if name not in {offered for offered, _ in offerings(region)}:
        raise NotFoundError(f"no matching EC2 Instance Type found: {name}")
    facts = instance_types()[name]
    gpus = [
        {
            "count": gpu["Count"],
            "manufacturer": gpu["Manufacturer"],
            "memory_size": gpu.get("MemoryInfo", {}).get("SizeInMiB", 0),
            "name": gpu["Name"],
        }
        for gpu in facts.get("GpuInfo", {}).get("Gpus", [])
    ]
    return {
        "id": name,
        "default_vcpus": facts["VCpuInfo"]["DefaultVCpus"],
        "memory_size": facts["MemoryInfo"]["SizeInMiB"],
        "supported_architectures": facts["ProcessorInfo"]["SupportedArchitectures"],
        "supported_placement_strategies": facts["PlacementGroupInfo"]["SupportedStrategies"],
        "supported_usages_classes": facts["SupportedUsageClasses"],
        "gpus": gpus,
    }


def _offerings(config: dict[str, Any], region: str) -> dict[str, Any]:
    found = [row for row in offerings(region) if _matches(config, {"instance-type": row[0], "location": row[1]}.get)]
    return {
        "id": region,
        "instance_types": [name for name, _ in found],
        "locations": [zone for _, zone in found],
        "location_types": ["availability-zone"] * len(found),
    }


def _zones(config: dict[str, Any], region: str) -> dict[str, Any]:
    facts = {"opt-in-status": "opt-in-not-required", "region-name": region}
    zones = sorted({zone for _, zone in offerings(region)}) if _matches(config, facts.__getitem__) else []
    return {"id": region, "names": zones}


def _bucket(config: dict[str, Any], _: str) -> dict[str, Any]:
    """Buckets of the account are those that bootstrap makes, in the region that their name ends with."""
    name = config["bucket"]
    start = f"apexrl-results-{ACCOUNT}-"
    if not name.startswith(start):
        raise NotFoundError(f"reading S3 Bucket ({name}): couldn't find resource")
    return {"id": name, "arn": f"arn:aws:s3:::{name}", "bucket_region": name.removeprefix(start)}


def _parameter(config: dict[str, Any], _: str) -> dict[str, Any]:
    """Public parameters are those that name a base image."""
    name = config["name"]
    if not name.startswith("/aws/service/") or not name.endswith("/ami-id"):
        raise NotFoundError(f"couldn't find resource: {name}")
    image = BASE_GPU if "nvidia" in name else BASE_CPU
    return {"id": name, "value": image, "insecure_value": image, "type": "String", "version": 1}


def _partition(_: dict[str, Any], region: str) -> dict[str, Any]:
    partition = "aws-us-gov" if region.startswith("us-gov-") else "aws"
    return {"id": partition, "partition": partition, "dns_suffix": "amazonaws.com"}


SUBNETS = {  # zone, addresses, and whether its hosts get public ones
    "subnet-0a": ("us-east-1a", "172.31.0.0/20", True),
    "subnet-0b": ("us-east-1b", "172.31.16.0/20", False),
    "subnet-0c": ("us-east-1a", "172.31.32.0/20", False),
}


def _subnet(config: dict[str, Any], _: str) -> dict[str, Any]:
    name = config["id"]
    if name not in SUBNETS:
        raise NotFoundError(f"no matching EC2 Subnet found: {name}")
    zone, addresses, is_public = SUBNETS[name]
    found = {"id": name, "vpc_id": "vpc-0e", "availability_zone": zone, "cidr_block": addresses}
    return found | {"map_public_ip_on_launch": is_public}


READERS: dict[str, Callable[[dict[str, Any], str], dict[str, Any]]] = {
    "aws_ami": _image,
    "aws_ami_ids": _image_ids,
    "aws_availability_zones": _zones,
    "aws_caller_identity": lambda _, __: {"id": ACCOUNT, "account_id": ACCOUNT},
    "aws_ec2_instance_type": _instance_type,
    "aws_ec2_instance_type_offerings": _offerings,
    "aws_internet_gateway": lambda config, _: {"id": f"igw-of-{config['filter'][0]['values'][0]}"},
    "aws_partition": _partition,
    "aws_s3_bucket": _bucket,
    "aws_ssm_parameter": _parameter,
    "aws_subnet": _subnet,
}
