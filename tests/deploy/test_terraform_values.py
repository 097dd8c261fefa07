"""Checks beyond the schema: values that AWS takes, metadata of hosts, disks, user-data, and the checker itself."""

import subprocess
from typing import Any

import pytest

from tests.deploy.needed import require_tool
from tests.deploy.rounds import rounds
from tests.deploy.terraform import BUCKET, fixed_addresses, of_learners, resources, templates, user_data

TOP_LEVEL_KEYS = {"write_files", "runcmd"}
"""cloud-init warns of nothing when it does not know a key, so that a misspelled one would be ignored."""

FREE = {
    *("arn", "id", "name", "description", "tags", "tags_all", "region", "bucket", "role", "role_arn", "user_data"),
    *("cidr_block", "cidr_ipv4", "private_ip", "public_ip", "gateway_id", "service_name", "key", "value", "version"),
    *(
        "vpc_id",
        "subnet_id",
        "security_group_id",
        "referenced_security_group_id",
        "route_table_id",
        "launch_template_id",
    ),
    *("route_table_ids", "vpc_security_group_ids", "security_groups", "vpc_zone_identifier", "availability_zone"),
    *("iam_instance_profile", "placement_group", "ami", "image_id", "device_name", "autoscaling_group_name"),
    *("volume_id", "instance_id", "InstanceId", "alarm_name", "alarm_description"),
    *("kms_key_id", "permissions_boundary"),
    *("scheduled_action_name", "limit_amount", "subscriber_email_addresses", "filter", "owners", "group_name"),
}
"""Arguments whose text is a name, an address, an identifier or prose; all others have to stand in `VALUES`."""

PLANTED = [
    ("replay.tf", 'http_tokens                 = "required"', 'http_tokens = "requird"', "optional, required"),
    ("replay.tf", 'volume_type           = "gp3"', 'volume_type = "gp4"', "volume_type = 'gp4'"),
    ("replay.tf", "ebs_optimized               = true", "ebs_optimised = true", '"ebs_optimised" is not expected here'),
    ("replay.tf", "  subnet_id  ", "  subnet  ", 'An argument named "subnet" is not expected here'),
    (
        "replay.tf",
        "instance_type               = var.replay_instance_type",
        'instance_type = "c7q.8xlarge"',
        "c7q.8xlarge",
    ),
    ("replay.tf", '"terminate"', '"terminat"', "stop, terminate"),
    ("actors.tf", '"price-capacity-optimized"', '"cheapest"', "capacity-optimized-prioritized"),
    ("actors.tf", '"network-interface"', '"network"', "tag_specifications.resource_type = 'network'"),
    ("actors.tf", "  metadata_options {", "  metadata_option {", "Blocks of type"),
    (
        "security.tf",
        "  referenced_security_group_id = aws_security_group.role[each.value.from].id\n",
        "",
        "exactly one of",
    ),
    (
        "iam.tf",
        'policy = jsonencode({ Version = "2012-10-17", Statement = local.log_statements })',
        'policy = "{"',
        "not JSON",
    ),
    ("guard.tf", 'mode = "OFF"', 'mode = "NEVER"', "OFF, FLEXIBLE"),
    ("logs.tf", "var.log_retention_days", "10", "has to be one of 0, 1, 3"),
    (
        "network.tf",
        'aws_vpc.this[count.index].id\n\n  tags = { Name = "${var.name}-nothing" }',
        "aws_vpc.that[0].id",
        "has not been declared",
    ),
]


def planted() -> list[list[tuple[str, str, str, str]]]:
    """Returns the mistakes in rounds of at most one a file. A first one might hide a second.

    Those in policies and in the time limit are alone. Nothing is looked at before its dependencies are right: hosts
    depend on the policies, and the limit depends on hosts. The group of actor hosts depends on replay and learner.
    """
    alone = [[mistake] for mistake in PLANTED if mistake[0] in ("iam.tf", "guard.tf")]
    actors = [mistake for mistake in PLANTED if mistake[0] == "actors.tf"]
    others = [mistake for mistake in PLANTED if [mistake] not in alone and mistake not in actors]
    return alone + rounds(actors) + rounds(others)


@pytest.mark.parametrize("mistakes", planted())
def test_planted_mistakes_are_found(cluster, tmp_path, mistakes):
    workspace = cluster.copy(tmp_path)
    for file, right, wrong, _ in mistakes:
        text = (workspace.directory / file).read_text()
        assert right in text, f"{file} has changed: plant the mistake elsewhere"
        (workspace.directory / file).write_text(text.replace(right, wrong))
    result = workspace.run("validate")
    assert result.returncode == 1
    for _, _, wrong, message in mistakes:
        assert message in result.stderr, (wrong, result.stderr)


@pytest.mark.parametrize(
    ("file", "right", "wrong", "message"),
    [
        ("security.tf", 'what = "Unrolls from actors"', 'what = "Actors\' unrolls"', "has to match"),
        ("actors.tf", "base64encode(local.user_data.actor)", "local.user_data.actor", "a launch template wants base64"),
    ],
)
def test_a_mistake_that_only_shows_with_values_is_found(cluster, tmp_path, file, right, wrong, message):
    workspace = cluster.copy(tmp_path)
    path = workspace.directory / file
    assert right in path.read_text(), f"{file} has changed: plant the mistake elsewhere"
    path.write_text(path.read_text().replace(right, wrong))
    workspace.give({"results_bucket": BUCKET})
    result = workspace.run("apply", "-auto-approve", "-input=false")
    assert result.returncode == 1 and message in result.stderr, result.stderr


def test_each_text_argument_is_checked_or_free(applied, applied_bootstrap):
    from tests.deploy.offline_provider.aws_values import VALUES

    found = resources(applied) | resources(applied_bootstrap.state())
    unknown = set()
    for address, values in found.items():
        if address.startswith(("data.", "terraform_data.")):
            continue
        name = address.split(".")[0]
        unknown |= {(name, path) for path in text_paths(values) if path not in VALUES.get(name, {})}
    assert not unknown, "these belong in VALUES, or in FREE when any text will do"


def text_paths(value: Any, path: str = "") -> set[str]:
    """Returns the paths of arguments with text in a resource, without those that are free."""
    if isinstance(value, dict):
        below = {name: item for name, item in value.items() if name not in FREE}
        return {found for name, item in below.items() for found in text_paths(item, f"{path}.{name}".lstrip("."))}
    if isinstance(value, list):
        return {found for item in value for found in text_paths(item, path)}
    return {path} if isinstance(value, str) and value and not value.isdigit() else set()


def test_metadata_of_hosts_needs_a_token_and_stays_on_the_host(applied):
    found = resources(applied)
    for address in ("aws_instance.replay", "aws_launch_template.learner[0]", "aws_launch_template.actor"):
        [options] = found[address]["metadata_options"]
        assert options["http_tokens"] == "required" and options["http_put_response_hop_limit"] == 1, address


def test_disks_are_encrypted_and_go_with_their_host(applied):
    found = resources(applied)
    disks = [made["block_device_mappings"][0]["ebs"][0] for made in templates(applied).values()]
    disks.insert(0, found["aws_instance.replay"]["root_block_device"][0])
    assert [(one["volume_type"], one["volume_size"]) for one in disks] == [
        ("gp3", 16),
        ("gp3", 200),
        ("gp3", 16),
    ]
    journal = found["aws_ebs_volume.journal"]
    assert (journal["type"], journal["size"], journal["encrypted"], journal["throughput"]) == ("gp3", 100, True, 250)
    assert journal["availability_zone"] == found["aws_subnet.this[0]"]["availability_zone"]
    assert all(one["encrypted"] in (True, "true") for one in disks)
    assert all(one["delete_on_termination"] in (True, "true") for one in disks)


def test_hosts_run_the_newest_image_of_their_kind(applied, cluster):
    found = resources(applied)
    images = [found["aws_instance.replay"]["ami"], found["aws_launch_template.actor"]["image_id"]]
    assert images == ["ami-0000000000000c100"] * 2
    assert templates(applied)["learner"]["image_id"] == "ami-0000000000000a100"
    pinned = resources(cluster.planned({"results_bucket": BUCKET, "image_version": "0.9.0"}))
    assert pinned["aws_instance.replay"]["ami"] == "ami-0000000000000c090"
    assert pinned["aws_launch_template.learner[0]"]["image_id"] == "ami-0000000000000a090"


def test_actors_are_spot_instances_of_several_types(applied, cluster):
    group = resources(applied)["aws_autoscaling_group.actor"]
    [policy] = group["mixed_instances_policy"]
    [distribution] = policy["instances_distribution"]
    assert (distribution["on_demand_base_capacity"], distribution["on_demand_percentage_above_base_capacity"]) == (0, 0)
    assert distribution["spot_allocation_strategy"] == "price-capacity-optimized"
    assert distribution["on_demand_allocation_strategy"] == "prioritized"
    assert group["capacity_rebalance"] and (group["min_size"], group["max_size"], group["desired_capacity"]) == (
        0,
        6,
        6,
    )
    assert [entry["instance_type"] for entry in policy["launch_template"][0]["override"]] == [
        *("c7i.8xlarge", "c6i.8xlarge", "m7i.8xlarge", "m6i.8xlarge"),
    ]
    wanted = {
        "results_bucket": BUCKET,
        "actor_hosts": 4,
        "actor_on_demand_hosts": 3,
        "actor_instance_types": ["c6a.8xlarge"],
    }
    group = resources(cluster.planned(wanted))["aws_autoscaling_group.actor"]
    [policy] = group["mixed_instances_policy"]
    assert policy["instances_distribution"][0]["on_demand_base_capacity"] == 3 and group["desired_capacity"] == 4
    assert [entry["instance_type"] for entry in policy["launch_template"][0]["override"]] == ["c6a.8xlarge"]


def test_a_learner_host_is_a_group_of_one_on_demand_of_the_first_type_that_there_is(applied, cluster):
    found = of_learners(applied, "aws_autoscaling_group")["learner"]
    assert (found["name"], found["min_size"], found["max_size"], found["desired_capacity"]) == (
        *("apexrl-learner", 0, 1, 1),
    )
    [policy] = found["mixed_instances_policy"]
    [distribution] = policy["instances_distribution"]
    assert distribution["on_demand_percentage_above_base_capacity"] == 100
    assert distribution["on_demand_allocation_strategy"] == "prioritized"
    [launched] = policy["launch_template"]
    assert [entry["instance_type"] for entry in launched["override"]] == ["g6.4xlarge", "g5.4xlarge"]
    template = templates(applied)["learner"]
    [specification] = launched["launch_template_specification"]
    assert specification["launch_template_id"] == template["id"]
    assert found["health_check_type"] == "EC2", "a host that is lost or hangs is replaced"
    assert found["wait_for_capacity_timeout"] == "15m" and not found["force_delete"]
    [refresh] = found["instance_refresh"]
    assert refresh["preferences"][0]["min_healthy_percentage"] == 0, "the old one ends before the new one starts"
    assert found["vpc_zone_identifier"] == [resources(applied)["aws_subnet.this[0]"]["id"]]
    other = {"results_bucket": BUCKET, "learner_instance_types": ["g6e.4xlarge"]}
    [policy] = resources(cluster.planned(other))["aws_autoscaling_group.learner[0]"]["mixed_instances_policy"]
    assert [entry["instance_type"] for entry in policy["launch_template"][0]["override"]] == ["g6e.4xlarge"]


def test_replay_and_learner_share_a_placement_group_unless_told_otherwise(applied, cluster):
    found = resources(applied)
    group = found["aws_placement_group.this[0]"]
    assert group["strategy"] == "cluster"
    for address in ("aws_instance.replay", "aws_autoscaling_group.learner[0]"):
        assert found[address]["placement_group"] == group["id"]
    assert not found["aws_autoscaling_group.actor"]["placement_group"]
    assert fixed_addresses(applied) == {"replay": "10.79.0.10", "learner": "10.79.0.11"}
    apart = resources(cluster.planned({"results_bucket": BUCKET, "use_placement_group": False}))
    assert not any(address.startswith("aws_placement_group") for address in apart)


def test_no_host_takes_an_ssh_key(applied):
    found = resources(applied)
    for address in ("aws_instance.replay", "aws_launch_template.learner[0]", "aws_launch_template.actor"):
        assert not found[address]["key_name"], address


def test_user_data_says_only_the_role(applied):
    import yaml

    for role, text in user_data(applied).items():
        assert text.startswith("#cloud-config\n"), role
        content = yaml.safe_load(text)
        assert content.keys() == TOP_LEVEL_KEYS
        assert [entry["path"] for entry in content["write_files"]] == ["/etc/apexrl/role.env"]
        assert content["runcmd"] == [["systemctl", "start", "--no-block", "apexrl.target"]]


def test_cloud_init_accepts_the_user_data(applied, tmp_path):
    require_tool("cloud-init", "cloud-init")
    for role, text in user_data(applied).items():
        path = tmp_path / f"{role}.yaml"
        path.write_text(text)
        command = ["cloud-init", "schema", "--config-file", str(path)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert result.returncode == 0 and "Valid" in result.stdout, result.stdout + result.stderr
    path.write_text(text.replace("permissions:", "permission:"))
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1, "cloud-init finds no fault in a misspelled key"


def test_the_schema_is_the_real_one():
    """Facts of hashicorp/aws that a schema made up by hand would hardly have."""
    from tests.deploy.offline_provider.__main__ import load_schema, types_in
    from tests.deploy.offline_provider.wheel import find_wheel
    from tests.deploy.terraform import TERRAFORM, skip_without_tools

    skip_without_tools()
    schema = load_schema(find_wheel(), types_in(TERRAFORM))
    instance = schema["resource"]["aws_instance"]
    assert instance["attributes"]["user_data_replace_on_change"]["type"] == "bool"
    assert instance["blocks"]["root_block_device"]["max"] == 1
    assert schema["resource"]["aws_autoscaling_group"]["blocks"]["tag"]["nesting"] == "set"
    assert schema["resource"]["aws_autoscaling_group"]["attributes"]["max_size"]["required"]
    assert schema["data"]["aws_ami"]["attributes"]["block_device_mappings"]["computed"]
    assert len(instance["attributes"]) > 40 and len(instance["blocks"]) > 10
