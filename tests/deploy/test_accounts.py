"""Accounts with rules of their own: a network, a boundary and a key that exist; partitions that lack a service."""

from types import SimpleNamespace

import pytest

from deploy.preflight import check_plan
from tests.deploy.terraform import BUCKET, resources

pytestmark = pytest.mark.long("commands for EC2")

BOUNDARY = "arn:aws-us-gov:iam::123456789012:policy/boundary"
KEY = "arn:aws:kms:us-east-1:123456789012:key/1234"


def of_kind(found, kind):
    return [values for address, values in found.items() if address.startswith(f"{kind}.")]


def test_a_network_a_boundary_and_a_key_that_exist_are_used(cluster):
    vpc = "vpc-0123456789abcdef0"
    given = {"results_bucket": BUCKET, "vpc_id": vpc, "vpc_cidr": "172.31.96.0/24"}
    found = resources(cluster.planned(given | {"permissions_boundary": BOUNDARY, "kms_key_id": KEY}))
    for kind in ("aws_vpc", "aws_internet_gateway", "aws_default_security_group"):
        assert not of_kind(found, kind), "what others use stays as it is"
    assert found["aws_subnet.this"]["cidr_block"] == "172.31.96.0/24"
    for kind in ("aws_subnet", "aws_route_table", "aws_vpc_endpoint", "aws_security_group"):
        assert {values["vpc_id"] for values in of_kind(found, kind)} == {vpc}, kind
    assert [route["gateway_id"] for route in found["aws_route_table.this"]["route"]] == [f"igw-of-{vpc}"]
    assert [values["permissions_boundary"] for values in of_kind(found, "aws_iam_role")] == [BOUNDARY] * 4
    disks = [values["block_device_mappings"][0]["ebs"][0] for values in of_kind(found, "aws_launch_template")]
    disks += [found["aws_ebs_volume.journal"], found["aws_instance.replay"]["root_block_device"][0]]
    assert [disk["kms_key_id"] for disk in disks] == [KEY] * 4


def test_govcloud_has_a_boundary_and_no_alarm_and_says_so(bootstrap):
    given = {"budget_emails": ["you@example.com"], "region": "us-gov-west-1", "permissions_boundary": BOUNDARY}
    plan = bootstrap.planned(given)
    found = resources(plan)
    assert [values["permissions_boundary"] for values in of_kind(found, "aws_iam_role")] == [BOUNDARY]
    assert not of_kind(found, "aws_budgets_budget")
    told = plan["planned_values"]["outputs"]["alarm"]["value"]
    assert told.startswith("nobody: AWS has no budgets in aws-us-gov")


@pytest.mark.parametrize(("region", "partition"), [("us-gov-west-1", "aws-us-gov"), ("cn-north-1", "aws-cn")])
def test_nobody_is_asked_about_a_free_plan_where_there_is_none(region, partition):
    [line] = check_plan(SimpleNamespace(region=region))
    assert (line.finding, line.cure) == (f"{partition} has no free plan", "")
