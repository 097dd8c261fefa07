"""Steps of `python -m deploy up`, each alone."""

import contextlib
import sys
from types import SimpleNamespace

import boto3
import pytest
from botocore.stub import Stubber

from deploy import commands, findings, steps
from deploy.cluster import read_cluster
from deploy.findings import Line
from deploy.keys import key_names
from deploy.steps import DeployError, StepError
from tests.deploy.clone import CLUSTER
from tests.deploy.needed import with_terraform

pytestmark = pytest.mark.long("commands for EC2")


@pytest.fixture
def up(monkeypatch):
    """The module of `up`; what it would run goes into the list `up.ran`."""
    from deploy import up

    monkeypatch.setenv("PATH", with_terraform()["PATH"])
    monkeypatch.setattr(up, "ran", ran := [], raising=False)
    monkeypatch.setattr(up, "run", lambda *command, seconds: ran.append(" ".join(command)))
    return up


def test_images_are_built_where_somebody_wants_them_and_used_by_those_who_have_them(up, monkeypatch, tmp_path):
    choice = tmp_path / "software.auto.tfvars"
    for module in (up, up.place):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(up, "CHOICE", choice)
    monkeypatch.setattr(up, "must_read", lambda *_: "v1.2\n")
    fresh = read_cluster(given=("-var", "results_bucket=results"))
    build = ["packer init deploy/packer", "packer build -var version=v1.2 -var region=us-east-1 deploy/packer"]
    target = "build/release-v1.2.tar s3://results/releases/v1.2.tar"
    release = ["bash deploy/packer/release.sh v1.2 build/release-v1.2.tar", f"aws s3 cp --region us-east-1 {target}"]
    for there, chosen, flags, ran, left in (
        (False, "", (False, False), release, 'release = "v1.2"\n'),
        (False, "", (True, False), build, 'image_version = "v1.2"\n'),
        (True, "", (False, False), [], None),
        (True, "v1.1", (False, False), [], 'release = "v1.1"\n'),
        (True, "v1.1", (True, False), [], None),
        (True, "", (False, True), release, 'release = "v1.2"\n'),
        (True, "", (True, True), build, 'image_version = "v1.2"\n'),
    ):
        monkeypatch.setattr(up, "has_images", lambda _, there=there: there)
        choice.unlink(missing_ok=True)
        if chosen:
            choice.write_text(f'release = "{chosen}"\n')
        up.ran.clear()
        up.provide_software(fresh._replace(release=chosen), *flags)
        found = choice.read_text() if choice.exists() else None
        assert (up.ran, found) == (ran, left), (there, chosen, flags)


def test_images_of_one_version_are_used(aws, monkeypatch):
    ec2 = aws.client("ec2")
    monkeypatch.setattr(findings, "client", lambda *_: ec2)
    for role, version, newest, chosen in (
        ("cpu", "v1", False, False),
        ("gpu", "v1", True, True),
        ("gpu", "v2", False, True),
    ):
        image = ec2.register_image(Name=f"apexrl-{role}-{version}")["ImageId"]
        tags = {"Project": "apexrl", "Role": role, "Version": version}
        ec2.create_tags(Resources=[image], Tags=[{"Key": key, "Value": value} for key, value in tags.items()])
        clusters = [SimpleNamespace(region="us-east-1", image_version=wanted) for wanted in ("latest", "v1")]
        found = list(map(findings.has_images, clusters))
        assert found == [newest, chosen], (role, version)


def test_nothing_starts_without_a_yes_and_a_price(up, monkeypatch, capsys):
    cluster = read_cluster()
    up.ask(cluster, yes=True)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: False))
    with pytest.raises(DeployError, match="nobody can answer here whether to start this: give --yes"):
        up.ask(cluster, yes=False)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    for answer, goes_on in (("y", True), ("", False), ("no", False)):
        monkeypatch.setattr("builtins.input", lambda _, answer=answer: answer)
        with contextlib.nullcontext() if goes_on else pytest.raises(DeployError, match="not started"):
            up.ask(cluster, yes=False)
    assert capsys.readouterr().out.count("apexrl: US dollars") == 5
    with pytest.raises(DeployError, match="no on_demand price of x1"):
        up.ask(cluster._replace(replay_instance_type="x1"), yes=True)


def test_a_region_that_another_file_overrules_is_refused_and_a_zone_that_is_named_is_heeded(up, monkeypatch, tmp_path):
    described, chosen = tmp_path / "terraform.tfvars", tmp_path / "zone.auto.tfvars"
    monkeypatch.setattr(up.place, "VARIABLES", described)
    monkeypatch.setattr(up.place, "ZONE", chosen)
    monkeypatch.setattr(up.place, "described", lambda: SimpleNamespace(region="us-east-1"))
    chosen.touch()
    for text, is_kept in (('name = "apexrl"\n', True), ('availability_zone = "us-east-1c"\n', False)):
        described.write_text(text)
        assert up.heed_description().region == "us-east-1" and chosen.exists() == is_kept
    described.write_text('region = "eu-west-1"\n')
    with pytest.raises(DeployError, match="asks for eu-west-1, and a file that overrules it for us-east-1"):
        up.heed_description()


def test_a_wait_for_frames_ends(monkeypatch, capsys):
    summaries = [(0, ""), (0, "0 transitions (0%); ..."), (64, "64 transitions (0%); ...")]
    monkeypatch.setattr(commands, "newest_summary", lambda _: summaries.pop(0) if summaries else (0, ""))
    monkeypatch.setattr(commands, "standing", lambda _: "replay 1 of 1")
    monkeypatch.setattr(commands, "POLL_SECONDS", 0.0)
    cluster = SimpleNamespace(region="us-east-1")
    commands.wait_for_frames(cluster, minutes=1)
    assert capsys.readouterr().out == (
        "waiting for the first frames: hosts that run: replay 1 of 1 (at most 1 minutes)\n"
        "frames arrive: 64 transitions (0%); ...\n"
    )
    told = "no frames within 0 minutes, and the hosts cost on: `python -m deploy logs`"
    with pytest.raises(StepError, match=told):
        commands.wait_for_frames(cluster, minutes=0)


def test_terraform_asks_about_a_cluster_that_is_up_and_starts_one_whose_time_is_over(up, monkeypatch):
    for is_up, yes, deadline, arguments in (
        (False, False, "", " -input=false -auto-approve"),
        (True, True, "2099-01-01T00:00:00Z", " -input=false -auto-approve"),
        (True, False, "2099-01-01T00:00:00Z", ""),
        (True, False, "2026-01-01T00:00:00Z", " -replace=terraform_data.deadline"),
        (True, True, "2026-01-01T00:00:00Z", " -input=false -auto-approve -replace=terraform_data.deadline"),
    ):
        monkeypatch.setattr(up.place, "exists", lambda is_up=is_up: is_up)
        monkeypatch.setattr(up.place, "outputs", lambda deadline=deadline: {"deadline": deadline})
        monkeypatch.setattr(up.place, "zone", str)
        monkeypatch.setattr(up.place, "described", lambda: SimpleNamespace(availability_zone=""))
        up.apply(yes)
        assert up.ran.pop() == f"terraform {CLUSTER} apply{arguments}"


def test_a_cluster_moves_to_the_zone_that_is_asked_for_while_it_has_no_experience(up, monkeypatch):
    monkeypatch.setattr(up.place, "exists", lambda: True)
    monkeypatch.setattr(up.place, "outputs", dict)
    for held, asked, may_hold, argument in (
        ("", "us-east-1b", False, ""),
        ("us-east-1a", "", False, ""),
        ("us-east-1a", "us-east-1a", False, ""),
        ("us-east-1a", "us-east-1b", False, " -replace=terraform_data.zone"),
        ("us-east-1a", "us-east-1b", True, ""),  # Terraform refuses it, and says how it is done
    ):
        monkeypatch.setattr(up.place, "zone", lambda held=held: held)
        monkeypatch.setattr(up.place, "described", lambda asked=asked: SimpleNamespace(availability_zone=asked))
        monkeypatch.setattr(up.place, "may_hold_experience", lambda may_hold=may_hold: may_hold)
        up.apply(False)
        assert up.ran.pop() == f"terraform {CLUSTER} apply{argument}"


def test_only_the_state_of_the_same_cluster_is_gone_on_with(up, monkeypatch, tmp_path):
    held = tmp_path / "backend.hcl"
    monkeypatch.setattr(up, "BACKEND", held)
    monkeypatch.setattr(up.place, "initialize", lambda: None)
    own, common = 'key    = "cluster/smoke.tfstate"\n', ""
    for key, results, is_same in (
        (common, "s3://results/smoke/run-1/", True),
        (own, "s3://results/smoke/run-1/", True),
        (own, "", True),  # its start, or its end, was interrupted
        (common, "", False),
        (common, "s3://results/other/run-1/", False),
        (own, "s3://results/other/run-1/", False),
    ):
        held.write_text(key)
        monkeypatch.setattr(up.place, "exists", lambda: True)
        monkeypatch.setattr(up.place, "outputs", lambda results=results: {"results": results} if results else {})
        told = pytest.raises(DeployError, match="a cluster of another name than smoke is up")
        with contextlib.nullcontext() if is_same else told:
            up.initialize("smoke")
        assert held.read_text() == key


def test_keys_of_a_cluster_that_is_up_are_never_changed(up, monkeypatch, capsys):
    """A missing parameter is named, and made alone; not a secret key, which would differ from that of the hosts."""
    names = key_names("smoke")
    cluster = SimpleNamespace(name="smoke", region="us-east-1")
    made, stored = [], {}
    monkeypatch.setattr(up, "stored_keys", lambda *_: stored)
    monkeypatch.setattr(up, "store_keys", lambda _, name: made.append(name))
    for is_up, missing, makes in (
        (True, [], False),
        (False, names, True),
        (False, names[1:], True),  # an earlier start was stopped between two keys
        (True, names[:1], True),
        (True, names[1:2], None),
    ):
        made.clear()
        stored = dict.fromkeys((name for name in names if name not in missing), "SecureString")
        monkeypatch.setattr(up.place, "exists", lambda is_up=is_up: is_up)
        told = pytest.raises(DeployError, match=r"^/apexrl/smoke/keys/replay.secret missing, and hosts that run know")
        with told if makes is None else contextlib.nullcontext():
            up.make_keys(cluster)
        assert made == (["smoke"] if makes else [])
        assert not makes or f"missing: {', '.join(missing)}\n" in capsys.readouterr().out


def test_outputs_that_are_not_there_yet_are_one_line(monkeypatch):
    monkeypatch.setattr(commands, "require", lambda *_: None)
    monkeypatch.setattr(commands.place, "described", lambda: None)
    monkeypatch.setattr(commands.place, "outputs", lambda: {"results": "s3://results/smoke/run-1/"})
    for command in (commands.watch, commands.logs):
        with pytest.raises(DeployError, match="`up` has not come to its end"):
            command(SimpleNamespace(role="", since="10m"))


def test_quotas_are_asked_for_where_somebody_says_so(up, monkeypatch):
    request = "aws service-quotas request-service-quota-increase --service-code ec2 --quota-code L-DB2E81BA"
    cure = f"{request} --desired-value 16 --region us-east-1"
    low = Line("quota", "16 wanted, 0 in use, 0 allowed", f"{cure} (hours to days)")
    other = Line("zone", "no zone offers all types", "replace the rarest type")
    for found, asks, told in (
        ([low], True, pytest.raises(StepError, match="it writes when they are granted")),
        ([low, other], True, pytest.raises(DeployError, match=r"^zone: no zone offers all types \(replace the rarest")),
        ([low], False, pytest.raises(DeployError, match=r"with --request-quotas, which asks AWS$")),
        ([], False, contextlib.nullcontext()),
    ):
        monkeypatch.setattr(up, "failures", lambda *_, found=found: found)
        with told:
            up.check_account(None, asks)
    assert not up.ran


def test_a_bucket_of_somebody_else_is_not_used(up, monkeypatch):
    s3 = boto3.client("s3", region_name="us-east-1", aws_access_key_id="a", aws_secret_access_key="b")
    monkeypatch.setattr(up, "client", lambda *_: s3)
    monkeypatch.setattr(up, "account_of", lambda _: {"Account": "123456789012"})
    asked = {"Bucket": "results", "ExpectedBucketOwner": "123456789012"}
    with Stubber(s3) as stub:
        stub.add_response("head_bucket", {}, asked)
        assert up.bucket_is_ours("results", "us-east-1")
        stub.add_client_error("head_bucket", "404", expected_params=asked)
        assert not up.bucket_is_ours("results", "us-east-1")
        stub.add_client_error("head_bucket", "403", expected_params=asked)
        with pytest.raises(DeployError, match="the bucket results belongs to somebody else"):
            up.bucket_is_ours("results", "us-east-1")


def test_errors_of_a_command_are_heard_and_shown(capfd):
    """Its output, in which it may ask, goes to the terminal as it is."""
    with pytest.raises(StepError, match="ended with status 3") as raised:
        steps.run("sh", "-c", "printf 'Enter a value: '; echo no >&2; exit 3", seconds=60.0)
    shown = capfd.readouterr()
    assert raised.value.heard == shown.err == "no\n" and shown.out.endswith("Enter a value: ")
    steps.run("true", seconds=60.0)
    with pytest.raises(StepError, match="did not end within 0 s, and was interrupted"):
        steps.run("sleep", "60", seconds=0.1)


def test_a_description_that_was_set_aside_comes_back(up, monkeypatch, tmp_path):
    place = up.place
    for name, file in (("VARIABLES", "terraform"), ("CHOICE", "software.auto"), ("ZONE", "zone.auto")):
        monkeypatch.setattr(place, name, tmp_path / f"{file}.tfvars")
    place.ZONE.touch()
    monkeypatch.setattr(place, "exists", lambda: False)
    place.describe("smoke")
    place.VARIABLES.write_text(place.VARIABLES.read_text() + "seed = 3\n")
    mine = place.VARIABLES.read_text()
    place.describe("64-actors")
    assert not place.ZONE.exists(), "another cluster begins in the first zone"
    assert place.VARIABLES.read_text() == (place.EXAMPLES / "64-actors.tfvars").read_text()
    place.describe("smoke")
    assert place.VARIABLES.read_text() == mine
