"""Accounts with rules of their own: a network, a boundary and a key that exist; partitions that lack a service."""

import base64
from types import SimpleNamespace

import boto3
import pytest
import yaml
from botocore.stub import Stubber

from deploy import preflight
from tests.deploy.terraform import BUCKET, TERRAFORM, resources

pytestmark = pytest.mark.long("commands for EC2")

BOUNDARY = "arn:aws-us-gov:iam::123456789012:policy/boundary"
KEY = "arn:aws:kms:us-east-1:123456789012:key/1234"


def of_kind(found, kind):
    return [values for address, values in found.items() if address.startswith(f"{kind}.")]


def actors_data(found):
    """Returns the user-data of actor hosts: those of the others name a volume or an address that is not known yet."""
    return base64.b64decode(found["aws_launch_template.actor"]["user_data"]).decode()


def test_a_network_a_boundary_and_a_key_that_exist_are_used(cluster):
    vpc = "vpc-0123456789abcdef0"
    given = {"results_bucket": BUCKET, "vpc_id": vpc, "vpc_cidr": "172.31.96.0/24"}
    found = resources(cluster.planned(given | {"permissions_boundary": BOUNDARY, "kms_key_id": KEY}))
    for kind in ("aws_vpc", "aws_internet_gateway", "aws_default_security_group"):
        assert not of_kind(found, kind), "what others use stays as it is"
    assert found["aws_subnet.this[0]"]["cidr_block"] == "172.31.96.0/24"
    for kind in ("aws_subnet", "aws_route_table", "aws_vpc_endpoint", "aws_security_group"):
        assert {values["vpc_id"] for values in of_kind(found, kind)} == {vpc}, kind
    assert [route["gateway_id"] for route in found["aws_route_table.this[0]"]["route"]] == [f"igw-of-{vpc}"]
    assert [values["permissions_boundary"] for values in of_kind(found, "aws_iam_role")] == [BOUNDARY] * 4
    disks = [values["block_device_mappings"][0]["ebs"][0] for values in of_kind(found, "aws_launch_template")]
    disks += [found["aws_ebs_volume.journal"], found["aws_instance.replay"]["root_block_device"][0]]
    assert [disk["kms_key_id"] for disk in disks] == [KEY] * 4


def test_subnets_that_exist_are_used_and_nothing_of_the_network_is_made(cluster):
    """The first of its zone; fixed addresses are near its end, public ones are as the subnet gives them."""
    for given, subnet, is_public, addresses in (
        ({}, "subnet-0a", True, ["172.31.15.246", "172.31.15.245"]),
        ({"availability_zone": "us-east-1b"}, "subnet-0b", False, ["172.31.31.246", "172.31.31.245"]),
    ):
        given |= {"results_bucket": BUCKET, "subnet_ids": ["subnet-0a", "subnet-0b", "subnet-0c"]}
        found = resources(cluster.planned(given))
        for kind in ("aws_vpc", "aws_internet_gateway", "aws_subnet", "aws_route_table", "aws_vpc_endpoint"):
            assert not of_kind(found, kind), "what others use stays as it is"
        host = found["aws_instance.replay"]
        assert (host["subnet_id"], host["private_ip"]) == (subnet, addresses[0])
        groups = of_kind(found, "aws_autoscaling_group")
        assert [values["vpc_zone_identifier"] for values in groups] == [[subnet]] * 2
        assert {values["vpc_id"] for values in of_kind(found, "aws_security_group")} == {"vpc-0e"}
        reserved = of_kind(found, "aws_ec2_subnet_cidr_reservation")
        assert sorted(values["cidr_block"] for values in reserved) == sorted(f"{address}/32" for address in addresses)
        templates = of_kind(found, "aws_launch_template")
        ways = [values["network_interfaces"][0]["associate_public_ip_address"] for values in templates]
        assert [host["associate_public_ip_address"], *ways] == [is_public, *[str(is_public).lower()] * 2]
        assert f"--replay-host {addresses[0]} --learner-host {addresses[1]}" in actors_data(found)


def test_a_zone_without_a_subnet_is_refused(cluster):
    given = {"results_bucket": BUCKET, "subnet_ids": ["subnet-0b"], "availability_zone": "us-east-1a"}
    result = cluster.plan(given)
    assert result.returncode == 1
    told = "us-east-1a does not offer a subnet of subnet_ids; zones that offer all instance types: us-east-1b"
    assert told in result.stderr
    result = cluster.plan({"results_bucket": BUCKET, "subnet_ids": ["subnet-0b"], "vpc_id": "vpc-0e"})
    assert result.returncode == 1 and "subnet_ids and vpc_id exclude each other" in result.stderr


@pytest.mark.parametrize("release", [None, "v1.2"])
def test_hosts_reach_aws_and_packages_by_a_proxy(cluster, release):
    proxy = "http://proxy.example.com:3128"
    planned = cluster.planned({"results_bucket": BUCKET, "proxy": proxy, "release": release})
    found = resources(planned)
    rules = [address for address in found if address.startswith("aws_vpc_security_group_egress_rule.p")]
    assert rules == [f'aws_vpc_security_group_egress_rule.proxy["{role}"]' for role in ("actor", "learner", "replay")]
    assert {(found[rule]["from_port"], found[rule]["to_port"]) for rule in rules} == {(3128, 3128)}
    way_out = {f"aws_vpc_security_group_egress_rule.{name}" for name in ("aws", "proxy")}
    for made in planned["configuration"]["root_module"]["resources"]:
        if made["address"] in ("aws_instance.replay", "aws_autoscaling_group.learner", "aws_autoscaling_group.actor"):
            assert way_out <= set(made["depends_on"]), "hosts have their way out from the first upload to the last"
    told = yaml.safe_load(actors_data(found))
    [content] = [file["content"] for file in told["write_files"] if "system.conf.d" in file["path"]]
    assert f'"http_proxy={proxy}" "https_proxy={proxy}" "no_proxy=169.254.169.254,' in content
    if release is None:  # whose units an image starts before systemd has read that
        [environment] = [file["content"] for file in told["write_files"] if file["path"].endswith("role.env")]
        assert f"\nhttps_proxy={proxy}\nno_proxy=169.254.169.254,127.0.0.1,localhost\n" in environment
    read_again, agent, last = told["runcmd"]
    assert read_again == ["systemctl", "daemon-reexec"] and "amazon-ssm-agent" in agent[2]
    assert last[0] == ("systemctl" if release is None else "systemd-run"), "units get what systemd has read"
    refused = cluster.plan({"results_bucket": BUCKET, "proxy": "http://me:secret@proxy:3128"})
    assert refused.returncode == 1 and "proxy has to be http://HOST:PORT, without a password" in refused.stderr


def test_govcloud_has_a_boundary_and_no_alarm_and_says_so(bootstrap):
    given = {"budget_emails": ["you@example.com"], "region": "us-gov-west-1", "permissions_boundary": BOUNDARY}
    plan = bootstrap.planned(given)
    found = resources(plan)
    assert [values["permissions_boundary"] for values in of_kind(found, "aws_iam_role")] == [BOUNDARY]
    assert not of_kind(found, "aws_budgets_budget")
    told = plan["planned_values"]["outputs"]["alarm"]["value"]
    assert told.startswith("nobody: AWS has no budgets in aws-us-gov")


def test_a_plan_that_cannot_be_asked_about_is_said_and_stops_nothing(monkeypatch):
    freetier = boto3.client("freetier", region_name="us-east-1", aws_access_key_id="a", aws_secret_access_key="b")
    monkeypatch.setattr(preflight, "client", lambda *_: freetier)
    for code, told in (
        ("UnrecognizedClientException", "not asked: AWS does not take these credentials (UnrecognizedClientException)"),
        ("AccessDeniedException", "not asked: not allowed: GetAccountPlanState"),
        ("ResourceNotFoundException", "not AWS's free plan"),
    ):
        with Stubber(freetier) as stub:
            stub.add_client_error("get_account_plan_state", code)
            [line] = preflight.check_plan(SimpleNamespace(region="eu-west-1"))
        assert (line.finding, line.cure) == (told, "")


@pytest.mark.parametrize(
    ("region", "partition"), [("us-gov-west-1", "aws-us-gov"), ("cn-north-1", "aws-cn"), ("eusc-de-east-1", "aws-eusc")]
)
def test_nobody_is_asked_about_a_free_plan_where_there_is_none(region, partition):
    [line] = preflight.check_plan(SimpleNamespace(region=region))
    assert (line.finding, line.cure) == (f"{partition} has no free plan", "")


def test_no_arn_is_of_one_partition_alone():
    """GovCloud and China have ARNs of their own; the texts of errors show one of an example."""
    for path in TERRAFORM.glob("*/*.tf"):
        lines = [line for line in path.read_text().splitlines() if "arn:aws" in line and "error_message" not in line]
        assert all('"^arn:aws[a-z-]*:' in line for line in lines), lines
