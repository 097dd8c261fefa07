"""The permissions of each role of the cluster, and their limits, by the policies in the plan."""

import importlib.util
import json
from pathlib import Path

import pytest

from tests.deploy.policies import allows, as_list, matches, statements
from tests.deploy.terraform import BUCKET, resources, templates

pytestmark = pytest.mark.long("changes of a cluster")

DEADLINE = "arn:aws:ssm:us-east-1:123456789012:parameter/apexrl/apexrl/deadline"
GROUPS = "arn:aws:autoscaling:us-east-1:123456789012:autoScalingGroup:1b-2c:autoScalingGroupName"
KEYS = "arn:aws:ssm:us-east-1:123456789012:parameter/apexrl/apexrl/keys"
LOGS = "arn:aws:logs:us-east-1:123456789012:log-group:/apexrl/apexrl"
STORE = f"arn:aws:s3:::{BUCKET}"
HOSTS = "arn:aws:ec2:us-east-1:123456789012:instance"
INTERFACE = "arn:aws:ec2:us-east-1:123456789012:network-interface/eni-1"
ROLES = ("replay", "learner", "actor")

SESSION = [
    ("ssm:UpdateInstanceInformation", f"{HOSTS}/i-1"),
    ("ssmmessages:CreateControlChannel", "*"),
    ("ssmmessages:CreateDataChannel", "*"),
    ("ssmmessages:OpenControlChannel", "*"),
    ("ssmmessages:OpenDataChannel", "*"),
]
LOGGING = [
    ("logs:CreateLogStream", f"{LOGS}:log-stream:replay/i-1"),
    ("logs:PutLogEvents", f"{LOGS}:log-stream:replay/i-1"),
    ("logs:DescribeLogStreams", LOGS),
]
PUBLIC = [(action, f"{KEYS}/{role}.public") for role in ROLES for action in ("ssm:GetParameter", "ssm:GetParameters")]
COMMON = [*SESSION, *LOGGING, *PUBLIC, ("ssm:GetParameter", DEADLINE)]
RESULTS = [
    ("s3:GetObject", f"{STORE}/apexrl/run-1/checkpoints/latest.safetensors"),
    ("s3:PutObject", f"{STORE}/apexrl/run-1/tensorboard/events"),
    ("s3:AbortMultipartUpload", f"{STORE}/apexrl/run-1/checkpoints/latest.safetensors"),
]
FINISH = [
    ("ssm:PutParameter", DEADLINE),
    ("autoscaling:SetDesiredCapacity", f"{GROUPS}/apexrl-actor"),
    ("autoscaling:SetDesiredCapacity", f"{GROUPS}/apexrl-learner"),
]
MAY = {
    "replay": [*COMMON, ("ssm:GetParameter", f"{KEYS}/replay.secret"), ("ssm:GetParameter", f"{KEYS}/actor.secret")],
    "learner": [*COMMON, ("ssm:GetParameter", f"{KEYS}/learner.secret"), *RESULTS, *FINISH],
    "actor": [*COMMON, ("ssm:GetParameter", f"{KEYS}/actor.secret")],
}
NOBODY_MAY = [
    ("ssm:GetParametersByPath", KEYS),
    ("ssm:GetParameter", "arn:aws:ssm:us-east-1:123456789012:parameter/apexrl/another/keys/actor.secret"),
    ("ssm:GetParameter", "arn:aws:ssm:us-east-1:123456789012:parameter/database/password"),
    ("ssm:GetParameterHistory", f"{KEYS}/replay.public"),
    ("ssm:PutParameter", f"{KEYS}/replay.public"),
    ("ssm:DeleteParameter", f"{KEYS}/replay.public"),
    ("ssm:SendCommand", "*"),
    ("ssm:StartSession", f"{HOSTS}/i-1"),
    ("logs:PutLogEvents", "arn:aws:logs:us-east-1:123456789012:log-group:/apexrl/another:log-stream:x"),
    ("logs:PutLogEvents", "arn:aws:logs:us-east-1:123456789012:log-group:/apexrl/apexrl-2:log-stream:x"),
    ("logs:DeleteLogGroup", LOGS),
    ("logs:GetLogEvents", f"{LOGS}:log-stream:replay/i-1"),
    ("s3:DeleteObject", f"{STORE}/apexrl/run-1/checkpoints/latest.safetensors"),
    ("s3:DeleteBucket", STORE),
    ("s3:GetObject", f"{STORE}/another/run-1/checkpoints/latest.safetensors"),
    ("s3:PutObject", f"{STORE}/apexrl-2/x"),
    ("s3:PutBucketPolicy", STORE),
    ("s3:ListAllMyBuckets", "*"),
    ("s3:GetObject", "arn:aws:s3:::apexrl-state-123456789012-us-east-1/cluster/apexrl.tfstate"),
    ("ec2:TerminateInstances", f"{HOSTS}/i-1"),
    ("ec2:RunInstances", "*"),
    ("iam:PassRole", "*"),
    ("sts:AssumeRole", "arn:aws:iam::123456789012:role/other"),
    ("autoscaling:SetDesiredCapacity", f"{GROUPS}/another-actor"),
    ("autoscaling:SetDesiredCapacity", f"{GROUPS}/apexrl-learner-1"),  # there is one learner host
    ("autoscaling:UpdateAutoScalingGroup", f"{GROUPS}/apexrl-actor"),
    ("ec2:AssignPrivateIpAddresses", INTERFACE),  # without the tags of a learner's
    ("ec2:UnassignPrivateIpAddresses", INTERFACE),
    ("ssm:PutParameter", DEADLINE.replace("apexrl/apexrl", "apexrl/another")),
    ("kms:Decrypt", "*"),
    ("secretsmanager:GetSecretValue", "*"),
]


@pytest.fixture(scope="module")
def policies(applied):
    """The statements of each role; none has policies of another kind."""
    found = {}
    for address, values in resources(applied).items():
        assert not address.startswith(("aws_iam_role_policy_attachment", "aws_iam_policy_attachment")), address
        if address.startswith("aws_iam_role_policy."):
            found.setdefault(values["role"], []).extend(statements(values["policy"]))
        elif address.startswith("aws_iam_role."):
            assert not values["managed_policy_arns"] and not values["inline_policy"], address
    return {name.removeprefix("apexrl-us-east-1-"): given for name, given in found.items()}


@pytest.mark.parametrize("role", ROLES)
def test_a_role_may_do_its_work(policies, role):
    for action, resource in MAY[role]:
        assert allows(policies[role], action, resource), (role, action, resource)


@pytest.mark.parametrize("role", ROLES)
def test_a_role_may_do_nothing_else(policies, role):
    of_others = {request for other in ROLES for request in MAY[other]} - set(MAY[role])
    for action, resource in [*NOBODY_MAY, *sorted(of_others)]:
        assert not allows(policies[role], action, resource), (role, action, resource)


def test_only_the_learner_lists_its_own_directory_of_the_bucket(policies):
    for role in ROLES:
        for prefix, is_ours in (("apexrl/", True), ("apexrl/run-1/", True), ("another/", False), ("", False)):
            allowed = allows(policies[role], "s3:ListBucket", STORE, s3__prefix=prefix)
            assert bool(allowed) == (is_ours and role == "learner"), (role, prefix)
        assert not allows(policies[role], "s3:ListBucket", STORE)


def test_the_scheduler_ends_hosts_of_this_cluster_only(policies, applied):
    tags = {"aws__ResourceTag_SLASH_Project": "apexrl", "aws__ResourceTag_SLASH_Cluster": "apexrl"}
    assert allows(policies["limit"], "ec2:TerminateInstances", f"{HOSTS}/i-1", **tags)
    assert not allows(policies["limit"], "ec2:TerminateInstances", f"{HOSTS}/i-1")
    others = tags | {"aws__ResourceTag_SLASH_Cluster": "another"}
    assert not allows(policies["limit"], "ec2:TerminateInstances", f"{HOSTS}/i-1", **others)
    values = resources(applied)["aws_instance.replay"]["tags_all"]
    assert (values["Project"], values["Cluster"]) == ("apexrl", "apexrl")


TAGS = {"Project": "apexrl", "Cluster": "apexrl", "Role": "learner"}


def test_a_learner_host_takes_its_address_for_an_interface_of_this_clusters_learners_only(policies, applied):
    specifications = templates(applied)["learner"]["tag_specifications"]
    [tags] = [made["tags"] for made in specifications if made["resource_type"] == "network-interface"]
    assert TAGS.items() <= tags.items()
    for role in ROLES:
        for changed in ({}, {"Cluster": "another"}, {"Role": "actor"}, {"Project": "other"}):
            context = {f"aws__ResourceTag_SLASH_{name}": value for name, value in (tags | changed).items()}
            allowed = allows(policies[role], "ec2:AssignPrivateIpAddresses", INTERFACE, **context)
            assert bool(allowed) == (role == "learner" and not changed), (role, changed)


def test_no_statement_goes_unused(policies):
    listing = ("s3:ListBucket", STORE, {"s3__prefix": "apexrl/"})
    ending = {"aws__ResourceTag_SLASH_Project": "apexrl", "aws__ResourceTag_SLASH_Cluster": "apexrl"}
    requests = {role: [(*request, {}) for request in MAY[role]] for role in ROLES}
    taking = {f"aws__ResourceTag_SLASH_{name}": value for name, value in TAGS.items()}
    requests["learner"] += [listing, ("ec2:AssignPrivateIpAddresses", INTERFACE, taking)]
    requests["limit"] = [("ec2:TerminateInstances", f"{HOSTS}/i-1", ending)]
    assert requests.keys() == policies.keys()
    for role, given in policies.items():
        for statement in given:
            for action in as_list(statement["Action"]):
                assert any(
                    matches(asked, action, any_case=True) and allows([statement], asked, resource, **context)
                    for asked, resource, context in requests[role]
                ), (role, action)


def test_actions_exist(policies):
    origin = importlib.util.find_spec("policyuniverse").origin  # importing it leaves a file open
    known = json.loads(Path(origin).with_name("data.json").read_text())
    actions = {f"{service['prefix']}:{action}" for service in known.values() for action in service["actions"]}
    for role, given in policies.items():
        for statement in given:
            assert set(as_list(statement["Action"])) <= actions, role


def test_who_may_take_a_role(applied):
    trusted = {}
    for address, values in resources(applied).items():
        if address.startswith("aws_iam_role."):
            [statement] = json.loads(values["assume_role_policy"])["Statement"]
            trusted[values["name"]] = statement
    assume = {"Effect": "Allow", "Action": "sts:AssumeRole"}
    of_hosts = assume | {"Principal": {"Service": "ec2.amazonaws.com"}}
    of_schedules = assume | {
        "Principal": {"Service": "scheduler.amazonaws.com"},
        "Condition": {"StringEquals": {"aws:SourceAccount": "123456789012"}},  # not for schedules of another account
    }
    assert trusted == {f"apexrl-us-east-1-{role}": of_hosts for role in ROLES} | {
        "apexrl-us-east-1-limit": of_schedules
    }


def test_each_host_has_the_profile_of_its_role(applied):
    found = resources(applied)
    assert found["aws_instance.replay"]["iam_instance_profile"] == "apexrl-us-east-1-replay"
    for role, template in templates(applied).items():
        [profile] = template["iam_instance_profile"]
        assert profile["arn"] == f"arn:aws:iam::123456789012:instance-profile/apexrl-us-east-1-{role}"
    for role in ROLES:
        assert found[f'aws_iam_instance_profile.host["{role}"]']["role"] == f"apexrl-us-east-1-{role}"
