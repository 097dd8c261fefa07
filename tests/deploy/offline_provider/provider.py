"""The provider's side of Terraform's plugin protocol 6."""

import hashlib
import json
from collections.abc import Callable
from typing import Any

import msgpack

from tests.deploy.offline_provider import data_sources
from tests.deploy.offline_provider.aws_values import find_faults
from tests.deploy.offline_provider.protocol import message
from tests.deploy.offline_provider.schema import KINDS, Block

UNKNOWN = msgpack.ExtType(0, b"\x00")
NESTING = {"single": 1, "list": 2, "set": 3, "map": 4}
NAMED = {  # types whose id is the name that they were given
    *("aws_autoscaling_group", "aws_autoscaling_schedule", "aws_cloudwatch_log_group", "aws_iam_instance_profile"),
    *("aws_iam_role", "aws_placement_group", "aws_scheduler_schedule", "aws_ssm_parameter"),
}
PREFIXES = {
    "aws_ebs_volume": "vol-",
    "aws_instance": "i-",
    "aws_internet_gateway": "igw-",
    "aws_launch_template": "lt-",
    "aws_route_table": "rtb-",
    "aws_security_group": "sg-",
    "aws_subnet": "subnet-",
    "aws_vpc": "vpc-",
    "aws_vpc_endpoint": "vpce-",
}
ARNS = {
    "aws_iam_role": "iam::{account}:role/{id}",
    "aws_iam_instance_profile": "iam::{account}:instance-profile/{id}",
    "aws_cloudwatch_log_group": "logs:{region}:{account}:log-group:{id}",
    "aws_s3_bucket": "s3:::{id}",
    "aws_instance": "ec2:{region}:{account}:instance/{id}",
}
REPLACED_BY: dict[str, tuple[str, ...]] = {
    "aws_instance": ("ami", "subnet_id", "private_ip", "placement_group", "associate_public_ip_address", "user_data"),
    "aws_ebs_volume": ("availability_zone", "encrypted"),
    "aws_volume_attachment": ("device_name", "instance_id", "volume_id"),
    "aws_ssm_parameter": ("name",),
    "aws_subnet": ("cidr_block", "availability_zone", "vpc_id"),
    "aws_vpc": ("cidr_block",),
    "aws_security_group": ("name", "description", "vpc_id"),
    "aws_iam_role": ("name",),
    "aws_launch_template": ("name",),
    "aws_s3_bucket": ("bucket",),
}
"""Changes that replace a resource, of those that our plans can hold; user_data as user_data_replace_on_change says."""


def decode(value: Any) -> Any:
    """Returns a value of the protocol as plain data; a value that is not known yet as ExtType."""
    if value.msgpack:
        return msgpack.unpackb(value.msgpack, ext_hook=msgpack.ExtType, strict_map_key=False)
    return json.loads(value.json) if value.json else None


def encode(value: Any) -> Any:
    """Returns plain data as a value of the protocol."""
    return message("DynamicValue", msgpack=msgpack.packb(value))


def errors(problems: list[str]) -> list[Any]:
    """Returns errors for the user."""
    return [message("Diagnostic", severity=1, summary=problem) for problem in problems]


def to_message(block: Block) -> Any:
    """Returns a block of the schema in the protocol's form."""
    attributes = [
        message("Attribute", name=name, type=json.dumps(attribute["type"]).encode(), **_flags(attribute))
        for name, attribute in block.get("attributes", {}).items()
    ]
    blocks = [
        message(
            "NestedBlock",
            type_name=name,
            block=to_message(nested["block"]),
            nesting=NESTING[nested["nesting_mode"]],
            min_items=nested.get("min_items", 0),
            max_items=nested.get("max_items", 0),
        )
        for name, nested in block.get("block_types", {}).items()
    ]
    return message("Block", attributes=attributes, block_types=blocks)


def _flags(attribute: dict[str, Any]) -> dict[str, bool]:
    return {flag: True for flag in ("required", "optional", "computed") if attribute.get(flag)}


def replace_nulls(block: Block, value: dict[str, Any], by: Any = UNKNOWN) -> None:
    """Sets computed attributes that are null, at any depth."""
    for name, attribute in block.get("attributes", {}).items():
        if attribute.get("computed") and value.get(name) is None:
            value[name] = by
    for name, nested in block.get("block_types", {}).items():
        for item in items_of(value.get(name), nested["nesting_mode"]):
            replace_nulls(nested["block"], item, by)


def items_of(value: Any, nesting: str) -> list[dict[str, Any]]:
    """Returns the known blocks in the value of a nested block."""
    if value is None or isinstance(value, msgpack.ExtType):
        return []
    items = value if nesting in ("list", "set") else value.values() if nesting == "map" else [value]
    return [item for item in items if isinstance(item, dict)]


def replace_unknowns(value: Any) -> Any:
    """Returns a value with null for what nobody has said how to make up."""
    if isinstance(value, msgpack.ExtType):
        return None
    if isinstance(value, dict):
        return {name: replace_unknowns(item) for name, item in value.items()}
    return [replace_unknowns(item) for item in value] if isinstance(value, list) else value


class Provider:
    """Answers Terraform. Its only state is the configuration of the provider."""

    def __init__(self, schema: dict[str, Any]):
        self._schema = schema
        self._region = ""
        self._default_tags: dict[str, str] = {}

    def answers(self) -> dict[str, Callable[[Any], Any]]:
        """Returns what answers each method of the protocol."""
        return {
            "GetProviderSchema": self._get_schema,
            "ValidateProviderConfig": lambda _: message("ValidateProviderConfigResponse"),
            "ConfigureProvider": self._configure,
            "ValidateResourceConfig": self._validate_resource,
            "ValidateDataResourceConfig": self._validate_data,
            "UpgradeResourceState": self._upgrade,
            "ReadResource": self._read,
            "PlanResourceChange": self._plan,
            "ApplyResourceChange": self._apply,
            "ReadDataSource": self._read_data,
            "StopProvider": lambda _: message("StopProviderResponse"),
        }

    def _get_schema(self, _: Any) -> Any:
        entries = {
            kind: [message("SchemaEntry", key=name, value=self._as_schema(made)) for name, made in found.items()]
            for kind, found in self._schema.items()
            if kind in KINDS.values()
        }
        return message("GetProviderSchemaResponse", provider=self._as_schema(self._schema["provider"]), **entries)

    @staticmethod
    def _as_schema(schema: dict[str, Any]) -> Any:
        return message("Schema", block=to_message(schema["block"]))

    def _configure(self, request: Any) -> Any:
        config = decode(request.config)
        tags = [entry["tags"] for entry in config["default_tags"] or [] if isinstance(entry["tags"], dict)]
        self._region, self._default_tags = config["region"], tags[0] if tags else {}
        return message("ConfigureProviderResponse")

    def _validate_resource(self, request: Any) -> Any:
        faults = list(find_faults(request.type_name, decode(request.config)))
        return message("ValidateResourceConfigResponse", diagnostics=errors(faults))

    def _validate_data(self, request: Any) -> Any:
        faults = list(find_faults(f"data.{request.type_name}", decode(request.config)))
        return message("ValidateDataResourceConfigResponse", diagnostics=errors(faults))

    def _upgrade(self, request: Any) -> Any:
        return message("UpgradeResourceStateResponse", upgraded_state=encode(json.loads(request.raw_state.json)))

    def _read(self, request: Any) -> Any:
        """Returns the state as it is; like the real provider without its default tags among the tags of a disk."""
        state = decode(request.current_state) or {}
        for disk in state.get("root_block_device") or []:
            if disk["tags"]:
                own = disk["tags"].items() - self._default_tags.items()
                disk["tags"] = dict(own)
        return message("ReadResourceResponse", new_state=encode(state) if state else request.current_state)

    def _plan(self, request: Any) -> Any:
        planned, prior = decode(request.proposed_new_state), decode(request.prior_state)
        if planned is None:
            return message("PlanResourceChangeResponse", planned_state=encode(None))
        faults = list(find_faults(request.type_name, decode(request.config)))
        if prior is None:
            replace_nulls(self._schema["resource_schemas"][request.type_name]["block"], planned)
        elif request.type_name == "aws_launch_template" and planned != prior:
            planned["latest_version"] = UNKNOWN
        if "tags_all" in planned:
            own = planned.get("tags")
            planned["tags_all"] = own if isinstance(own, msgpack.ExtType) else self._default_tags | (own or {})
        return message(
            "PlanResourceChangeResponse",
            planned_state=encode(planned),
            requires_replace=[
                message("AttributePath", steps=[message("Step", attribute_name=name)])
                for name in replacing(request.type_name, prior, planned)
            ],
            diagnostics=errors(faults),
        )

    def _apply(self, request: Any) -> Any:
        made = decode(request.planned_state)
        if made is None:
            return message("ApplyResourceChangeResponse", new_state=encode(None))
        faults = list(find_faults(request.type_name, decode(request.config)))
        self._make_up(request.type_name, made, decode(request.prior_state) or {})
        state = encode(replace_unknowns(made))
        return message("ApplyResourceChangeResponse", new_state=state, diagnostics=errors(faults))

    def _make_up(self, name: str, made: dict[str, Any], prior: dict[str, Any]) -> None:
        """Sets what AWS would have chosen, as far as a configuration can use it."""
        words = json.dumps(replace_unknowns(made), sort_keys=True)
        digest = hashlib.sha256(f"{name} {words}".encode()).hexdigest()
        chosen = {
            "id": made.get("name" if name in NAMED else "bucket") or PREFIXES.get(name, f"{name}-") + digest[:17],
            "latest_version": prior.get("latest_version", 0) + 1,
            "public_ip": f"198.51.100.{int(digest[:2], 16)}",
            "region": self._region,
        }
        for attribute, value in chosen.items():
            if isinstance(made.get(attribute), msgpack.ExtType):
                made[attribute] = value
        if isinstance(made.get("arn"), msgpack.ExtType) and name in ARNS:
            tail = ARNS[name].format(account=data_sources.ACCOUNT, region=self._region, id=made["id"])
            made["arn"] = f"arn:aws:{tail}"

    def _read_data(self, request: Any) -> Any:
        config = decode(request.config)
        try:
            found = data_sources.read(request.type_name, config, self._region)
        except data_sources.NotFoundError as error:
            return message("ReadDataSourceResponse", diagnostics=errors([str(error)]))
        known = self._schema["data_source_schemas"][request.type_name]["block"]["attributes"]
        assert found.keys() <= known.keys(), f"hashicorp/aws knows no {found.keys() - known.keys()}"
        here = {"region": self._region} if "region" in known else {}
        return message("ReadDataSourceResponse", state=encode(config | here | found))


def replacing(name: str, prior: dict[str, Any] | None, planned: dict[str, Any]) -> list[str]:
    """Returns the changed attributes for which a resource is made anew."""
    if prior is None:
        return []
    changed = [attribute for attribute in REPLACED_BY.get(name, ()) if planned[attribute] != prior[attribute]]
    return [one for one in changed if one != "user_data" or planned["user_data_replace_on_change"]]
