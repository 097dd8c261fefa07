"""Terraform's plugin protocol 6 (docs/plugin-protocol in Terraform's repository), as far as the provider speaks it.

The messages are built from the tables below. Fields that we neither read nor write are left out, maps are lists of
entries and enumerations are numbers, which is the same on the wire. Methods that are missing answer "unimplemented",
with which Terraform can live.
"""

from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "tfplugin6"
PRIMITIVES = {"int64": 3, "bool": 8, "string": 9, "bytes": 12}  # numbers of descriptor.proto
MESSAGE, OPTIONAL, REPEATED = 11, 1, 3

CONFIG = "type_name string 1, config DynamicValue 2"
FAULTS = "diagnostics *Diagnostic 1"
MESSAGES = {
    "DynamicValue": "msgpack bytes 1, json bytes 2",
    "Diagnostic": "severity int64 1, summary string 2, detail string 3",
    "Step": "attribute_name string 1",
    "AttributePath": "steps *Step 1",
    "RawState": "json bytes 1",
    "Attribute": "name string 1, type bytes 2, required bool 4, optional bool 5, computed bool 6",
    "NestedBlock": "type_name string 1, block Block 2, nesting int64 3, min_items int64 4, max_items int64 5",
    "Block": "version int64 1, attributes *Attribute 2, block_types *NestedBlock 3",
    "Schema": "version int64 1, block Block 2",
    "SchemaEntry": "key string 1, value Schema 2",
}
METHODS = {
    "GetProviderSchema": ("", "provider Schema 1, resource_schemas *SchemaEntry 2, data_source_schemas *SchemaEntry 3"),
    "ValidateProviderConfig": ("config DynamicValue 1", "diagnostics *Diagnostic 2"),
    "ConfigureProvider": ("config DynamicValue 2", FAULTS),
    "ValidateResourceConfig": (CONFIG, FAULTS),
    "ValidateDataResourceConfig": (CONFIG, FAULTS),
    "UpgradeResourceState": ("type_name string 1, raw_state RawState 3", "upgraded_state DynamicValue 1"),
    "ReadResource": ("type_name string 1, current_state DynamicValue 2", "new_state DynamicValue 1"),
    "PlanResourceChange": (
        "type_name string 1, prior_state DynamicValue 2, proposed_new_state DynamicValue 3, config DynamicValue 4",
        "planned_state DynamicValue 1, requires_replace *AttributePath 2, diagnostics *Diagnostic 4",
    ),
    "ApplyResourceChange": (
        "type_name string 1, prior_state DynamicValue 2, planned_state DynamicValue 3, config DynamicValue 4",
        "new_state DynamicValue 1, diagnostics *Diagnostic 3",
    ),
    "ReadDataSource": (CONFIG, "state DynamicValue 1, diagnostics *Diagnostic 2"),
    "StopProvider": ("", ""),
}


def _build() -> dict[str, Any]:
    """Returns the class of each message; those of a method are METHOD.Request and METHOD.Response."""
    tables = dict(MESSAGES)
    for method, (request, response) in METHODS.items():
        tables |= {f"{method}Request": request, f"{method}Response": response}
    file = descriptor_pb2.FileDescriptorProto(name="tfplugin6.proto", package=PACKAGE, syntax="proto3")
    for name, fields in tables.items():
        message = file.message_type.add(name=name)
        for words in filter(None, fields.split(", ")):
            field, kind, number = words.split()
            bare = kind.removeprefix("*")
            of = (
                {"type": PRIMITIVES[bare]}
                if bare in PRIMITIVES
                else {"type_name": f".{PACKAGE}.{bare}", "type": MESSAGE}
            )
            label = REPEATED if kind != bare else OPTIONAL
            message.field.add(name=field, number=int(number), label=label, **of)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in tables}


_CLASSES = _build()


def message(kind: str, **fields: Any) -> Any:
    """Returns a message."""
    return _CLASSES[kind](**fields)


def handler(answers: dict[str, Callable[[Any], Any]]) -> grpc.GenericRpcHandler:
    """Returns what a server needs to answer the methods that are given by name."""
    methods = {
        name: grpc.unary_unary_rpc_method_handler(
            lambda request, _, answer=answer: answer(request),
            request_deserializer=_CLASSES[f"{name}Request"].FromString,
            response_serializer=_CLASSES[f"{name}Response"].SerializeToString,
        )
        for name, answer in answers.items()
    }
    return grpc.method_handlers_generic_handler(f"{PACKAGE}.Provider", methods)
