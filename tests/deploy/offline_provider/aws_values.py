"""Which values AWS takes for an argument, by botocore's descriptions, and what the real provider refuses by itself."""

import base64
import functools
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import botocore.session
import msgpack


class Shape(NamedTuple):
    """A text in botocore's description of a service: a list of values, or a pattern and lengths."""

    service: str
    shape: str


PROTOCOLS = ("tcp", "udp", "icmp", "icmpv6", "-1")
GROUP_TEXT = re.compile(r"[\w. \-:/()#,@\[\]+=&;{}!$*]{0,255}", re.A)  # no apostrophes: EC2 refuses them
AT_TIME = re.compile(r"at\(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\)")
DURATION = re.compile(r"0|\d+[smh]")
UTC_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")
POLICY = ("JSON",)
BOOL_TEXT = ("true", "false")
DAYS = "0 1 3 5 7 14 30 60 90 120 150 180 365 400 545 731 1096 1827 2192 2557 2922 3288 3653"
RETENTION_DAYS = tuple(map(int, DAYS.split()))

Rule = Shape | tuple[Any, ...] | re.Pattern[str]

HOST: dict[str, Rule] = {
    "instance_type": Shape("ec2", "InstanceType"),
    "instance_initiated_shutdown_behavior": Shape("ec2", "ShutdownBehavior"),
    "metadata_options.http_endpoint": Shape("ec2", "InstanceMetadataEndpointState"),
    "metadata_options.http_tokens": Shape("ec2", "HttpTokensState"),
    "metadata_options.http_put_response_hop_limit": tuple(range(1, 65)),
    "metadata_options.instance_metadata_tags": Shape("ec2", "InstanceMetadataTagsState"),
}
GROUP_RULE: dict[str, Rule] = {
    "ip_protocol": PROTOCOLS,
    "description": GROUP_TEXT,
    "from_port": tuple(range(-1, 65536)),
    "to_port": tuple(range(-1, 65536)),
}
VALUES: dict[str, dict[str, Rule]] = {
    "aws_instance": HOST | {"root_block_device.volume_type": Shape("ec2", "VolumeType")},
    "aws_launch_template": HOST
    | {
        "name": Shape("ec2", "LaunchTemplateName"),
        "description": Shape("ec2", "VersionDescription"),
        "block_device_mappings.ebs.volume_type": Shape("ec2", "VolumeType"),
        "block_device_mappings.ebs.encrypted": BOOL_TEXT,
        "block_device_mappings.ebs.delete_on_termination": BOOL_TEXT,
        "ebs_optimized": BOOL_TEXT,
        "network_interfaces.associate_public_ip_address": BOOL_TEXT,
        "network_interfaces.delete_on_termination": BOOL_TEXT,
        "tag_specifications.resource_type": Shape("ec2", "ResourceType"),
    },
    "aws_autoscaling_group": {
        "health_check_type": ("EC2", "ELB", "VPC_LATTICE", "EBS"),
        "instance_refresh.strategy": Shape("autoscaling", "RefreshStrategy"),
        "timeouts.delete": DURATION,
        "wait_for_capacity_timeout": DURATION,
        "mixed_instances_policy.instances_distribution.on_demand_allocation_strategy": ("lowest-price", "prioritized"),
        "mixed_instances_policy.instances_distribution.spot_allocation_strategy": (
            *("lowest-price", "capacity-optimized", "capacity-optimized-prioritized", "price-capacity-optimized"),
        ),
        "mixed_instances_policy.launch_template.override.instance_type": Shape("ec2", "InstanceType"),
    },
    "aws_ebs_volume": {"type": Shape("ec2", "VolumeType")},
    "aws_ssm_parameter": {"name": Shape("ssm", "PSParameterName"), "type": Shape("ssm", "ParameterType")},
    "aws_cloudwatch_metric_alarm": {
        "comparison_operator": Shape("cloudwatch", "ComparisonOperator"),
        "statistic": Shape("cloudwatch", "Statistic"),
        "namespace": ("AWS/EC2",),
        "metric_name": ("StatusCheckFailed_Instance",),
        "alarm_actions": re.compile(r"arn:aws:automate:[a-z0-9-]+:ec2:(reboot|recover|stop|terminate)"),
    },
    "aws_ec2_subnet_cidr_reservation": {"reservation_type": Shape("ec2", "SubnetCidrReservationType")},
    "aws_autoscaling_schedule": {"start_time": UTC_TIME},
    "aws_scheduler_schedule": {
        "name": Shape("scheduler", "Name"),
        "description": Shape("scheduler", "Description"),
        "schedule_expression": AT_TIME,
        "schedule_expression_timezone": ("UTC",),
        "action_after_completion": Shape("scheduler", "ActionAfterCompletion"),
        "flexible_time_window.mode": Shape("scheduler", "FlexibleTimeWindowMode"),
        "target.input": POLICY,
    },
    "aws_placement_group": {"strategy": Shape("ec2", "PlacementStrategy")},
    "aws_vpc_endpoint": {"vpc_endpoint_type": Shape("ec2", "VpcEndpointType")},
    "aws_security_group": {"description": GROUP_TEXT},
    "aws_vpc_security_group_ingress_rule": GROUP_RULE,
    "aws_vpc_security_group_egress_rule": GROUP_RULE,
    "aws_iam_role": {
        "name": Shape("iam", "roleNameType"),
        "description": Shape("iam", "roleDescriptionType"),
        "assume_role_policy": POLICY,
    },
    "aws_iam_role_policy": {"name": Shape("iam", "policyNameType"), "policy": POLICY},
    "aws_iam_instance_profile": {"name": Shape("iam", "instanceProfileNameType")},
    "aws_cloudwatch_log_group": {
        "name": Shape("logs", "LogGroupName"),
        "retention_in_days": RETENTION_DAYS,
    },
    "aws_s3_bucket": {"bucket": re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")},
    "aws_s3_bucket_ownership_controls": {"rule.object_ownership": Shape("s3", "ObjectOwnership")},
    "aws_s3_bucket_versioning": {"versioning_configuration.status": Shape("s3", "BucketVersioningStatus")},
    "aws_s3_bucket_server_side_encryption_configuration": {
        "rule.apply_server_side_encryption_by_default.sse_algorithm": Shape("s3", "ServerSideEncryption"),
    },
    "aws_s3_bucket_lifecycle_configuration": {"rule.status": Shape("s3", "ExpirationStatus")},
    "aws_s3_bucket_policy": {"policy": POLICY},
    "aws_budgets_budget": {
        "budget_type": Shape("budgets", "BudgetType"),
        "time_unit": Shape("budgets", "TimeUnit"),
        "limit_unit": ("USD",),
        "notification.comparison_operator": Shape("budgets", "ComparisonOperator"),
        "notification.notification_type": Shape("budgets", "NotificationType"),
        "notification.threshold_type": Shape("budgets", "ThresholdType"),
    },
    "data.aws_availability_zones": {"state": Shape("ec2", "AvailabilityZoneState")},
    "data.aws_ec2_instance_type": {"instance_type": Shape("ec2", "InstanceType")},
    "data.aws_ec2_instance_type_offerings": {"location_type": Shape("ec2", "LocationType")},
}
"""Values of arguments by the type and the path of the argument; numbers of list items are left out of the path."""

SOURCES = ("cidr_ipv4", "cidr_ipv6", "prefix_list_id", "referenced_security_group_id")
EXACTLY_ONE: dict[str, tuple[str, ...]] = {
    "aws_vpc_security_group_ingress_rule": SOURCES,
    "aws_vpc_security_group_egress_rule": SOURCES,
    "aws_autoscaling_group": ("launch_configuration", "launch_template", "mixed_instances_policy"),
}
AT_MOST_ONE: dict[str, tuple[str, ...]] = {
    "aws_instance": ("user_data", "user_data_base64"),
    "aws_launch_template": ("vpc_security_group_ids", "network_interfaces"),
    "aws_iam_role": ("name", "name_prefix"),
}
MOST_USER_DATA_BYTES = 16384


def find_faults(name: str, config: dict[str, Any]) -> Iterator[str]:
    """Yields what AWS or the real provider would refuse in the configuration of a type; unknown values pass.

    Args:
      name: the type, with `data.` before it for a data source.
    """
    for path, rule in VALUES.get(name, {}).items():
        for value in _values_at(config, path.split(".")):
            fault = _fault_of(rule, value)
            if fault:
                yield f"{path} = {value!r}: {fault}"
    for wanted, choices in ((EXACTLY_ONE, "exactly one"), (AT_MOST_ONE, "at most one")):
        given = [choice for choice in wanted.get(name, ()) if config.get(choice) not in (None, [])]
        if len(given) > 1 or (not given and wanted is EXACTLY_ONE and name in wanted):
            yield f"{choices} of {', '.join(wanted[name])} has to be given, not {', '.join(given) or 'none'}"
    if name in ("aws_instance", "aws_launch_template"):
        yield from _user_data_faults(name, config.get("user_data"))


def _user_data_faults(name: str, text: Any) -> Iterator[str]:
    if not isinstance(text, str):
        return
    data = text.encode()
    if name == "aws_launch_template":
        try:
            data = base64.b64decode(text, validate=True)
        except ValueError:
            yield "user_data: a launch template wants base64"
    if len(data) > MOST_USER_DATA_BYTES:
        yield f"user_data: {len(data)} bytes, EC2 takes {MOST_USER_DATA_BYTES}"


def _fault_of(rule: Rule, value: Any) -> str:
    if rule is POLICY:
        try:
            json.loads(value)
        except ValueError as error:
            return f"not JSON ({error})"
        return ""
    if isinstance(rule, Shape):
        return _shape_fault(_model(rule.service).shape_for(rule.shape), value)
    if isinstance(rule, re.Pattern):
        return "" if rule.fullmatch(value) else f"has to match {rule.pattern}"
    return "" if value in rule else f"has to be one of {_some(rule)}"


def _shape_fault(shape: Any, value: str) -> str:
    limits = shape.metadata
    if "enum" in limits and value not in limits["enum"]:
        return f"has to be one of {_some(limits['enum'])}"
    if not limits.get("min", 0) <= len(value) <= limits.get("max", len(value)):
        return f"has to have {limits.get('min', 0)} to {limits.get('max', 'any number of')} characters"
    if "pattern" in limits and not re.fullmatch(limits["pattern"], value, re.A):
        return f"has to match {limits['pattern']}"
    return ""


def _some(values: Iterable[Any]) -> str:
    texts = [str(value) for value in values]
    return ", ".join(texts if len(texts) < 30 else [*texts[:10], f"... ({len(texts)} in all)"])


def _values_at(config: Any, path: list[str]) -> Iterator[Any]:
    """Yields the known values at a path, through lists, sets and blocks."""
    if config is None or isinstance(config, msgpack.ExtType):
        return
    if isinstance(config, list):
        for item in config:
            yield from _values_at(item, path)
    elif path:
        yield from _values_at(config[path[0]], path[1:])
    else:
        yield config


@functools.cache
def _model(service: str) -> Any:
    return botocore.session.get_session().get_service_model(service)
