"""A cluster on this machine whose learner host has two learners, and its replay host two shards.

The tests are in order: all of them work on one cluster, which the last one ends.
"""

import re
import shutil

import pytest

from apexrl.networks.checkpoint import LATEST, load_checkpoint
from tests.deploy import rootfs
from tests.deploy.cluster_status import RUN_DIR, continued_from, figure, put_deadline, updates, wait_for
from tests.deploy.hosts import interpreter
from tests.deploy.running_cluster import RunningCluster
from tests.deploy.terraform import BUCKET, resources
from tests.deploy.volume import blank_volume
from tests.deploy.vpc import vpc

# The first time, a root file system is made and packages are downloaded.
pytestmark = pytest.mark.timeout(1800)

NAME = "two-learners"
CIDR = "10.81.0.0/24"
VARIABLES = {
    "name": NAME,
    "results_bucket": BUCKET,
    "vpc_cidr": CIDR,
    "env": "CartPole-v1",
    "agent": "impala",
    "preset": "small",
    "learner_instance_type": "g6.12xlarge",
    "learner_gpus": 2,
    "actor_hosts": 1,
    "actor_workers_per_host": 2,
    "environments_per_worker": 4,
    "max_hours": 1,
    "learner_flags": {"mix": "queue=1/2 uniform=1/2", "checkpoint_period_seconds": "2", "device": "cpu"},
}
SHARDS = range(2)


@pytest.fixture(scope="module")
def running(build, cloud, cluster, address, tmp_path_factory):
    """Replay, learner and an actor host."""
    state = cluster.copy(tmp_path_factory.mktemp("plan")).apply(VARIABLES)
    put_deadline(cloud, state)
    directory = tmp_path_factory.mktemp("cluster")
    layers = {name: image.layers for name, image in build.images.items()}
    with (
        vpc(CIDR, address, cloud, rootfs.base()) as network,
        blank_volume(directory, resources(state)["aws_ebs_volume.journal"]["id"]) as volume,
    ):
        network.permit(state)
        hosts = RunningCluster(state, network, layers, interpreter(directory) | volume, directory / "hosts")
        try:
            hosts.start("replay", "learner", "actor0")
            yield hosts
        finally:
            hosts.close()
            shutil.rmtree(directory, ignore_errors=True)


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


def test_two_learners_learn_from_two_shards(running):
    wait_for_all_shards(running, [0, 0])
    replay, learner = running.hosts["replay"], running.hosts["learner"]
    for shard in SHARDS:
        assert replay.show(f"apexrl-replay@{shard}.service", "ActiveState") == "active"
        assert replay.run("ls", f"/var/lib/apexrl/journal/run-1/shard-{shard}").stdout.strip()
    said = learner.journal("apexrl-learner")
    assert all(f"learner {rank} of 2; gradients by gloo" in said for rank in SHARDS), said
    wait_for(running, lambda: figure(running, "replay/actors") > 0)


def test_the_first_learner_alone_writes_what_goes_to_s3(running, cloud):
    learner = running.hosts["learner"]
    opened = [
        learner.run("find", f"/proc/{learner_pid(learner, rank)}/fd", "-lname", f"/{RUN_DIR}/*").stdout.split()
        for rank in SHARDS
    ]
    assert opened[0] and not opened[1], opened
    learner.run("systemctl", "start", "apexrl-sync.service")
    listed = cloud.client("s3").list_objects_v2(Bucket=BUCKET, Prefix=f"{NAME}/run-1/")["Contents"]
    names = [entry["Key"].removeprefix(f"{NAME}/run-1/") for entry in listed]
    assert f"checkpoints/{LATEST}" in names
    assert sum(name.startswith("tensorboard/events.") for name in names) == 1, names


def test_actors_reach_their_port_of_each_shard_and_learners_theirs(running):
    replay, learner = (running.hosts[name].address for name in ("replay", "learner"))
    doors = [(replay, port) for port in range(51001, 51007)] + [(learner, 52003)]

    def reached(source: str) -> list[int]:
        return [port for (_, port), outcome in running.vpc.reach(source, doors).items() if outcome == "open"]

    assert reached("actor0") == [51001, 51003]
    assert reached("learner") == [51002, 51004, 52003], "where the learners meet, themselves only"


def test_a_learner_and_a_shard_that_are_killed_come_back(running):
    """The learner takes the other one along, and both continue; the other shard goes on."""
    replay, learner, before = running.hosts["replay"], running.hosts["learner"], transitions(running)
    pids = [replay.show(f"apexrl-replay@{shard}.service", "MainPID") for shard in SHARDS]
    replay.run("kill", "-KILL", pids[1])
    learner.run("kill", "-KILL", learner_pid(learner, 1))
    wait_for(running, lambda: re.search(r"recovered [1-9]\d* unrolls", replay.journal("apexrl-replay@1")))
    wait_for(running, lambda: continued_from(learner))
    assert continued_from(learner)[0] > 0
    wait_for_all_shards(running, before)
    assert replay.show("apexrl-replay@0.service", "MainPID") == pids[0]


def test_learners_that_are_stopped_leave_their_last_checkpoint_in_s3(running, cloud, tmp_path):
    learner, before = running.hosts["learner"], updates(running)
    learner.run("systemctl", "stop", "apexrl-learner.service")
    assert learner.show("apexrl-learner.service", "Result") == "success", learner.journal("apexrl-learner")
    cloud.client("s3").download_file(BUCKET, f"{NAME}/run-1/checkpoints/{LATEST}", str(tmp_path / LATEST))
    stored = load_checkpoint(tmp_path / LATEST).header.counters.updates
    assert stored == load_checkpoint(learner.root / RUN_DIR / "checkpoints" / LATEST).header.counters.updates >= before
    learner.wait_for_state("apexrl-finish.service", "inactive")
    assert "the cluster stays" in learner.journal("apexrl-finish")


def test_learners_that_finish_their_run_end_the_cluster(running, cloud):
    """They find that they have made enough updates already."""
    ec2, autoscaling = cloud.client("ec2"), cloud.client("autoscaling")
    name = f"{NAME}-actor"
    image = ec2.register_image(Name="cpu")["ImageId"]
    ec2.create_launch_template(LaunchTemplateName=name, LaunchTemplateData={"ImageId": image})
    autoscaling.create_auto_scaling_group(
        AutoScalingGroupName=name, MinSize=0, MaxSize=1, DesiredCapacity=0, AvailabilityZones=["us-east-1a"],
        LaunchTemplate={"LaunchTemplateName": name},
    )  # fmt: skip
    learner = running.hosts["learner"]
    learner.run("sed", "-i", "s/^APEXRL_FLAGS=.*/& --total-updates 1/", "/etc/apexrl/role.env")
    learner.run("systemctl", "start", "apexrl-learner.service")
    wait_for(running, lambda: "the run is complete" in learner.journal("apexrl-finish"))
    for host in running.hosts.values():
        host.run("systemctl", "restart", "apexrl-limit.service", check=False)  # else it would look within a minute
    for host in running.hosts.values():
        host.wait_for_poweroff(90)
