"""The values that AWS takes for an argument: those that botocore lists in the call by which the resource is made.

An argument of Terraform has the name of the member of the call, wherever in it that stands.
"""

import functools
from collections.abc import Iterator
from typing import Any

import botocore.session
from botocore import xform_name

CALLS = {
    "aws_autoscaling_group": ("autoscaling", "CreateAutoScalingGroup"),
    "aws_budgets_budget": ("budgets", "CreateBudget"),
    "aws_cloudwatch_metric_alarm": ("cloudwatch", "PutMetricAlarm"),
    "aws_ebs_volume": ("ec2", "CreateVolume"),
    "aws_ec2_subnet_cidr_reservation": ("ec2", "CreateSubnetCidrReservation"),
    "aws_instance": ("ec2", "RunInstances"),
    "aws_launch_template": ("ec2", "CreateLaunchTemplate"),
    "aws_placement_group": ("ec2", "CreatePlacementGroup"),
    "aws_s3_bucket_lifecycle_configuration": ("s3", "PutBucketLifecycleConfiguration"),
    "aws_s3_bucket_ownership_controls": ("s3", "PutBucketOwnershipControls"),
    "aws_s3_bucket_server_side_encryption_configuration": ("s3", "PutBucketEncryption"),
    "aws_s3_bucket_versioning": ("s3", "PutBucketVersioning"),
    "aws_scheduler_schedule": ("scheduler", "CreateSchedule"),
    "aws_ssm_parameter": ("ssm", "PutParameter"),
    "aws_vpc_endpoint": ("ec2", "CreateVpcEndpoint"),
    "data.aws_ec2_instance_type": ("ec2", "DescribeInstanceTypes"),
    "data.aws_ec2_instance_type_offerings": ("ec2", "DescribeInstanceTypeOfferings"),
}


def find_faults(name: str, config: dict[str, Any]) -> Iterator[str]:
    """Yields what AWS would refuse in the configuration of a type; values that are not known yet pass.

    Args:
      name: the type, with `data.` before it for a data source.
    """
    allowed = _allowed(*CALLS[name]) if name in CALLS else {}
    for argument, value in _texts(config):
        if value not in allowed.get(argument, {value}):
            some = sorted(allowed[argument])
            listed = ", ".join(some if len(some) < 30 else [*some[:10], f"... ({len(some)} in all)"])
            yield f"{argument} = {value!r}: has to be one of {listed}"


def _texts(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yields the texts of a configuration with the names of their arguments."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _texts(item, key)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item, name)
    elif isinstance(value, str):
        yield name, value


@functools.cache
def _allowed(service: str, operation: str) -> dict[str, set[str]]:
    """Returns the values of a call's members that have a list of them, by Terraform's names."""
    found: dict[str, set[str]] = {}
    model = botocore.session.get_session().get_service_model(service)
    shapes, seen = [model.operation_model(operation).input_shape], set()
    while shapes:
        shape = shapes.pop()
        if shape.name in seen:
            continue
        seen.add(shape.name)
        members = {"": shape.member} if shape.type_name == "list" else getattr(shape, "members", {})
        for name, member in members.items():
            found.setdefault(xform_name(name), set()).update(member.metadata.get("enum", ()))
            shapes.append(member)
    return {name: values for name, values in found.items() if name and values}
