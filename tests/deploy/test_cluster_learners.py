"""A cluster on this machine with two learner hosts of a learner each, and two shards on its replay host.

The tests are in order: all of them work on one cluster, which the last one ends.
"""

import re

import pytest

from apexrl.networks.checkpoint import load_checkpoint
from apexrl.networks.headers import LATEST
from tests.deploy.groups import make_groups, wanted_hosts
from tests.deploy.running_cluster import (
    RUN_DIR,
    addresses_of,
    continued_from,
    figure,
    put_deadline,
    started,
    store_keys,
    stored_checkpoint,
    updates,
    wait_for,
)
from tests.deploy.terraform import BUCKET

# The first time, a root file system is made and packages are downloaded.
pytestmark = [pytest.mark.long("clusters of machines"), pytest.mark.timeout(1800)]

NAME = "two-learners"
CIDR = "192.168.81.0/24"  # greater than 127.0.0.1: so gloo lets the other host connect to the first one
VARIABLES = {
    "name": NAME,
    "results_bucket": BUCKET,
    "vpc_cidr": CIDR,
    "env": "CartPole-v1",
    "agent": "impala",
    "preset": "small",
    "learner_hosts": 2,
    "learner_instance_types": ["g6.4xlarge"],
    "actor_hosts": 1,
    "actor_workers_per_host": 2,
    "environments_per_worker": 4,
    "max_hours": 1,
    "learner_flags": {"mix": "queue=1/2 uniform=1/2", "checkpoint_period_seconds": "2", "device": "cpu"},
}
SHARDS = range(2)
LEARNERS = ("learner", "learner-1")
RESTART_SECONDS = 180  # learners wait a minute for one that is gone without a word


@pytest.fixture(scope="module")
def running(build, cloud, cluster, address, tmp_path_factory):
    """Replay, both learner hosts and an actor host."""
    state = cluster.copy(tmp_path_factory.mktemp("plan")).apply(VARIABLES)
    put_deadline(cloud, state)
    store_keys(cloud, NAME)
    directory = tmp_path_factory.mktemp("cluster")
    with started(state, cloud, build, address, directory, "replay", *LEARNERS, "actor0") as hosts:
        yield hosts


def transitions(running) -> list[int]:
    """The transitions of each shard that the newest checkpoint has counted."""
    path = running.hosts["learner"].root / RUN_DIR / "checkpoints" / LATEST
    return [log.transitions for log in load_checkpoint(path).header.counters.logs] if path.exists() else []


def wait_for_all_shards(running, since):
    """Waits until the learners have got new experience from each shard, and have made updates of it."""
    before = updates(running)
    wait_for(running, lambda: [new > old for new, old in zip(transitions(running), since, strict=False)] == [True] * 2)
    wait_for(running, lambda: updates(running) > before)


def learner_pid(host, rank) -> str:
    """The process of one of the learners."""
    [found] = host.run("sh", "-c", f"grep -lszx RANK={rank} /proc/[0-9]*/environ").stdout.split()
    return found.split("/")[2]


def test_two_learners_of_two_hosts_learn_from_two_shards(running):
    wait_for_all_shards(running, [0, 0])
    replay = running.hosts["replay"]
    for shard, name in zip(SHARDS, LEARNERS, strict=True):
        assert replay.show(f"apexrl-replay@{shard}.service", "ActiveState") == "active"
        assert replay.run("ls", f"/var/lib/apexrl/journal/run-1/shard-{shard}").stdout.strip()
        said = running.hosts[name].journal("apexrl-learner")
        assert f"learner {shard} of 2; gradients by gloo" in said, said
    wait_for(running, lambda: figure(running, "replay/actors") > 0)


def test_the_first_host_alone_keeps_the_run(running, cloud):
    first, other = (running.hosts[name] for name in LEARNERS)
    for unit in ("apexrl-tensorboard.service", "apexrl-sync.timer"):
        assert [host.show(unit, "ActiveState") for host in (first, other)] == ["active", "inactive"]
    for host in (other, first):
        host.run("systemctl", "start", "apexrl-sync.service")
    assert other.run("ls", "/var/lib/apexrl").stdout.split() == []
    listed = cloud.client("s3").list_objects_v2(Bucket=BUCKET, Prefix=f"{NAME}/run-1/")["Contents"]
    names = [entry["Key"].removeprefix(f"{NAME}/run-1/") for entry in listed]
    assert f"checkpoints/{LATEST}" in names
    assert sum(name.startswith("tensorboard/events.") for name in names) == 1, names


def test_actors_reach_their_port_of_each_shard_and_learners_theirs(running):
    """From a port that lets somebody in and has no server comes a refusal, from the others nothing."""
    replay, first, other = (running.hosts[name].address for name in ("replay", *LEARNERS))
    chosen = 40404  # as gloo may choose one
    doors = [(replay, port) for port in range(51001, 51007)] + [(first, 52003), (first, chosen), (other, chosen)]

    def reached(source: str) -> list[tuple[str, int]]:
        return [door for door, outcome in running.vpc.reach(source, doors).items() if outcome != "silence"]

    assert reached("actor0") == [(replay, 51001), (replay, 51003)]
    assert reached("replay") == doors[:6], "its own"
    batches = [(replay, 51002), (replay, 51004)]
    assert reached("learner-1") == [*batches, (first, 52003), (first, chosen), (other, chosen)]


def test_a_learner_and_a_shard_that_are_killed_come_back(running):
    """The learner takes that of the other host along, and both continue; the other shard goes on."""
    replay, learner, before = running.hosts["replay"], running.hosts["learner"], transitions(running)
    pids = [replay.show(f"apexrl-replay@{shard}.service", "MainPID") for shard in SHARDS]
    replay.run("kill", "-KILL", pids[1])
    other = running.hosts["learner-1"]
    other.run("kill", "-KILL", learner_pid(other, 1))
    wait_for(running, lambda: re.search(r"recovered [1-9]\d* unrolls", replay.journal("apexrl-replay@1")))
    wait_for(running, lambda: continued_from(learner))
    assert continued_from(learner)[0] > 0
    wait_for_all_shards(running, before)
    assert replay.show("apexrl-replay@0.service", "MainPID") == pids[0]


def test_a_new_first_host_goes_on_with_the_checkpoint_in_s3(running, cloud, tmp_path):
    """Its own address is another one. It takes that of its rank, and the other host finds it again."""
    lost, address = running.interfaces["learner"].name, running.hosts["learner"].address
    running.hosts["learner"].run("systemctl", "start", "apexrl-sync.service")
    stored = stored_checkpoint(cloud, NAME, tmp_path).header.counters.updates
    running.vanish("learner")
    running.start("learner")  # as its group does
    learner = running.hosts["learner"]
    first, taken = addresses_of(cloud, running.interfaces["learner"].name)
    assert (first != addresses_of(cloud, lost)[0], taken) == (True, address)
    wait_for(running, lambda: continued_from(learner), RESTART_SECONDS)
    assert continued_from(learner)[0] == stored > 0
    wait_for(running, lambda: updates(running) > stored)


def test_the_first_host_waits_for_learners_that_somebody_stops(running, cloud, tmp_path):
    """It leaves its checkpoint in S3, and the cluster stays. Then it can be stopped, too."""
    first, other = (running.hosts[name] for name in LEARNERS)
    before, starts = updates(running), first.journal("apexrl-learner").count("learner host 0 of 2")
    other.run("systemctl", "stop", "apexrl-learner.service")
    assert other.show("apexrl-learner.service", "Result") == "success", other.journal("apexrl-learner")
    wait_for(running, lambda: "a learner of another host was stopped" in first.journal("apexrl-learner"))
    wait_for(running, lambda: first.journal("apexrl-learner").count("learner host 0 of 2") > starts)
    newest = load_checkpoint(first.root / RUN_DIR / "checkpoints" / LATEST).header.counters.updates
    assert newest >= before
    first.run("systemctl", "start", "apexrl-sync.service")  # the timer's: a unit's last command may fail to start
    assert stored_checkpoint(cloud, NAME, tmp_path).header.counters.updates == newest
    first.run("systemctl", "stop", "apexrl-learner.service")
    assert first.show("apexrl-learner.service", "Result") == "success", first.journal("apexrl-learner")
    first.wait_for_state("apexrl-finish.service", "inactive")
    assert "the cluster stays" in first.journal("apexrl-finish")


def test_learners_that_finish_their_run_end_the_cluster(running, cloud):
    """They find that they have made enough updates already. No group starts a host in the place of one that ends."""
    groups = [f"{NAME}-{name}" for name in ("actor", *LEARNERS)]
    make_groups(cloud, *groups)
    for host in (running.hosts[name] for name in LEARNERS):
        host.run("sed", "-i", "s/^APEXRL_FLAGS=.*/& --total-updates 1/", "/etc/apexrl/role.env")
        host.run("systemctl", "start", "apexrl-learner.service")
    first, second = (running.hosts[name] for name in LEARNERS)

    def is_complete():
        if first.show("apexrl-learner.service", "NRestarts") != "0":
            # A container of cgroups of version 1 at times cannot start a unit's last command (status 219/CGROUP). Then
            # the first learner begins again, and the second one, which has ended well, has to come to it once more.
            second.run("systemctl", "start", "apexrl-learner.service", check=False)
        return "the run is complete: all hosts" in first.journal("apexrl-finish")

    wait_for(running, is_complete)
    assert "nothing to do" in running.hosts["learner-1"].journal("apexrl-finish")
    for host in running.hosts.values():
        host.run("systemctl", "restart", "apexrl-limit.service", check=False)  # else it would look within a minute
    for host in running.hosts.values():
        host.wait_for_poweroff(90)
    assert wanted_hosts(cloud) == dict.fromkeys(groups, 0)
