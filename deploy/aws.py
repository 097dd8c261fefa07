"""Clients of AWS for the scripts: the SDK's own credential chain, short deadlines, errors with their cure."""

import functools
from collections.abc import Iterator
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    EndpointConnectionError,
    InvalidRegionError,
    NoCredentialsError,
    PartialCredentialsError,
    ProfileNotFound,
    SSOError,
    TokenRetrievalError,
)
from botocore.parsers import ResponseParserError

AwsError = (BotoCoreError, ClientError, ResponseParserError)
CONFIG = Config(connect_timeout=5, read_timeout=30, retries={"mode": "standard", "max_attempts": 4})
LOGIN = "log in with `aws sso login` or `aws configure`, or set AWS_PROFILE"
NOT_LOGGED_IN = (NoCredentialsError, PartialCredentialsError, ProfileNotFound, SSOError, TokenRetrievalError)
REFUSED = (
    "AuthFailure",
    "ExpiredToken",
    "ExpiredTokenException",
    "InvalidAccessKeyId",
    "InvalidClientTokenId",
    "InvalidSignatureException",
    "RequestExpired",
    "SignatureDoesNotMatch",
    "UnrecognizedClientException",
)
"""AWS's error codes for credentials that it does not know, or that have expired."""


@functools.cache
def client(service: str, region: str) -> Any:
    """Returns the client of a service and region, the same at each call. Sends nothing yet."""
    return boto3.client(service, region_name=region, config=CONFIG)


def listed(region: str, service: str, operation: str, items: str, **arguments: Any) -> Iterator[Any]:
    """Yields what an operation lists, from all pages of its answer; `items` is their place there, as JMESPath."""
    found = client(service, region).get_paginator(operation).paginate(**arguments).search(items)
    return (item for item in found if item is not None)


def tags_of(described: dict[str, Any]) -> dict[str, str]:
    """Returns the tags in AWS's description of something."""
    return {tag["Key"]: tag["Value"] for tag in described.get("Tags", [])}


def partition_of(region: str) -> str:
    """Returns the part of AWS that a region is in, such as aws, aws-us-gov or aws-cn. Sends nothing."""
    return str(boto3.Session().get_partition_for_region(region))


def code_of(error: Exception) -> str:
    """Returns AWS's code of an error, empty when the request got no answer."""
    return str(error.response["Error"].get("Code", "")) if isinstance(error, ClientError) else ""


def explain(error: Exception) -> tuple[str, str]:
    """Returns the description of an error, and its cure."""
    code = code_of(error)
    if isinstance(error, NOT_LOGGED_IN):
        return f"no AWS credentials ({error})", LOGIN
    if code in REFUSED:
        return f"AWS does not take these credentials ({code})", f"{LOGIN}; a region that has to be enabled must be"
    if isinstance(error, ClientError):
        text = error.response["Error"].get("Message", "")
        if "AccessDenied" in code or code == "UnauthorizedOperation":
            return f"not allowed: {error.operation_name}", f"ask for the permission; AWS says: {text}"
        return f"{error.operation_name} failed: {code}: {text}", "see the message"
    if isinstance(error, InvalidRegionError):
        return str(error), "check the region's name: `aws ec2 describe-regions` lists them"
    if isinstance(error, EndpointConnectionError):
        return str(error), "check the region's name and this machine's network"
    if isinstance(error, ResponseParserError):
        return "the answer is not from AWS", "check the region's name and this machine's network (a proxy?)"
    return str(error), "check `aws configure list` and this machine's network"
