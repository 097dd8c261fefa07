"""`python -m deploy` against moto and stand-ins for its programs: from nothing to frames, and down."""

import re

import pytest

from tests.deploy import fake_tools
from tests.deploy.clone import BOOTSTRAP, CLUSTER, UP

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


WRONG = [
    (("status",), "no cluster is described here: `python -m deploy up smoke`"),
    (("up", "smok", "--yes"), "there is no plan smok: did you mean smoke? deploy/examples has "),
    (("up", "--yes"), "no cluster is described yet"),
    (("up", "smoke", "--yes"), "--email is missing"),
    (("scale", "2"), "nobody can answer here what Terraform asks: give --yes"),
    (("scale", "two"), "invalid int value: 'two'"),
    (("start",), "invalid choice: 'start'"),
    (("cost", "smoke", "--hours", "3"), "unrecognized arguments: --hours 3"),
]


def test_what_is_wrong_is_one_line_and_status_2(clone):
    for words, finding in WRONG:
        _, called = clone.run(*words, status=2)
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


def test_without_capacity_up_goes_on_in_the_next_zone_that_offers_all_types(clone):
    """Only before there were actor hosts, and not from a zone that somebody has named."""
    full, chosen = clone.directory / "tools" / "full", clone.cluster / "zone.auto.tfvars"
    full.write_text("us-east-1a us-east-1b")
    printed, called = clone.run(*UP, "--no-tunnel")
    apply = f"terraform {CLUSTER} apply -input=false -auto-approve"
    moves = [
        f"""echo 'availability_zone = "us-east-1{zone}"' > {chosen.relative_to(clone.directory)}""" for zone in "bc"
    ]
    shown = [line[2:] for line in printed.splitlines() if line.startswith("$ ")]
    moving = f"{apply} -replace=terraform_data.zone"
    assert shown[-5:] == [apply, moves[0], moving, moves[1], moving]
    assert [line for line in called if line.startswith(f"terraform {CLUSTER} apply")] == [apply, moving, moving]
    assert clone.said.count("InsufficientInstanceCapacity") == clone.said.count("sufficient g6.xlarge capacity") == 1
    assert "us-east-1c" in chosen.read_text()

    full.write_text("us-east-1c")
    _, called = clone.run(*UP, status=1)
    assert called[-1] == apply and "us-east-1c" in chosen.read_text()
    assert "no capacity in us-east-1c (the cluster's experience is there)" in clone.said.splitlines()[-1]
    kept = chosen.read_text()
    chosen.unlink()  # as in another clone: the state tells the zone
    clone.run(*UP, status=1)
    assert "no capacity in us-east-1c (the cluster's experience is there)" in clone.said.splitlines()[-1]
    chosen.write_text(kept.replace("us-east-1c", "us-east-1a"))
    _, called = clone.run(*UP, status=1)
    assert called[-1] == apply and "The cluster is in us-east-1c" in clone.said, "it moves by hand only"
    clone.run("down", "--yes")
    assert not chosen.exists()

    described = clone.cluster / "terraform.tfvars"
    text = described.read_text()
    described.write_text(f'{text}availability_zone = "us-east-1c"\n')
    full.write_text("us-east-1a us-east-1c")
    chosen.write_text('availability_zone = "us-east-1a"\n')  # of an `up` before somebody named one
    clone.run(*UP, status=1)
    assert not chosen.exists(), clone.said
    assert "(availability_zone names it; without it `up` tries others)" in clone.said.splitlines()[-1]

    described.write_text(text)
    full.write_text(" ".join(f"us-east-1{letter}" for letter in "abcdef"))
    clone.run(*UP, status=1)
    last = clone.said.splitlines()[-1]
    assert "no capacity in us-east-1a, us-east-1b, us-east-1c, us-east-1d, us-east-1f (no other zone offers all" in last
    assert "try again later, or give other learner_instance_types" in last and "`python -m deploy down`" in last
