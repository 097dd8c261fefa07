"""A cluster with several learners, on one host or more: flags, replay servers, ports, and what a change replaces."""

from typing import Any

import pytest

from apexrl.agents.replaying.mix import parts_of, tables_for
from apexrl.config.commands import ActorCommand, LearnerCommand, ReplayCommand
from apexrl.config.flags import of_own_shard, parse
from tests.deploy.terraform import (
    BUCKET,
    Flow,
    Workspace,
    changes_in,
    flows_of,
    of_learners,
    role_environment,
    templates,
    user_data,
)

MIX = ("queue=1/8", "uniform=1/8", "elite-1@500=1/4", "elite-insertion@700=1/2")
VARIABLES = {
    "results_bucket": BUCKET,
    "agent": "impala",
    "learner_instance_types": ["g6.12xlarge"],
    "learner_gpus": 4,
    "replay_shards": 8,
    "learner_flags": {"mix": " ".join(MIX), "batch_size": "64"},
}
OF_ANOTHER_LEARNER = {
    "aws_launch_template.learner[0]": ["update"],
    "aws_autoscaling_group.learner[0]": ["update"],
}


@pytest.fixture(scope="module")
def workspace(cluster, tmp_path_factory) -> Workspace:
    """Four learners on eight shards."""
    workspace = cluster.copy(tmp_path_factory.mktemp("shards"))
    workspace.apply(VARIABLES)
    return workspace


@pytest.fixture(scope="module")
def state(workspace) -> dict[str, Any]:
    return workspace.state()


def test_all_roles_are_told_of_the_learners_and_the_shards(state):
    found = {role: role_environment(text) for role, text in user_data(state).items()}
    learner = parse(LearnerCommand, found["learner"]["APEXRL_FLAGS"].split())
    assert (learner.agent, learner.learning.num_learners, learner.wires.shards) == ("impala", 4, 8)
    assert (learner.learning.device, learner.learning.learner_devices) == ("cuda", ""), "each has a GPU of its own"
    actor = parse(ActorCommand, found["actor"]["APEXRL_FLAGS"].split())
    assert (actor.agent, actor.wires.shards) == ("impala", 8)
    servers = [f"apexrl-replay@{shard}.service" for shard in range(8)]
    assert found["replay"]["APEXRL_UNITS"].split() == ["apexrl-replay.target", *servers]
    replay = parse(ReplayCommand, found["replay"]["APEXRL_FLAGS"].split())
    tables = tuple(map(str, tables_for(parts_of(MIX))))
    assert (replay.agent, replay.wires.shards, replay.replay.tables) == ("impala", 8, tables)


@pytest.mark.parametrize(
    "mix",
    [
        "queue=1/2 elite-1@2000:distance=l2:candidates=8=1/4 elite-2@500:candidates=4:anneal-updates=1000=1/4",
        "attentive@500:candidates=8=1/2 uniform=1/4 elite-insertion@700=1/4",
        "elite-3:distance=cosine=1/2 queue=1/2",
    ],
)
def test_the_replay_has_the_tables_of_the_mix_whatever_its_options(workspace, mix):
    planned = workspace.planned(VARIABLES | {"learner_flags": {"mix": mix}})
    flags = role_environment(user_data(planned)["replay"])["APEXRL_FLAGS"].split()
    assert parse(ReplayCommand, flags).replay.tables == tuple(map(str, tables_for(parts_of(tuple(mix.split())))))


def test_each_shard_has_rules_for_its_ports_and_for_those_who_need_them(state):
    flags = role_environment(user_data(state)["replay"])["APEXRL_FLAGS"].split()
    wanted = {Flow(source, "learner", port) for source in ("actor", "replay") for port in (52001, 52002)}
    for shard in range(8):
        wires = of_own_shard(parse(ReplayCommand, [*flags, "--shard", str(shard)])).wires
        wanted |= {Flow("actor", "replay", wires.actor_port), Flow("learner", "replay", wires.batch_port)}
    assert flows_of(state, "ingress") == flows_of(state, "egress") == wanted
    assert len(wanted) == 4 + 2 * 8


def test_another_number_of_learners_replaces_the_learner_only(workspace):
    assert workspace.changes(VARIABLES | {"learner_gpus": 2}) == OF_ANOTHER_LEARNER


def test_a_second_learner_host_has_a_rank_and_an_address_and_replaces_the_first_one_only(workspace, state):
    """All learners have to know how many there are."""
    plan = workspace.planned(VARIABLES | {"learner_hosts": 2})
    new = [
        *(f"aws_{name}[1]" for name in ("launch_template.learner", "autoscaling_group.learner")),
        *("aws_autoscaling_schedule.learner_limit[1]", 'aws_ec2_subnet_cidr_reservation.fixed["learner-1"]'),
        *(f'aws_vpc_security_group_{way}_rule.flow["gradients"]' for way in ("ingress", "egress")),
    ]
    created = {address: ["create"] for address in new}
    may_end_it = {"aws_iam_role_policy.finish": ["update"]}
    assert changes_in(plan) == OF_ANOTHER_LEARNER | created | may_end_it
    groups = ["apexrl-actor", "apexrl-learner", "apexrl-learner-1"]
    assert {group["placement_group"] for group in of_learners(plan, "aws_autoscaling_group").values()} == {"apexrl"}
    for rank, name in enumerate(("learner", "learner-1")):
        template = templates(plan)[name]
        assert {made["tags"]["Name"] for made in template["tag_specifications"]} == {f"apexrl-{name}"}
        environment = role_environment(user_data(plan)[name])
        assert environment["APEXRL_ADDRESS"] == f"10.79.0.{11 + rank}"
        assert environment["APEXRL_GROUP"] == f"apexrl-{name}"
        assert environment["APEXRL_GROUPS"].split() == [group for group in groups if group != f"apexrl-{name}"]
        learner = parse(LearnerCommand, environment["APEXRL_FLAGS"].split())
        assert environment["APEXRL_HOST_RANK"] == str(rank)
        assert (learner.learner_hosts, learner.learning.num_learners, learner.wires.shards) == (2, 4, 8)
        assert learner.wires.learner_host == "10.79.0.11"
    among = Flow("learner", "learner", 32768, 60999)
    assert learner.wires.meeting_port in range(among.port, among.last_port)
    for way in ("ingress", "egress"):
        assert flows_of(plan, way) - flows_of(state, way) == {among}


@pytest.mark.parametrize(
    ("changes", "cure"),
    [
        ({"replay_shards": 6}, "replay_shards 6 is no multiple of the 4 learners"),
        ({"actor_workers_per_host": 7}, "is less than the 8 replay servers"),
        ({"learner_flags": {"batch_size": "510"}}, "batch_size 510 is no multiple of the 4 learners"),
        (
            {"learner_hosts": 2, "learner_flags": {"batch_size": "508"}},
            "batch_size 508 is no multiple of the 8 learners",
        ),
        (
            {"agent": "impact", "preset": "paper", "learner_flags": {}},
            "impact's batch of 10 has no equal, whole parts for 4 learners",
        ),
        (
            {"agent": "impact", "preset": "gpu", "learner_flags": {"minibatches": 2}},  # a queue of one unroll each
            "impact's batch of 16 has no equal, whole parts for 4 learners",
        ),
        (
            {"learner_hosts": 2, "learner_flags": {"mix": "queue=1/8 uniform=7/8"}},
            "batch of 32 has no equal, whole parts for 8 learners",
        ),
        ({"agent_flags": {"lstm": "true"}}, "replay_state walk follows one shard: leave replay_shards out"),
    ],
)
def test_what_does_not_fit_the_learners_is_refused_in_one_line(workspace, changes, cure):
    result = workspace.plan(VARIABLES | changes)
    assert result.returncode == 1 and cure in result.stderr and result.stderr.count("Error: ") == 1, result.stderr
