"""`python -m deploy` against moto and stand-ins for its programs: from nothing to frames, and down."""

import contextlib
import re
import sys
from types import SimpleNamespace

import pytest

from deploy.cluster import read_cluster
from deploy.findings import Line
from deploy.keys import key_names
from deploy.steps import DeployError, StepError
from tests.deploy import fake_tools
from tests.deploy.clone import BOOTSTRAP, CLUSTER, UP
from tests.deploy.needed import with_terraform

pytestmark = pytest.mark.long("commands for EC2")

ROLE = "aws iam create-service-linked-role --aws-service-name"


def test_from_a_fresh_account_to_frames_and_down_again(clone, aws):
    # Terraform fails in the middle. Everything before it is done, and shown as a person would type it.
    clone.fail_once(f"{CLUSTER} apply")
    printed, called = clone.run(*UP, status=1)
    release = "--region us-east-1 build/release-v1.2.tar s3://apexrl-results-123456789012-us-east-1/releases/v1.2.tar"
    apply = f"terraform {CLUSTER} apply -input=false -auto-approve"
    init = f"terraform {CLUSTER} init -backend-config=backend.hcl -reconfigure -input=false"
    emails = """-var 'budget_emails=["you@example.com"]'"""
    given = f"-input=false -auto-approve -var region=us-east-1 {emails}"
    roles = [line for line in called if line.startswith(ROLE)]
    assert f"{ROLE} spot.amazonaws.com" in roles
    assert called == [
        *roles,
        f"terraform {BOOTSTRAP} init -input=false",
        f"terraform {BOOTSTRAP} apply {given}".replace("'", ""),
        init,
        f"aws s3 cp {release}",
        apply,
    ]
    assert "FAIL  release: there is no results bucket for releases/v1.2.tar yet" in printed
    shown = [line[2:] for line in printed.splitlines() if line.startswith("$ ")]
    assert shown == [
        "cp deploy/examples/smoke.tfvars deploy/terraform/cluster/terraform.tfvars",
        "python -m deploy preflight",
        *roles,
        "python -m deploy cost",
        f"terraform {BOOTSTRAP} init -input=false",
        f"terraform {BOOTSTRAP} apply {given}",
        f"terraform {BOOTSTRAP} output -raw cluster_backend > deploy/terraform/cluster/backend.hcl",
        f"terraform {BOOTSTRAP} output -raw cluster_tfvars > deploy/terraform/cluster/bootstrap.auto.tfvars",
        init,
        "python -m deploy keys --cluster apexrl-smoke --region us-east-1",
        "bash deploy/packer/release.sh v1.2 build/release-v1.2.tar",
        f"aws s3 cp {release}",
        "echo 'release = \"v1.2\"' > deploy/terraform/cluster/software.auto.tfvars",
        "python -m deploy preflight",
        apply,
    ]
    check_steps_tell_their_price(printed, release.rpartition(" ")[2], apply)
    stopped = f"up stopped: `{apply}` ended with status 1; see above. The same command goes on\n"
    assert clone.said == f"it fails\n{stopped}"
    assert 'key    = "cluster/apexrl-smoke.tfstate"' in (clone.cluster / "backend.hcl").read_text()

    # The same command goes on: only the rest is done.
    printed, called = clone.run(*UP)
    lookup, tunnel = "aws ec2 describe-instances", "aws ssm start-session --region us-east-1 --target i-1"
    assert called == [init, apply, lookup, tunnel]
    assert "frames arrive: 1,234 transitions (1%)" in printed and "http://127.0.0.1:6006" in printed

    printed, called = clone.run("status")
    assert not called and "runs until 2099-01-01T00:00:00Z" in printed and "1,234 transitions (1%)" in printed
    assert "replay 1 of 1, learner 1 of 1, actor 1 of 1" in printed

    # A learner has finished its run, and Terraform's files are lost: backend.hcl tells where the state is.
    ended = {"Name": "/apexrl/apexrl-smoke/deadline", "Value": "2026-11-22T10:00:00Z", "Type": "String"}
    aws.client("ssm").put_parameter(**ended, Overwrite=True)
    (clone.cluster / ".terraform").rmdir()
    printed, called = clone.run("status")
    assert called == [init] and "runs until 2026-11-22T10:00:00Z" in printed

    image = aws.client("ec2").register_image(Name="another")["ImageId"]
    found = aws.client("ec2").run_instances(ImageId=image, InstanceType="g6.4xlarge", MinCount=1, MaxCount=1)
    tags = {"Project": "apexrl", "Cluster": "apexrl-smoke", "Role": "learner", "Name": "apexrl-smoke-learner-1"}
    given = [{"Key": key, "Value": value} for key, value in tags.items()]
    aws.client("ec2").create_tags(Resources=[found["Instances"][0]["InstanceId"]], Tags=given)
    lines = clone.run("status")[0].splitlines()
    names = [line.split()[0] for line in lines if "  running  us-east-1" in line]
    assert names == ["replay", "learner", "learner-1", "actor"]

    printed, called = clone.run("scale", "3", "--yes")
    assert called == [f"terraform {CLUSTER} apply -input=false -auto-approve"]
    assert "actor 3 of 3" in clone.run("status")[0]
    clone.run("scale", "201", "--yes", status=2)
    told = "terraform.tfvars:11: actor_hosts has to be a whole number of hosts from 0 to 200. (var.actor_hosts is 201)"
    assert clone.said == f"cannot scale: {told}\n"
    assert "actor_hosts           = " not in (clone.cluster / "terraform.tfvars").read_text()
    assert "actor_hosts = 3\n" in (clone.cluster / "terraform.tfvars").read_text()

    assert clone.run("logs", "learner", "--since", "1h")[1] == [
        f"{fake_tools.OUTPUTS['logs_command']} --since 1h --log-stream-name-prefix learner/"
    ]

    check_no_other_takes_its_place(clone, init)


def check_steps_tell_their_price(printed, release, apply):
    """Before each step `up` says what it costs and how to undo it."""
    told = [line for line in printed.splitlines() if line.startswith("# ")]
    assert all(re.fullmatch(r"# .+\. It costs .+\. To undo it: .+", line) for line in told)
    assert [line[2:].partition(". It")[0] for line in told] == [
        *("AWS is asked about the account", "The buckets and the alarm about money", "The keys of the roles"),
        *("The release", "The hosts"),
    ]
    assert "at most 1.39 dollars an hour, and 1.39 until all end by themselves. To undo" in told[-1]
    assert f"{release}`" in told[-2] and printed.index(told[-1]) < printed.index(f"$ {apply}")


def check_no_other_takes_its_place(clone, init):
    """While it is up, no other cluster takes its place; afterwards one does, and its own description is kept."""
    described = clone.cluster / "terraform.tfvars"
    text = described.read_text()
    described.write_text(text.replace('"apexrl-smoke"', '"other"'))
    assert clone.run("up", "--yes", status=2)[1] == [init]
    assert "a cluster of another name than other is up (s3://bucket/apexrl-smoke/run-1/)" in clone.said
    described.write_text(text)
    clone.run("up", "192-actors", "--yes", status=2)
    assert "the cluster apexrl-smoke is up" in clone.said and clone.said.count("\n") == 1
    printed, called = clone.run("down", "--yes")
    assert called == [f"terraform {CLUSTER} destroy -input=false -auto-approve"]
    assert "The experience goes, too" in printed
    printed, called = clone.run("down", "--yes")
    assert printed == "apexrl-smoke: nothing is up\n" and not called
    clone.run("status", status=2)
    assert "no cluster is up from here" in clone.said
    printed, _ = clone.run("up", "192-actors", "--yes", status=2)  # the quotas are too low for it
    assert (clone.cluster / "apexrl-smoke.tfvars").read_text().endswith("actor_hosts = 3\n")
    assert not (clone.cluster / "software.auto.tfvars").exists()  # the new one begins with the commit of its day
    assert "vCPUs of on-demand G and VT instances: 16 wanted, 0 in use, 4 allowed" in clone.said
    assert "--request-quotas" in clone.said and clone.said.count("\n") == 1


@pytest.fixture
def commands(monkeypatch):
    """The package of the commands; what it would run goes into a list."""
    from deploy import frames, place, software, up

    monkeypatch.setenv("PATH", with_terraform()["PATH"])

    ran = []
    for module in (place, software, up):
        monkeypatch.setattr(module, "run", lambda *command, seconds: ran.append(" ".join(command)))
    monkeypatch.setattr(up, "run_and_hear", lambda *command, seconds: (ran.append(" ".join(command)), (0, ""))[1])
    return SimpleNamespace(frames=frames, place=place, software=software, up=up, ran=ran)


def test_images_are_built_where_somebody_wants_them_and_used_by_those_who_have_them(commands, monkeypatch, tmp_path):
    software, choice = commands.software, tmp_path / "software.auto.tfvars"
    monkeypatch.setattr(software, "ROOT", tmp_path)
    monkeypatch.setattr(commands.place, "ROOT", tmp_path)
    monkeypatch.setattr(software, "CHOICE", choice)
    monkeypatch.setattr(software, "must_read", lambda *_: "v1.2\n")
    fresh = read_cluster(given=("-var", "results_bucket=results"))
    for has_images, chosen, flags, kind, version in (
        (False, "", {}, "release", "v1.2"),
        (False, "", {"images": True}, "images", "v1.2"),
        (True, "", {}, "images", ""),
        (True, "v1.1", {}, "release", "v1.1"),
        (True, "v1.1", {"images": True}, "images", ""),
        (True, "", {"upgrade": True}, "release", "v1.2"),
        (True, "", {"images": True, "upgrade": True}, "images", "v1.2"),
    ):
        lines = [Line("image", "ami-1") if has_images else Line("image", "none", "packer build")]
        monkeypatch.setattr(software, "check_images", lambda _, lines=lines: lines)
        found = software.choose(fresh._replace(release=chosen), **{"images": False, "upgrade": False} | flags)
        assert (found.kind, found.version) == (kind, version), (has_images, chosen, flags)
    begun = fresh._replace(release="v1.1")
    choice.write_text('release = "v1.1"\n')
    software.provide(software.Software("release", "v1.1", is_there=True), begun)
    assert choice.exists() and not commands.ran
    software.provide(software.Software("images", "", is_there=True), begun)
    assert not choice.exists() and not commands.ran
    software.provide(software.Software("images", "v1.2", is_there=False), begun)
    build = "packer build -var version=v1.2 -var region=us-east-1 deploy/packer"
    assert commands.ran == ["packer init deploy/packer", build]
    assert choice.read_text() == 'image_version = "v1.2"\n'


def test_nothing_starts_without_a_yes_and_a_price(commands, monkeypatch, capsys):
    cluster = read_cluster()
    commands.up.ask(cluster, yes=True)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: False))
    with pytest.raises(DeployError, match="nobody can answer here whether to start this: give --yes"):
        commands.up.ask(cluster, yes=False)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    for answer, goes_on in (("y", True), ("", False), ("no", False)):
        monkeypatch.setattr("builtins.input", lambda _, answer=answer: answer)
        with contextlib.nullcontext() if goes_on else pytest.raises(DeployError, match="not started"):
            commands.up.ask(cluster, yes=False)
    assert capsys.readouterr().out.count("apexrl: US dollars") == 5
    with pytest.raises(DeployError, match="no on_demand price of x1"):
        commands.up.ask(cluster._replace(replay_instance_type="x1"), yes=True)


def test_a_region_that_another_file_overrules_is_refused(commands, monkeypatch, tmp_path):
    described = tmp_path / "terraform.tfvars"
    monkeypatch.setattr(commands.up.place, "VARIABLES", described)
    described.write_text('name = "apexrl"\n')
    commands.up.check_region("us-east-1")
    described.write_text('region = "eu-west-1"\n')
    commands.up.check_region("eu-west-1")
    with pytest.raises(DeployError, match="asks for eu-west-1, and a file that overrules it for us-east-1"):
        commands.up.check_region("us-east-1")


WRONG = [
    (("status",), {}, "no cluster is described here: `python -m deploy up smoke`"),
    (("up", "smok", "--yes"), {}, "there is no plan smok: did you mean smoke? deploy/examples has "),
    (("up", "--yes"), {}, "no cluster is described yet"),
    (("up", "smoke", "--yes"), {}, "--email is missing"),
    (("up", "smoke", "--email", "me"), {}, "--email me: an address such as you@example.com"),
    (UP, {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, "no AWS credentials"),
    (("scale", "2"), {}, "nobody can answer here what Terraform asks: give --yes"),
    (("scale", "two"), {}, "invalid int value: 'two'"),
    (("start",), {}, "invalid choice: 'start'"),
    (("cost", "smoke", "--hours", "3"), {}, "unrecognized arguments: --hours 3"),
    (("cost", "smoke", "--updates-per-second", "0"), {}, "--updates-per-second 0: a positive number is needed"),
]


def test_what_is_wrong_is_one_line_and_status_2(clone):
    for words, environment, finding in WRONG:
        _, called = clone.run(*words, status=2, **environment)
        assert finding in clone.said and clone.said.count("\n") == 1, (words, clone.said)
        assert not [line for line in called if not line.startswith("aws iam")], (words, called)
    few = fake_tools.install(clone.directory / "tools" / "few", ("terraform", "aws"))
    clone.run(*UP, status=2, PATH=few["PATH"])
    assert "not installed: session-manager-plugin (https://docs.aws" in clone.said and clone.said.count("\n") == 1


def test_the_price_of_a_plan_is_told(clone):
    printed, _ = clone.run("cost", "smoke", "--updates-per-second", "100")
    assert "apexrl-smoke: US dollars" in printed and "a learner of 100 updates/s of 64 takes 2,560 " in printed
    alone, _ = clone.run("cost", "64-actors")
    (clone.cluster / "terraform.tfvars").write_bytes((clone.directory / "deploy/examples/smoke.tfvars").read_bytes())
    assert clone.run("cost", "64-actors")[0] == alone  # nothing of the cluster that is described
    assert "apexrl-smoke: US dollars" in clone.run("cost")[0]


def test_a_wait_for_frames_ends(commands, monkeypatch, capsys):
    frames = commands.frames
    summaries = [(0, ""), (0, "0 transitions (0%); ..."), (64, "64 transitions (0%); ...")]
    monkeypatch.setattr(frames, "newest_summary", lambda _: summaries.pop(0) if summaries else (0, ""))
    monkeypatch.setattr(frames, "standing", lambda _: "replay 1 of 1")
    monkeypatch.setattr(frames, "POLL_SECONDS", 0.0)
    cluster = SimpleNamespace(region="us-east-1")
    frames.wait_for_frames(cluster, minutes=1)
    assert capsys.readouterr().out == (
        "waiting for the first frames: hosts that run: replay 1 of 1 (at most 1 minutes)\n"
        "frames arrive: 64 transitions (0%); ...\n"
    )
    told = "no frames within 0 minutes, and the hosts cost on: `python -m deploy logs`"
    with pytest.raises(StepError, match=told):
        frames.wait_for_frames(cluster, minutes=0)


def test_terraform_asks_about_a_cluster_that_is_up_and_starts_one_whose_time_is_over(commands, monkeypatch):
    up = commands.up
    for is_up, yes, deadline, arguments in (
        (False, False, "", " -input=false -auto-approve"),
        (True, True, "2099-01-01T00:00:00Z", " -input=false -auto-approve"),
        (True, False, "2099-01-01T00:00:00Z", ""),
        (True, False, "2026-01-01T00:00:00Z", " -replace=terraform_data.deadline"),
        (True, True, "2026-01-01T00:00:00Z", " -input=false -auto-approve -replace=terraform_data.deadline"),
    ):
        monkeypatch.setattr(up.place, "exists", lambda is_up=is_up: is_up)
        monkeypatch.setattr(up.place, "outputs", lambda deadline=deadline: {"deadline": deadline})
        up.apply(yes)
        assert commands.ran.pop() == f"terraform {CLUSTER} apply{arguments}"


def test_only_the_state_of_the_same_cluster_is_gone_on_with(commands, monkeypatch, tmp_path):
    up, held = commands.up, tmp_path / "backend.hcl"
    monkeypatch.setattr(up, "BACKEND", held)
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


def test_keys_of_a_cluster_that_is_up_are_never_changed(commands, monkeypatch, capsys):
    """What is missing is said, and made alone; not a secret key, which would differ from that of the hosts."""
    up, names = commands.up, key_names("smoke")
    cluster = SimpleNamespace(name="smoke", region="us-east-1")
    made, stored = [], {}
    monkeypatch.setattr(up, "client", lambda *_: None)
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
        monkeypatch.setattr(commands.place, "exists", lambda is_up=is_up: is_up)
        told = pytest.raises(DeployError, match=r"^/apexrl/smoke/keys/replay.secret missing, and hosts that run know")
        with told if makes is None else contextlib.nullcontext():
            up.make_keys(cluster)
        assert made == (["smoke"] if makes else [])
        assert not makes or f"missing: {', '.join(missing)}\n" in capsys.readouterr().out


def test_outputs_that_are_not_there_yet_are_one_line(commands, monkeypatch):
    from deploy import commands as others

    monkeypatch.setattr(others, "require", lambda *_: None)
    monkeypatch.setattr(commands.place, "described", lambda: None)
    monkeypatch.setattr(commands.place, "outputs", lambda: {"results": "s3://results/smoke/run-1/"})
    for command in (others.watch, others.logs):
        with pytest.raises(DeployError, match="`up` has not come to its end"):
            command(SimpleNamespace(role="", since="10m"))


def test_quotas_are_asked_for_where_somebody_says_so(commands, monkeypatch):
    up = commands.up
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
        monkeypatch.setattr(up, "failures", lambda _, request_quotas, found=found: found)
        with told:
            up.check_account(None, asks)
    assert not commands.ran
