"""Values that a cluster gets by default and on request, its user-data, and mistakes that have to be found."""

import re
from typing import Any

import pytest
import yaml

from tests.deploy.commands import ran
from tests.deploy.needed import require_tool
from tests.deploy.terraform import BUCKET, TERRAFORM, fixed_addresses, resources, templates, user_data

GIVEN = {"results_bucket": BUCKET}
REPLAY, LEARNER, ACTOR = "aws_instance.replay", "aws_launch_template.learner[0]", "aws_launch_template.actor"
LEARNERS, ACTORS = "aws_autoscaling_group.learner[0]", "aws_autoscaling_group.actor"
HANGS = "aws_cloudwatch_metric_alarm.hangs"
OF_TEMPLATE = "block_device_mappings.0.ebs.0"
POLICY = "mixed_instances_policy.0.instances_distribution.0"
TYPES = "mixed_instances_policy.0.launch_template.0.override.*.instance_type"
CPU, GPU = "ami-0000000000000c100", "ami-0000000000000a100"
SECRET_TYPES = re.compile(
    r'"(aws_ssm_parameters?(_by_path)?|aws_secretsmanager\w+|aws_iam_access_key|aws_key_pair|tls_\w+|random_\w+)"'
)
KNOWN = (
    'resource "aws_ssm_parameter" "deadline"',
    'data "aws_ssm_parameter" "base_image"',
)  # a time, and public images
SECRET_NAMES = re.compile(r'^variable "\w*(secret|password|access_key|token)\w*"', re.M)
DEFAULTS = {
    # Metadata needs a token and stays on the host. Nobody has an SSH key.
    **{(host, "metadata_options.0.http_tokens"): "required" for host in (REPLAY, LEARNER, ACTOR)},
    **{(host, "metadata_options.0.http_put_response_hop_limit"): 1 for host in (REPLAY, LEARNER, ACTOR)},
    **{(host, "key_name"): None for host in (REPLAY, LEARNER, ACTOR)},
    # Disks are encrypted and go with their host; the journal's volume stays.
    **{(REPLAY, f"root_block_device.0.{name}"): True for name in ("encrypted", "delete_on_termination")},
    **{(host, f"{OF_TEMPLATE}.encrypted"): "true" for host in (LEARNER, ACTOR)},
    **{(host, f"{OF_TEMPLATE}.delete_on_termination"): "true" for host in (LEARNER, ACTOR)},
    (REPLAY, "root_block_device.0.volume_size"): 16,
    (LEARNER, f"{OF_TEMPLATE}.volume_size"): 200,
    (ACTOR, f"{OF_TEMPLATE}.volume_size"): 16,
    ("aws_ebs_volume.journal", "type"): "gp3",
    ("aws_ebs_volume.journal", "size"): 100,
    ("aws_ebs_volume.journal", "encrypted"): True,
    ("aws_ebs_volume.journal", "throughput"): 250,
    # Hosts run the newest image of their kind.
    **{(REPLAY, "ami"): CPU, (ACTOR, "image_id"): CPU, (LEARNER, "image_id"): GPU},
    # Actors are spot instances of several types.
    (ACTORS, f"{POLICY}.on_demand_base_capacity"): 0,
    (ACTORS, f"{POLICY}.on_demand_percentage_above_base_capacity"): 0,
    (ACTORS, f"{POLICY}.spot_allocation_strategy"): "price-capacity-optimized",
    (ACTORS, f"{POLICY}.on_demand_allocation_strategy"): "prioritized",
    (ACTORS, "capacity_rebalance"): True,
    **{(ACTORS, name): size for name, size in (("min_size", 0), ("max_size", 6), ("desired_capacity", 6))},
    (ACTORS, TYPES): ["c7i.8xlarge", "c6i.8xlarge", "m7i.8xlarge", "m6i.8xlarge"],
    # A learner host is a group of one, on demand, of the first type that there is. One that is lost is replaced, and an
    # old one ends before the new one starts.
    (LEARNERS, "name"): "apexrl-learner",
    **{(LEARNERS, name): size for name, size in (("min_size", 0), ("max_size", 1), ("desired_capacity", 1))},
    (LEARNERS, f"{POLICY}.on_demand_percentage_above_base_capacity"): 100,
    (LEARNERS, f"{POLICY}.on_demand_allocation_strategy"): "prioritized",
    (LEARNERS, TYPES): ["g6.4xlarge", "g5.4xlarge"],
    (LEARNERS, "health_check_type"): "EC2",
    (LEARNERS, "wait_for_capacity_timeout"): "15m",
    (LEARNERS, "force_delete"): None,
    (LEARNERS, "instance_refresh.0.preferences.0.min_healthy_percentage"): 0,
    # A replay host that hangs for three minutes is rebooted.
    (HANGS, "namespace"): "AWS/EC2",
    (HANGS, "metric_name"): "StatusCheckFailed_Instance",
    **{(HANGS, name): number for name, number in (("period", 60), ("evaluation_periods", 3))},
    (HANGS, "alarm_actions"): ["arn:aws:automate:us-east-1:ec2:reboot"],
    # Replay and learner are close to each other.
    ("aws_placement_group.this", "strategy"): "cluster",
    **{(host, "placement_group"): "apexrl" for host in (REPLAY, LEARNERS)},
    (ACTORS, "placement_group"): None,
}
"""Values of a cluster with every variable at its default; `*` stands for each item of a list."""

ON_REQUEST = {
    (ACTORS, f"{POLICY}.on_demand_base_capacity"): 3,
    (ACTORS, "desired_capacity"): 4,
    (ACTORS, TYPES): ["c6a.8xlarge"],
    (LEARNERS, TYPES): ["g6e.4xlarge"],
}

PLANTED = [
    ("replay.tf", 'volume_type           = "gp3"', 'volume_type = "gp4"', "volume_type = 'gp4': has to be one of gp2"),
    ("replay.tf", "  subnet_id  ", "  subnet  ", 'An argument named "subnet" is not expected here'),
    ("actors.tf", '"network-interface"', '"network"', "resource_type = 'network'"),
    ("actors.tf", "  metadata_options {", "  metadata_option {", "Blocks of type"),
    ("guard.tf", 'mode = "OFF"', 'mode = "NEVER"', "has to be one of FLEXIBLE, OFF"),
]


def at(value: Any, path: str) -> Any:
    """Returns what is at a path of names and numbers."""
    first, _, rest = path.partition(".")
    if first == "*":
        return [at(item, rest) for item in value]
    found = value[int(first)] if first.isdigit() else value[first]
    return at(found, rest) if rest else found


def differences(found: dict[str, Any], wanted: dict[tuple[str, str], Any]) -> dict[tuple[str, str], Any]:
    """Returns the values that are not as wanted."""
    values = {place: at(found[place[0]], place[1]) for place in wanted}
    return {place: value for place, value in values.items() if (value or None) != (wanted[place] or None)}


@pytest.mark.parametrize(("file", "right", "wrong", "message"), PLANTED)
def test_a_planted_mistake_is_found(cluster, tmp_path, file, right, wrong, message):
    workspace = cluster.copy(tmp_path)
    path = workspace.directory / file
    assert right in path.read_text(), f"{file} has changed: plant the mistake elsewhere"
    path.write_text(path.read_text().replace(right, wrong))
    workspace.give(GIVEN)
    result = workspace.run("apply", "-auto-approve", "-input=false")
    assert result.returncode == 1 and message in result.stderr, result.stderr


def test_a_cluster_has_the_values_that_the_readme_promises(applied):
    found = resources(applied)
    assert not differences(found, DEFAULTS)
    assert found["aws_ebs_volume.journal"]["availability_zone"] == found["aws_subnet.this[0]"]["availability_zone"]
    assert found[LEARNERS]["vpc_zone_identifier"] == [found["aws_subnet.this[0]"]["id"]]
    [launched] = at(found[LEARNERS], "mixed_instances_policy.0.launch_template")
    [specification] = launched["launch_template_specification"]
    assert specification["launch_template_id"] == templates(applied)["learner"]["id"]
    assert fixed_addresses(applied) == {"replay": "10.79.0.10", "learner": "10.79.0.11"}


def test_a_cluster_gets_what_is_asked_for(cluster):
    actors = {"actor_hosts": 4, "actor_on_demand_hosts": 3, "actor_instance_types": ["c6a.8xlarge"]}
    asked = actors | {"learner_instance_types": ["g6e.4xlarge"], "use_placement_group": False}
    found = resources(cluster.planned(GIVEN | asked))
    assert not differences(found, ON_REQUEST)
    assert not any(found[host].get("placement_group") for host in (REPLAY, LEARNERS))
    assert "aws_placement_group.this" in found, "AWS deletes none that a host of an earlier plan is in"


def test_user_data_says_only_the_role(applied):
    for role, text in user_data(applied).items():
        assert text.startswith("#cloud-config\n"), role
        content = yaml.safe_load(text)
        assert content.keys() == {"write_files", "runcmd"}  # cloud-init warns of nothing when it does not know a key
        assert [entry["path"] for entry in content["write_files"]] == ["/etc/apexrl/role.env"]
        assert content["runcmd"] == [["systemctl", "start", "--no-block", "apexrl.target"]]


def test_cloud_init_accepts_the_user_data(applied, tmp_path):
    require_tool("cloud-init", "cloud-init")
    for role, text in user_data(applied).items():
        path = tmp_path / f"{role}.yaml"
        path.write_text(text)
        command = ["cloud-init", "schema", "--config-file", str(path)]
        result = ran(command)
        assert result.returncode == 0 and "Valid" in result.stdout, result.stdout + result.stderr
    path.write_text(text.replace("permissions:", "permission:"))
    result = ran(command)
    assert result.returncode == 1, "cloud-init finds no fault in a misspelled key"


def test_the_configuration_makes_and_asks_for_no_secret():
    """So that none is in Terraform's state, in a plan or in user-data."""
    for path in TERRAFORM.glob("*/*.tf"):
        text = path.read_text()
        for known in KNOWN:
            text = text.replace(known, "", 1)
        assert not SECRET_TYPES.search(text) and not SECRET_NAMES.search(text), path
