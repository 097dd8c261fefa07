"""Terraform itself on the unmodified configurations: from fmt to destroy."""

import datetime
import json
import re
import shlex

import pytest

from tests.deploy.commands import ran
from tests.deploy.moto_process import Aws
from tests.deploy.needed import find_terraform
from tests.deploy.terraform import BUCKET, TERRAFORM, Workspace, changes_in, resources, templates

pytestmark = pytest.mark.long("changes of a cluster")

STATE_BUCKET = "apexrl-state-123456789012-us-east-1"
STATE = "cluster/apexrl.tfstate"
GIVEN = {"results_bucket": BUCKET}
OF_A_NEW_REPLAY_HOST = {
    "aws_instance.replay": ["delete", "create"],
    "aws_scheduler_schedule.replay_limit": ["update"],
    "aws_cloudwatch_metric_alarm.hangs": ["update"],
}
"""The changes of a plan that replaces the host: also those of all that knows its number."""


def test_a_cluster_from_init_to_destroy(terraform_environment, aws_process: Aws, tmp_path):
    """With the real backend: the state lies in S3, as moto serves it. What somebody else does to it is waited for."""
    store = aws_process.client("s3")
    store.create_bucket(Bucket=STATE_BUCKET)
    workspace = with_remote_state(aws_process, terraform_environment, tmp_path)
    workspace.must("validate")
    lock = {"ID": "1", "Operation": "OperationTypeApply", "Who": "me@elsewhere", "Created": "2026-01-01T00:00:00Z"}
    store.put_object(Bucket=STATE_BUCKET, Key=f"{STATE}.tflock", Body=json.dumps(lock))
    workspace.give(GIVEN)
    refused = workspace.run("apply", "-auto-approve", "-input=false")
    assert refused.returncode == 1 and "Error acquiring the state lock" in refused.stderr, refused.stderr
    assert "me@elsewhere" in refused.stderr
    store.delete_object(Bucket=STATE_BUCKET, Key=f"{STATE}.tflock")
    assert len(resources(workspace.apply(GIVEN))) > 50
    again = workspace.run("plan", "-input=false", "-detailed-exitcode")
    assert again.returncode == 0, again.stdout
    stored = store.list_objects_v2(Bucket=STATE_BUCKET)["Contents"]
    assert [entry["Key"] for entry in stored] == [STATE]  # and no lock is left
    assert "0 added, 0 changed" in workspace.must("apply", "-auto-approve")
    workspace.must("destroy", "-auto-approve")
    assert "values" not in json.loads(workspace.must("show", "-json"))


def with_remote_state(aws: Aws, environment: dict[str, str], directory) -> Workspace:
    """Returns a cluster whose state is in a bucket, initialized as the README says."""
    settings = {name: value for name, value in aws.environment.items() if name.startswith("AWS_")}
    workspace = Workspace("cluster", directory, environment | settings, local_state=False)
    (workspace.directory / "backend.hcl").write_text(f'bucket = "{STATE_BUCKET}"\nregion = "us-east-1"\n')
    for_moto = ("skip_credentials_validation", "skip_requesting_account_id", "use_path_style")
    workspace.must("init", "-backend-config=backend.hcl", *[f"-backend-config={name}=true" for name in for_moto])
    return workspace


def test_what_bootstrap_makes_outlives_destroy(applied_bootstrap):
    workspace = applied_bootstrap
    workspace.must("validate")
    found = resources(workspace.state())
    assert workspace.run("plan", "-detailed-exitcode").returncode == 0
    for purpose in ("state", "results"):
        key = f'["{purpose}"]'
        assert found[f"aws_s3_bucket.this{key}"]["bucket"] == f"apexrl-{purpose}-123456789012-us-east-1"
        access = found[f"aws_s3_bucket_public_access_block.this{key}"]
        assert all(value for name, value in access.items() if name.startswith(("block_", "ignore_", "restrict_")))
        assert found[f"aws_s3_bucket_versioning.this{key}"]["versioning_configuration"][0]["status"] == "Enabled"
        [statement] = json.loads(found[f"aws_s3_bucket_policy.this{key}"]["policy"])["Statement"]
        assert statement["Effect"] == "Deny" and statement["Condition"] == {"Bool": {"aws:SecureTransport": "false"}}
    letters = [
        (one["threshold"], one["notification_type"]) for one in found["aws_budgets_budget.month[0]"]["notification"]
    ]
    assert sorted(letters) == [(50, "ACTUAL"), (80, "ACTUAL"), (100, "ACTUAL"), (100, "FORECASTED")]
    refused = workspace.run("destroy", "-auto-approve")
    assert refused.returncode == 1 and "Instance cannot be destroyed" in refused.stderr
    assert f'bucket = "{STATE_BUCKET}"' in workspace.must("output", "-raw", "cluster_backend")
    variables = workspace.must("output", "-raw", "cluster_tfvars")
    assert f'results_bucket = "{BUCKET}"' in variables and 'region         = "us-east-1"' in variables


def test_what_bootstrap_prints_is_what_the_cluster_wants(applied_bootstrap, cluster, tmp_path):
    workspace = cluster.copy(tmp_path)
    printed = applied_bootstrap.must("output", "-raw", "cluster_tfvars")
    (workspace.directory / "bootstrap.auto.tfvars").write_text(printed)
    workspace.must("plan", "-input=false")


def test_new_flags_replace_only_the_hosts_of_their_role(applied_cluster, tmp_path):
    workspace = applied_cluster.copy(tmp_path)
    changed = {
        "learner_flags": {f"aws_{name}.learner[0]": ["update"] for name in ("launch_template", "autoscaling_group")},
        "replay_flags": OF_A_NEW_REPLAY_HOST | {"aws_volume_attachment.journal": ["delete", "create"]},
        "actor_flags": {"aws_launch_template.actor": ["update"], "aws_autoscaling_group.actor": ["update"]},
        "actor_hosts": {"aws_autoscaling_group.actor": ["update"]},
    }
    values = {
        "learner_flags": {"batch_size": 256},
        "replay_flags": {"capacity": 1000000},
        "actor_flags": {"environment_groups": 3},
        "actor_hosts": 12,
    }
    for name, expected in changed.items():
        assert workspace.changes(GIVEN | {name: values[name]}) == expected, name


def test_a_new_run_has_no_actors_of_the_run_before(applied_cluster, tmp_path):
    """They would greet the new replay server first, whose log then has their stream. Their group has a time limit."""
    workspace = applied_cluster.copy(tmp_path)
    given = GIVEN | {"run": "run-2", "env": "ALE/Breakout-v5"}
    planned = workspace.changes(given)
    group, limit, host = "aws_autoscaling_group.actor", "aws_autoscaling_schedule.limit", "aws_instance.replay"
    assert [planned[address] for address in (group, limit, host)] == [["delete", "create"]] * 3
    assert planned["aws_autoscaling_group.learner[0]"] == ["update"]
    assert "terraform_data.experience" not in planned and "aws_ebs_volume.journal" not in planned
    told = workspace.must("apply", "-input=false", "-auto-approve").splitlines()
    ends = (f"{group}: Destruction complete", f"{host}: Destroying", f"{host}: Creation complete", f"{group}: Creating")
    assert [next(end for end in ends if end in line) for line in told if any(end in line for end in ends)] == [*ends]
    assert workspace.changes(given) == {}


def test_more_time_replaces_no_host(applied_cluster, tmp_path):
    limits = ("autoscaling_schedule.limit", "autoscaling_schedule.learner_limit[0]", "scheduler_schedule.replay_limit")
    expected = {f"aws_{name}": ["update"] for name in (*limits, "ssm_parameter.deadline")}
    expected["terraform_data.deadline"] = ["delete", "create"]
    assert applied_cluster.copy(tmp_path).changes(GIVEN | {"max_hours": 48}) == expected


def test_a_lost_replay_host_gets_its_journal_again(applied_cluster, applied, tmp_path):
    workspace = applied_cluster.copy(tmp_path)
    for address in ("aws_instance.replay", "aws_volume_attachment.journal"):  # both are gone when a host is
        workspace.must("state", "rm", address)
    planned = workspace.changes(GIVEN)
    created = {address for address, what in planned.items() if what == ["create"]}
    assert created == {"aws_instance.replay", "aws_volume_attachment.journal"}
    assert planned.keys() - created == OF_A_NEW_REPLAY_HOST.keys() - created
    found = resources(workspace.apply(GIVEN))
    journal = resources(applied)["aws_ebs_volume.journal"]["id"]
    attachment = found["aws_volume_attachment.journal"]
    assert attachment["volume_id"] == found["aws_ebs_volume.journal"]["id"] == journal
    assert attachment["instance_id"] == found["aws_instance.replay"]["id"]
    assert attachment["stop_instance_before_detaching"]
    assert workspace.run("plan", "-input=false", "-detailed-exitcode").returncode == 0


def test_new_images_wait_until_they_are_asked_for(applied_cluster, tmp_path):
    workspace = applied_cluster.copy(tmp_path)
    path = workspace.directory / "terraform.tfstate"
    state = path.read_text()
    for newer, older in (("c100", "c090"), ("a100", "a090"), ("1.0.0", "0.9.0")):
        assert newer in state
        state = state.replace(newer, older)
    path.write_text(state)  # as if the cluster had been started before version 1.0.0 was built
    assert workspace.changes(GIVEN) == {}
    # Other flags replace a host, by one of the same image.
    planned = workspace.planned(GIVEN | {"learner_flags": {"batch_size": 256}})
    assert resources(planned)["aws_launch_template.learner[0]"]["image_id"] == "ami-0000000000000a090"
    for version in ("latest", "1.0.0"):
        planned = workspace.changes(GIVEN | {"image_version": version})
        assert planned["aws_instance.replay"] == ["delete", "create"], version
        assert planned["aws_autoscaling_group.learner[0]"] == ["update"], version
    assert workspace.changes(GIVEN | {"image_version": "0.9.0"}).keys() == {"terraform_data.images"}
    workspace.apply(GIVEN | {"image_version": "latest"})
    assert workspace.changes(GIVEN).keys() == {"terraform_data.images"}, "the same images: nothing is replaced"
    assert workspace.must("output", "-raw", "image_version") == "1.0.0"


def test_an_image_of_a_cluster_that_is_gone_is_told(applied_cluster, tmp_path):
    workspace = applied_cluster.copy(tmp_path)
    path = workspace.directory / "terraform.tfstate"
    path.write_text(path.read_text().replace("ami-0000000000000c100", "ami-0000000000000c080"))
    refused = workspace.plan(GIVEN)
    assert refused.returncode == 1 and "which the cluster was started with, are gone from us-east-1" in refused.stderr
    assert 'set image_version to one that is there, or to "latest"' in refused.stderr


def test_actor_hosts_wait_for_replay_and_learner():
    """Where EC2 has no GPU to give, nothing is started that would only cost."""
    text = (TERRAFORM / "cluster" / "actors.tf").read_text()
    named = set(re.findall(r"[\w.]+", text.rpartition("depends_on")[2]))
    assert {"aws_instance.replay", "aws_autoscaling_group.learner"} <= named


def test_the_time_limit_passes_and_starts_again(cluster, tmp_path):
    workspace = cluster.copy(tmp_path)
    given = GIVEN | {"max_hours": 5}
    before = datetime.datetime.now(datetime.UTC)
    state = workspace.apply(given)
    found = resources(state)
    deadline = datetime.datetime.fromisoformat(found["terraform_data.deadline"]["output"])
    assert datetime.timedelta(0) <= deadline - before.replace(microsecond=0) - datetime.timedelta(hours=5)
    assert deadline - datetime.datetime.now(datetime.UTC) <= datetime.timedelta(hours=5)
    assert datetime.datetime.fromisoformat(found["aws_ssm_parameter.deadline"]["value"]) == deadline
    for limit, group in (("limit", "apexrl-actor"), ("learner_limit[0]", "apexrl-learner")):
        schedule = found[f"aws_autoscaling_schedule.{limit}"]
        assert schedule["autoscaling_group_name"] == group
        assert datetime.datetime.fromisoformat(schedule["start_time"]) == deadline
        assert (schedule["min_size"], schedule["max_size"], schedule["desired_capacity"]) == (0, 0, 0)
    host, ending = found["aws_instance.replay"], found["aws_scheduler_schedule.replay_limit"]
    at = re.fullmatch(r"at\((.*)\)", ending["schedule_expression"])[1]
    assert datetime.datetime.fromisoformat(f"{at}Z") == deadline + datetime.timedelta(minutes=10)
    [target] = ending["target"]
    assert json.loads(target["input"]) == {"InstanceIds": [host["id"]]}
    assert is_call_of_ec2(target["arn"], json.loads(target["input"]))
    ends = [made["instance_initiated_shutdown_behavior"] for made in (host, *templates(state).values())]
    assert ends == ["terminate"] * 3

    text = (workspace.directory / "terraform.tfstate").read_text()
    past = text.replace(deadline.strftime("%Y-%m-%dT%H:%M:%SZ"), "2026-01-01T00:00:00Z")
    assert past != text
    (workspace.directory / "terraform.tfstate").write_text(past)
    refused = workspace.plan(given)
    assert refused.returncode == 1 and "The time limit of max_hours passed at 2026-01-01T00:00:00Z" in refused.stderr
    assert "terraform -chdir=deploy/terraform/cluster apply -replace=terraform_data.deadline" in refused.stderr
    state = workspace.apply(given, "-replace=terraform_data.deadline")
    again = datetime.datetime.fromisoformat(resources(state)["terraform_data.deadline"]["output"])
    assert again >= deadline
    (workspace.directory / "terraform.tfstate").write_text(past)
    workspace.must("destroy", "-auto-approve")  # also after the limit


def is_call_of_ec2(arn: str, parameters: dict) -> bool:
    """Returns whether a universal target of the scheduler is a call that EC2 knows."""
    import botocore.session

    call = arn.removeprefix("arn:aws:scheduler:::aws-sdk:ec2:")
    service = botocore.session.get_session().get_service_model("ec2")
    return parameters.keys() <= service.operation_model(call[0].upper() + call[1:]).input_shape.members.keys()


@pytest.mark.parametrize(
    ("given", "arguments"), [({"image_version": "7.0.0"}, ()), ({"results_bucket": "deleted"}, ("-refresh=false",))]
)
def test_a_cluster_whose_images_or_bucket_are_gone_can_be_destroyed(applied_cluster, tmp_path, given, arguments):
    workspace = applied_cluster.copy(tmp_path)
    workspace.give(GIVEN | given)
    workspace.must("destroy", "-auto-approve", *arguments)


def test_the_zone_is_kept(applied_cluster, applied, tmp_path):
    workspace = applied_cluster.copy(tmp_path)
    assert resources(applied)["aws_subnet.this[0]"]["availability_zone"] == "us-east-1a"
    state = (workspace.directory / "terraform.tfstate").read_text()
    (workspace.directory / "terraform.tfstate").write_text(state.replace("us-east-1a", "us-east-1e"))
    refused = workspace.plan(GIVEN)  # as if AWS offered less there than before
    assert refused.returncode == 1 and "The cluster is in us-east-1e, which does not offer" in refused.stderr
    assert "terraform -chdir=deploy/terraform/cluster apply -replace=terraform_data.zone" in refused.stderr


def test_the_zone_is_kept_when_nobody_names_it_any_more(applied_cluster, tmp_path):
    """As from another clone: the zone that `up` has found is in an ignored file of the first one."""
    workspace = applied_cluster.copy(tmp_path)
    assert workspace.changes(GIVEN | {"availability_zone": "us-east-1a"}) == {}, "it is there already"
    workspace.apply(GIVEN | {"availability_zone": "us-east-1b"}, "-replace=terraform_data.zone")
    assert workspace.changes(GIVEN) == {}
    assert workspace.changes(GIVEN | {"actor_hosts": 3}).keys() == {"aws_autoscaling_group.actor"}
    refused = workspace.plan(GIVEN | {"availability_zone": "us-east-1a"})
    told = "The cluster is in us-east-1b, and availability_zone asks for us-east-1a"
    assert refused.returncode == 1 and told in refused.stderr and "-replace=terraform_data.zone" in refused.stderr
    workspace.must("destroy", "-auto-approve")  # also by a description that names another zone


def test_everything_is_tagged(applied):
    """The commands find hosts by these tags, and a person what is left."""
    wanted = {"Project": "apexrl", "Cluster": "apexrl", "ManagedBy": "terraform"}
    found = resources(applied)
    tagged = [address for address, values in found.items() if "tags_all" in values and not address.startswith("data.")]
    assert len(tagged) > 20 and not [name for name in tagged if not wanted.items() <= found[name]["tags_all"].items()]
    host = found["aws_instance.replay"]
    [disk] = host["root_block_device"]
    assert disk["tags"] == {"Name": "apexrl-replay", "Role": "replay"}  # the provider adds its default tags
    assert host["tags_all"]["Role"] == "replay"
    for role, place in (("learner", "[0]"), ("actor", "")):
        wanted |= {"Role": role, "Name": f"apexrl-{role}"}
        launched = {entry["resource_type"]: entry["tags"] for entry in templates(applied)[role]["tag_specifications"]}
        assert launched.keys() == {"instance", "volume", "network-interface"}
        assert all(wanted.items() <= tags.items() for tags in launched.values())
        tags = found[f"aws_autoscaling_group.{role}{place}"]["tag"]
        assert wanted.items() <= {tag["key"]: tag["value"] for tag in tags}.items()
        assert all(tag["propagate_at_launch"] for tag in tags)


def test_commands_find_the_learner_host_that_runs(apply_cluster, aws):
    """The document of the tunnel and its parameters are Session Manager's own; the rest is checked with AWS."""
    import jmespath

    outputs = apply_cluster({"operator_cidrs": ["203.0.113.7/32"], "learner_hosts": 2})["values"]["outputs"]
    lookup = r'"\$\((aws ec2 describe-instances [^"]+)\)"'
    tunnel = outputs["tensorboard_command"]["value"]
    queries = {"tensorboard": re.search(lookup, tunnel)[1], "url": outputs["tensorboard_url_command"]["value"]}
    shells = outputs["shell_commands"]["value"]
    assert shells.keys() == {"replay", "learner", "learner-1"} and "$" not in shells["replay"]
    queries |= {name: re.search(lookup, shells[name])[1] for name in ("learner", "learner-1")}

    words = shlex.split(re.sub(lookup, "i-1", tunnel))
    assert words[:3] == ["aws", "ssm", "start-session"]
    given = dict(zip(words[3::2], words[4::2], strict=True))
    assert given == {
        "--region": "us-east-1",
        "--target": "i-1",
        "--document-name": "AWS-StartPortForwardingSession",
        "--parameters": "portNumber=6006,localPortNumber=6006",
    }

    ec2 = aws.client("ec2")
    image = ec2.register_image(Name="a host")["ImageId"]
    hosts = {}
    for name in ("learner", "learner", "learner-1", "actor"):  # the first one is lost
        hosts.setdefault(name, []).append(
            ec2.run_instances(ImageId=image, InstanceType="g6.4xlarge", MinCount=1, MaxCount=1)["Instances"][0]
        )
        tags = [{"Key": "Name", "Value": f"apexrl-{name}"}]
        ec2.create_tags(Resources=[hosts[name][-1]["InstanceId"]], Tags=tags)
    ec2.terminate_instances(InstanceIds=[hosts["learner"][0]["InstanceId"]])
    found = {}
    for name, query in queries.items():
        words = shlex.split(query)
        assert words[:7] == ["aws", "ec2", "describe-instances", "--region", "us-east-1", "--output", "text"]
        assert (words[7], words[-2]) == ("--filters", "--query")
        filters = [dict(part.split("=", 1) for part in word.split(",")) for word in words[8:-2]]
        filters = [{"Name": one["Name"], "Values": [one["Values"]]} for one in filters]
        found[name] = jmespath.search(words[-1], ec2.describe_instances(Filters=filters))
    address = ec2.describe_instances(InstanceIds=[hosts["learner"][1]["InstanceId"]])
    address = address["Reservations"][0]["Instances"][0]["PublicIpAddress"]
    assert found == {
        "tensorboard": [hosts["learner"][1]["InstanceId"]],
        "learner": [hosts["learner"][1]["InstanceId"]],
        "learner-1": [hosts["learner-1"][0]["InstanceId"]],
        "url": [f"http://{address}:6006"],
    }


def test_another_zone_ends_the_hosts_before_their_subnet(applied_cluster, tmp_path):
    """As `up` has it for want of capacity, before there was an actor host. A subnet with hosts cannot be deleted."""
    workspace = applied_cluster.copy(tmp_path)
    given, moving = GIVEN | {"availability_zone": "us-east-1b"}, "-replace=terraform_data.zone"
    assert workspace.plan(given, moving, "-out=plan").returncode == 0
    planned = changes_in(json.loads(workspace.must("show", "-json", "plan")))
    moved = ("subnet.this[0]", "instance.replay", "ebs_volume.journal", "autoscaling_group.learner[0]")
    limits = ("autoscaling_schedule.limit", "autoscaling_schedule.learner_limit[0]")  # AWS forgets them with the group
    for address in (*moved, "autoscaling_group.actor", *limits):
        assert planned[f"aws_{address}"] == ["delete", "create"], address
    assert planned["terraform_data.experience"] == ["delete", "create"]
    workspace.apply(given, moving)
    assert workspace.changes(given) == {}


def test_files_are_formatted(deploy):
    command = [find_terraform(), "fmt", "-check", "-recursive", "-diff", str(deploy)]
    result = ran(command)
    assert result.returncode == 0, result.stdout + result.stderr
