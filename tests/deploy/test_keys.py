"""`python -m deploy keys` against AWS as moto serves it."""

import subprocess
import sys

import pytest
import zmq

from apexrl.net.keyring import ROLES, read_key
from tests.system.processes import ROOT

pytestmark = pytest.mark.long("commands for EC2")

FLAGS = ("--cluster", "catch", "--region", "us-east-1")
NAMES = [f"/apexrl/catch/keys/{role}.{half}" for role in ROLES for half in ("public", "secret")]


def values_of(aws, names=NAMES):
    answer = aws.client("ssm").get_parameters(Names=list(names), WithDecryption=True)
    return {found["Name"]: found["Value"] for found in answer["Parameters"]}


def test_stores_an_encrypted_pair_for_each_role_and_shows_no_value(aws, run_deploy, tmp_path):
    result = run_deploy("keys", *FLAGS)
    assert (result.returncode, result.stderr, result.stdout.split()) == (0, "", NAMES)
    values = values_of(aws)
    for role in ROLES:
        path = tmp_path / f"{role}.public"
        path.write_text(values[f"/apexrl/catch/keys/{role}.public"] + "\n")
        assert read_key(path) == zmq.curve_public(values[f"/apexrl/catch/keys/{role}.secret"].encode())
    assert len(set(values.values())) == len(NAMES)
    assert not any(value in result.stdout for value in values.values())
    ssm = aws.client("ssm")
    described = {found["Name"]: found["Type"] for found in ssm.describe_parameters()["Parameters"]}
    assert described == dict.fromkeys(NAMES, "SecureString")
    for name in NAMES:
        tags = ssm.list_tags_for_resource(ResourceType="Parameter", ResourceId=name)["TagList"]
        assert {tag["Key"]: tag["Value"] for tag in tags} == {"Project": "apexrl", "Cluster": "catch"}


def test_existing_keys_are_kept_unless_rotated(aws, run_deploy):
    assert run_deploy("keys", *FLAGS).returncode == 0
    before = values_of(aws)
    refused = run_deploy("keys", *FLAGS)
    assert refused.returncode == 2
    assert "all 6 keys of catch exist already" in refused.stderr and "--rotate" in refused.stderr
    assert refused.stdout == "" and "Traceback" not in refused.stderr
    assert values_of(aws) == before
    rotated = run_deploy("keys", *FLAGS, "--rotate")
    assert (rotated.returncode, rotated.stdout.split()) == (0, NAMES)
    after = values_of(aws)
    assert all(before[name] != after[name] for name in NAMES)


def test_only_missing_keys_are_made_and_fit_those_that_are_there(aws, run_deploy):
    assert run_deploy("keys", *FLAGS).returncode == 0
    before = values_of(aws)
    lost = ["/apexrl/catch/keys/replay.public", "/apexrl/catch/keys/learner.secret"]
    aws.client("ssm").delete_parameters(Names=lost)
    result = run_deploy("keys", *FLAGS)
    made = [lost[0], "/apexrl/catch/keys/learner.public", lost[1]]  # no public key tells its secret one
    assert (result.returncode, result.stdout.split()) == (0, made)
    after = values_of(aws)
    assert {name for name in NAMES if before[name] != after[name]} == set(made[1:])
    for role in ROLES:
        public, secret = (after[f"/apexrl/catch/keys/{role}.{half}"] for half in ("public", "secret"))
        assert zmq.curve_public(secret.encode()) == public.encode()


def test_a_wrong_name_and_no_network_are_told_with_a_cure(run_deploy):
    wrong = run_deploy("keys", "--cluster", "Bad_Name", "--region", "us-east-1")
    assert wrong.returncode == 2 and "--cluster Bad_Name" in wrong.stderr
    away = run_deploy("keys", *FLAGS, AWS_ENDPOINT_URL="http://127.0.0.1:9")
    assert away.returncode == 2 and "Traceback" not in away.stderr and "network" in away.stderr


def test_two_at_once_leave_the_pairs_of_one(aws):
    command = [sys.executable, "-m", "deploy", "keys", *FLAGS]
    both = [
        subprocess.Popen(command, cwd=ROOT, env=aws.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in "12"
    ]
    texts = [process.communicate(timeout=100)[1].decode() for process in both]
    assert sorted(process.returncode for process in both) == [0, 2], texts
    values = values_of(aws)
    for role in ROLES:
        public, secret = (values[f"/apexrl/catch/keys/{role}.{half}"] for half in ("public", "secret"))
        assert zmq.curve_public(secret.encode()) == public.encode()


@pytest.mark.parametrize(
    "code", ["SignatureDoesNotMatch", "InvalidSignatureException", "InvalidAccessKeyId", "ExpiredTokenException"]
)
def test_credentials_that_aws_does_not_take_have_their_cure(code):
    from botocore.exceptions import ClientError

    from deploy.aws import explain

    what, cure = explain(ClientError({"Error": {"Code": code, "Message": "no"}}, "PutParameter"))
    assert code in what and "aws sso login" in cure
