"""A cluster whose learner has several GPUs: flags, replay servers, ports, and what a change replaces."""

from typing import Any

import pytest

from apexrl.agents.mix import parts_of, table_texts
from apexrl.config import ActorCommand, LearnerCommand, ReplayCommand
from apexrl.flags import of_own_shard, parse
from tests.deploy.flows import Flow, flows_of
from tests.deploy.terraform import BUCKET, Workspace, role_environment, user_data

MIX = ("queue=1/8", "uniform=1/8", "elite-1@500=3/4")
VARIABLES = {
    "results_bucket": BUCKET,
    "agent": "impala",
    "learner_instance_type": "g6.12xlarge",
    "learner_gpus": 4,
    "replay_shards": 8,
    "learner_flags": {"mix": " ".join(MIX)},
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
    assert found["replay"]["APEXRL_SHARDS"] == "8" and "APEXRL_SHARDS" not in found["learner"]
    replay = parse(ReplayCommand, found["replay"]["APEXRL_FLAGS"].split())
    assert (replay.agent, replay.wires.shards, replay.replay.tables) == ("impala", 8, table_texts(parts_of(MIX)))


def test_each_shard_has_rules_for_its_ports_and_for_those_who_need_them(state):
    flags = role_environment(user_data(state)["replay"])["APEXRL_FLAGS"].split()
    wanted = {Flow(source, "learner", port) for source in ("actor", "replay") for port in (52001, 52002)}
    for shard in range(8):
        wires = of_own_shard(parse(ReplayCommand, [*flags, "--shard", str(shard)])).wires
        wanted |= {Flow("actor", "replay", wires.actor_port), Flow("learner", "replay", wires.batch_port)}
    assert flows_of(state, "ingress") == flows_of(state, "egress") == wanted
    assert len(wanted) == 4 + 2 * 8


def test_another_number_of_learners_replaces_the_learner_only(workspace):
    plan = workspace.planned(VARIABLES | {"learner_gpus": 2})
    actions = {change["address"]: change["change"]["actions"] for change in plan["resource_changes"]}
    changed = {address: what for address, what in actions.items() if what != ["no-op"]}
    followers = ["aws_scheduler_schedule.learner_limit", 'aws_cloudwatch_metric_alarm.hangs["learner"]']
    assert changed == {"aws_instance.learner": ["delete", "create"], **{key: ["update"] for key in followers}}


@pytest.mark.parametrize(
    ("changes", "cure"),
    [
        ({"replay_shards": 6}, "replay_shards 6 is no multiple of learner_gpus 4"),
        ({"actor_workers_per_host": 7}, "is less than the 8 replay servers"),
        ({"learner_flags": {"batch_size": "510"}}, "batch_size 510 is no multiple of learner_gpus 4"),
        ({"agent_flags": {"lstm": "true"}}, "replay_state walk follows one shard: leave replay_shards out"),
    ],
)
def test_what_does_not_fit_the_learners_is_refused_in_one_line(workspace, changes, cure):
    result = workspace.plan(VARIABLES | changes)
    assert result.returncode == 1 and cure in result.stderr and result.stderr.count("Error: ") == 1, result.stderr
