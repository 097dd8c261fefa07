"""`python -m deploy preflight` against AWS as moto serves it: a ready account, then wrong things.

Terraform's own checks, of zones, images, subnets and the bucket, are in test_terraform_variables.py.
"""

import ipaddress
import json
import re
import urllib.request

import pytest

from deploy.cluster import values_in
from tests.deploy.needed import with_terraform
from tests.deploy.quotas import Account, serving
from tests.deploy.terraform import BUCKET, as_flags

pytestmark = pytest.mark.long("commands for EC2")

QUOTAS = {"L-1216C47A": 96.0, "L-34B43A08": 128.0, "L-DB2E81BA": 16.0}
VARIABLES = {
    "name": "catch",
    "region": "us-east-1",
    "results_bucket": BUCKET,
    "replay_instance_type": "r6in.4xlarge",
    "learner_instance_types": ["g6.4xlarge", "g5.4xlarge"],
    "actor_instance_types": ["c7i.8xlarge"],
    "actor_hosts": 2,
    "actor_on_demand_hosts": 0,
}


@pytest.fixture
def ready(aws):
    """An account with the roles that AWS makes for itself when somebody uses its services."""
    for service in ("autoscaling", "events", "spot"):
        aws.client("iam").create_service_linked_role(AWSServiceName=f"{service}.amazonaws.com")


@pytest.fixture
def preflight(run_deploy):
    """Runs it with VARIABLES and changes (None: not given); returns the status, the lines by verdict, and the cures."""

    def run(changes=None, quotas=QUOTAS, account=None, extra=(), **environment):
        flags = as_flags({name: value for name, value in (VARIABLES | (changes or {})).items() if value is not None})
        with serving(account or Account(quotas, {"L-F678F1CE": 5.0})) as answering:
            result = run_deploy("preflight", *flags, *extra, **(answering.environment | environment))
        assert result.stderr == "", result.stderr
        verdicts = {"PASS": [], "FAIL": []}
        for verdict, line in re.findall(r"^(PASS|FAIL)  (.*)$", result.stdout, re.MULTILINE):
            verdicts[verdict].append(line)
        cures = re.findall(r"^      cure: (.*)$", result.stdout, re.MULTILINE)
        assert len(cures) == len(verdicts["FAIL"]), "every failure has a cure"
        assert (result.returncode == 0) == (not cures) == ("the account is ready" in result.stdout)
        return result.returncode, verdicts, cures

    return run


def test_subnets_that_exist_have_the_fixed_addresses_free(ready, preflight, aws):
    ec2 = aws.client("ec2")
    subnets = {subnet["AvailabilityZone"]: subnet for subnet in ec2.describe_subnets()["Subnets"]}
    own, other = (subnets[f"us-east-1{letter}"]["SubnetId"] for letter in "ac")
    _, verdicts, _ = preflight({"subnet_ids": [other, own]})
    assert f"subnets: {own} in us-east-1a" in verdicts["PASS"]
    replay, address = (str(ipaddress.ip_network(subnets["us-east-1a"]["CidrBlock"])[-place]) for place in (10, 11))
    tags = [{"ResourceType": "instance", "Tags": [{"Key": "Cluster", "Value": VARIABLES["name"]}]}]
    placed = {"SubnetId": own, "PrivateIpAddress": replay, "TagSpecifications": tags}
    image = ec2.register_image(Name="a host")["ImageId"]
    ec2.run_instances(ImageId=image, MinCount=1, MaxCount=1, **placed)
    _, verdicts, _ = preflight({"subnet_ids": [other, own]})
    assert f"subnets: {own} in us-east-1a" in verdicts["PASS"], "its own replay host is there"
    ec2.create_network_interface(SubnetId=own, PrivateIpAddress=address)
    told = f"subnets: {own} in us-east-1a, where {address} is in use and the cluster's"
    assert preflight({"subnet_ids": [other, own]})[1]["FAIL"] == [told]


def test_a_ready_account_passes_line_by_line_and_is_not_changed(ready, preflight, aws):
    def everything() -> dict:
        """All that moto holds, by service and kind."""
        with urllib.request.urlopen(f"{aws.endpoint}/moto-api/data.json", timeout=30) as answer:
            services = json.load(answer)
        return {(name, kind): found for name, kinds in services.items() for kind, found in kinds.items() if found}

    aws.client("ec2").describe_vpcs()  # with the first question moto makes the default one
    before = everything()
    assert ("ec2", "VPC") in before and ("iam", "Role") in before
    names = ["credentials", "plan", "VPCs", *["role"] * 3, *["quota"] * 3]
    _, verdicts, _ = preflight()
    assert [line.partition(":")[0] for line in verdicts["PASS"]] == names and everything() == before
    text = "\n".join(verdicts["PASS"])
    assert "account 123456789012" in text
    assert "on-demand standard instances: 16 wanted, 0 in use, 96 allowed" in text
    assert "spot standard instances: 64 wanted, 0 in use, 128 allowed" in text
    assert "on-demand G and VT instances: 16 wanted, 0 in use, 16 allowed" in text
    text = "\n".join(preflight({"actor_on_demand_hosts": 2}, QUOTAS | {"L-34B43A08": 0.0})[1]["PASS"])
    assert "for spot" not in text and "spot standard" not in text and "on-demand standard instances: 80 wanted" in text


def test_an_empty_account_fails_with_the_commands_that_cure_it(aws, preflight):
    few = Account({"L-1216C47A": 0.0, "L-34B43A08": 5.0, "L-DB2E81BA": 0.0}, {"L-F678F1CE": 5.0}, plan="FREE")
    _, verdicts, cures = preflight({"results_bucket": None}, account=few)
    assert [line.partition(":")[0] for line in verdicts["FAIL"]] == ["plan", *["role"] * 3, *["quota"] * 3]
    assert "the account is on AWS's free plan" in verdicts["FAIL"][0]
    services = [f"--aws-service-name {service}.amazonaws.com" for service in ("autoscaling", "events", "spot")]
    assert cures[0].startswith("aws freetier upgrade-account-plan --account-plan-type PAID")
    assert cures[1:4] == [f"aws iam create-service-linked-role {service}" for service in services]
    assert "standard instances: 16 wanted, 0 in use, 0 allowed" in verdicts["FAIL"][4]


def test_what_does_not_answer_is_not_aws(preflight):
    _, verdicts, cures = preflight({"region": "us-east-7"})
    assert "the region's name" in cures[verdicts["FAIL"].index("network: the answer is not from AWS")]


SSO = "sso_account_id = 1\nsso_role_name = x\n"
PORTAL = "sso_region = us-east-1\nsso_start_url = https://x.awsapps.com/start\n"
NOT_LOGGED_IN = {
    "no profile": ("", "Unable to locate credentials"),
    "nothing": ("", "could not be found"),
    "session": (f"[profile mine]\nsso_session = us\n{SSO}[sso-session us]\n{PORTAL}", "SSO"),
    "portal": (f"[profile mine]\n{SSO}{PORTAL}", "SSO"),
    "half": ("[profile mine]\naws_access_key_id = AKIA\n", "Partial credentials"),
}


@pytest.mark.parametrize("name", NOT_LOGGED_IN)
def test_who_has_not_logged_in_is_told_how(preflight, tmp_path, name):
    config, finding = NOT_LOGGED_IN[name]
    (tmp_path / "config").write_text(config)
    none = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "")
    profile = {"AWS_PROFILE": "mine"} if name != "no profile" else {}
    settings = {"AWS_CONFIG_FILE": str(tmp_path / "config"), "HOME": str(tmp_path)} | profile
    _, verdicts, cures = preflight(**none, **settings)
    [failed] = verdicts["FAIL"]
    assert failed.startswith("credentials: no AWS credentials (") and finding in failed and "aws sso login" in cures[0]


def test_quotas_are_asked_for_when_told_to_and_once(ready, preflight):
    account = Account(QUOTAS | {"L-DB2E81BA": 0.0}, {"L-F678F1CE": 5.0})
    _, _, cures = preflight(account=account)
    assert cures[0].startswith("aws service-quotas request-service-quota-increase ") and not account.requested
    _, _, cures = preflight(account=account, extra=["--request-quotas"])
    assert account.requested == [{"QuotaCode": "L-DB2E81BA", "DesiredValue": 16.0, "Status": "PENDING"}]
    assert cures == ["wait until AWS has answered (16 asked for, PENDING; hours to days)"]
    assert preflight(account=account, extra=["--request-quotas"])[2] == cures and len(account.requested) == 1
    account.requested[0]["Status"] = "DENIED"
    preflight(account=account, extra=["--request-quotas"])
    assert len(account.requested) == 2


def test_each_type_that_an_actor_host_may_be_counts_against_its_quota(ready, preflight):
    types = ["c7i.8xlarge", "m7i.16xlarge", "g6.8xlarge", "inf2.8xlarge"]
    _, verdicts, cures = preflight({"actor_instance_types": types, "actor_on_demand_hosts": 1})
    assert "quota: vCPUs of on-demand G and VT instances: 48 wanted, 0 in use, 16 allowed" in verdicts["FAIL"]
    unknown = {line.rpartition("knows no quota of ")[2] for line in verdicts["FAIL"] if "knows no quota" in line}
    assert unknown == {"g6.8xlarge on spot", "inf2.8xlarge", "inf2.8xlarge on spot"}
    assert sum("Service Quotas" in cure for cure in cures) == 3
    assert [line for line in verdicts["PASS"] if line.startswith("quota")] == [
        "quota: vCPUs of on-demand standard instances: 80 wanted, 0 in use, 96 allowed",
        "quota: vCPUs of spot standard instances: 64 wanted, 0 in use, 128 allowed",
    ]


def test_a_learner_of_several_gpus_counts_with_all_its_vcpus(ready, preflight):
    for hosts, vcpus in ((1, 48), (2, 96)):
        wanted = {"learner_instance_types": ["g6.12xlarge"], "learner_gpus": 4, "learner_hosts": hosts}
        _, verdicts, cures = preflight(wanted)
        told = f"quota: vCPUs of on-demand G and VT instances: {vcpus} wanted, 0 in use, 16 allowed"
        assert verdicts["FAIL"] == [told] and f"--quota-code L-DB2E81BA --desired-value {vcpus}" in cures[0]


def test_instances_that_run_already_count_against_the_quota_but_not_the_clusters_own(ready, preflight, aws):
    ec2 = aws.client("ec2")
    image = ec2.register_image(Name="a host")["ImageId"]
    for cluster in ("other", "catch"):
        tags = [{"Key": "Project", "Value": "apexrl"}, {"Key": "Cluster", "Value": cluster}]
        tagged = [{"ResourceType": "instance", "Tags": tags}]
        given = {"ImageId": image, "InstanceType": "c7i.16xlarge", "TagSpecifications": tagged}
        ec2.run_instances(**given, MinCount=1, MaxCount=1)
    _, verdicts, _ = preflight()
    assert any("standard instances: 16 wanted, 64 in use, 96 allowed" in line for line in verdicts["PASS"]), verdicts
    _, verdicts, cures = preflight(quotas=QUOTAS | {"L-1216C47A": 79.0})
    assert any("16 wanted, 64 in use, 79 allowed" in line for line in verdicts["FAIL"])
    assert "--quota-code L-1216C47A --desired-value 80 --region us-east-1" in cures[0]


def test_a_full_region_has_no_room_for_a_vpc(ready, preflight, aws):
    ec2 = aws.client("ec2")
    for number in range(4):
        ec2.create_vpc(CidrBlock=f"10.{number}.0.0/16")
    _, verdicts, _ = preflight()
    assert verdicts["FAIL"] == ["VPCs: 5 in use, 5 allowed"]
    ec2.create_tags(Resources=[ec2.describe_vpcs()["Vpcs"][0]["VpcId"]], Tags=[{"Key": "Cluster", "Value": "catch"}])
    assert preflight()[0] == 0
    given = ec2.describe_vpcs()["Vpcs"][1]["VpcId"]
    ec2.delete_tags(Resources=[ec2.describe_vpcs()["Vpcs"][0]["VpcId"]])
    assert preflight({"vpc_id": given})[0] == 0, "one that exists takes no room"


def test_unreadable_variables_are_told_apart(run_deploy, tmp_path):
    path = tmp_path / "wrong.tfvars"
    for text, finding in (
        ("actor_host = 3\n", 'does not declare a variable named "actor_host"'),
        ('actor_hosts = "three"\n', "a number is required"),
        ("actor_hosts = 2 * var.x\n", "wrong.tfvars:1: Variables may not be used here"),
        ("actor_hosts = [\n", "wrong.tfvars:"),
        ('operator_cidrs = ["0.0.0.0/0"]\n', "operator_cidrs must not be wider than /16"),
        ('operator_cidrs = ["203.0.113.7/24"]\n', "each given by its first address"),
    ):
        path.write_text(text)
        result = run_deploy("preflight", "-var-file", str(path))
        assert (result.returncode, result.stderr.count("\n")) == (2, 1) and finding in result.stderr, result.stderr


def test_a_file_says_what_it_gives_itself(tmp_path, monkeypatch):
    """Neither defaults nor other places."""
    monkeypatch.setenv("PATH", with_terraform()["PATH"])
    monkeypatch.setenv("TF_VAR_region", "eu-west-1")
    path = tmp_path / "a.tfvars"
    path.write_text('/* name = "other" */\nname = "catch"\nactor_hosts = 3\n')
    assert values_in(path, "name", "region") == {"name": "catch", "region": None}
