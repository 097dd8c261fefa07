"""Runs on a real Ray cluster: nodes in network namespaces of this machine, and what happens when they die."""

import contextlib
import json
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from apexrl.config.commands import RunCommand
from apexrl.config.flags import parse
from apexrl.errors import ConfigError
from apexrl.networks.checkpoint import load_checkpoint
from apexrl.networks.headers import latest_path
from apexrl.running.run_directory import save_config
from tests.running.ray_nodes import RayNodes
from tests.system.processes import ROOT, wait_for

pytestmark = pytest.mark.long("Ray clusters")

if not shutil.which("ip") or os.geteuid():
    pytest.skip("needs root and iproute2, for network namespaces", allow_module_level=True)

SHORT = [
    *("--env", "Catch-v0", "--preset", "small", "--num-workers", "auto", "--environments-per-worker", "4"),
    *("--min-size-to-sample", "500", "--checkpoint-period-seconds", "1", "--no-tensorboard"),
    *("--evaluation-period-seconds", "5", "--episodes", "2", "--ray-wait-seconds", "200"),
]
ALONE = ["--no-evaluator"]
IMPATIENT = ["--ray-patience-seconds", "15", "--ray-wait-seconds", "200"]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    """A head without CPUs, a node for the replay, one for the learner, one for actors."""
    with RayNodes(tmp_path_factory.mktemp("ray")) as cluster:
        cluster.start(head=0)
        cluster.start(one=1, two=2, three=1)
        yield cluster


def updates_shown(driver):
    """The updates that the driver showed, one number a line."""
    return [int(text.replace(",", "")) for text in re.findall(r"updates ([\d,]+) \(", driver.text())]


def trains(run):
    """Whether two checkpoints have come since, each with more updates."""
    seen = []

    def look():
        with contextlib.suppress(ConfigError):
            updates = load_checkpoint(latest_path(run)).header.counters.updates
            if not seen or updates > seen[-1]:
                seen.append(updates)
        return len(seen) > 2

    return look


def until(driver, condition, seconds, what):
    """Waits for a condition while the driver runs."""

    def look():
        assert driver.popen.poll() is None, driver.text()
        time.sleep(0.4)  # a look takes CPU time from the run
        return condition()

    return wait_for(look, seconds, what)


def ended(driver, cluster, seconds=60):
    """The exit status of a driver; no process of its run is left."""
    status = driver.popen.wait(seconds)
    wait_for(lambda: not any(cluster.where(f"{role}.py") for role in ("replay", "learner", "actor")), 10, "the end")
    return status


def test_nodes_come_and_go(nodes, tmp_path):
    """Actors follow the nodes; a replay or a learner whose node dies goes on elsewhere; Ctrl-C ends it all."""
    run = tmp_path / "run"
    with nodes.driver(*SHORT, "--run-dir", run, name="come-and-go") as driver:
        until(driver, trains(run), 60, "updates")
        (replay_node,) = nodes.where("replay.py")
        (actor_node,) = {"one", "three"} - {replay_node}
        assert nodes.where("learner.py") == ["two"]
        assert set(nodes.where("actor.py")) == {"two", actor_node}  # the evaluator, and the actors
        nodes.begin("four", 2)
        with nodes.driver(*SHORT, "--run-dir", run, name="namesake") as namesake:
            assert namesake.popen.wait(100) == 2 and "a run of that name goes on here" in namesake.text()
        until(driver, lambda: "four" in nodes.where("actor.py"), 60, "actors on a node that has joined")
        nodes.kill(actor_node)
        until(driver, lambda: "its node is gone" in driver.text(), 60, "the loss of a node")
        until(driver, trains(run), 60, "updates without the node")
        nodes.kill(replay_node)
        until(driver, lambda: nodes.where("replay.py") == ["four"], 60, "the replay on another node")
        nodes.begin("five", 2)
        until(driver, lambda: "begins again, because another group has moved" in driver.text(), 60, "the learner anew")
        until(driver, trains(run), 60, "updates with the replay on another node")
        assert "makes room" in driver.text()
        until(driver, lambda: "five" in nodes.where("actor.py"), 60, "actors on one more node")
        nodes.kill("two")
        until(driver, lambda: nodes.where("learner.py") == ["five"], 60, "the learner on another node")
        until(driver, trains(run), 60, "updates with the learner on another node")
        started = time.monotonic()
        driver.signal(signal.SIGINT)
        assert ended(driver, nodes) == 0, driver.text()
        seconds = time.monotonic() - started
        print(f"Ctrl-C: {seconds:.1f} s")
        assert "checkpoint written" in driver.text() and updates_shown(driver)
    evaluations = (run / "evaluations.csv").read_text().splitlines()
    assert len(evaluations) > 1 and (run / "logs" / "learner.log").read_text()


def test_a_job_is_stopped_with_a_last_checkpoint_and_its_files_are_fetched(nodes):
    """`ray job` submits, shows and stops a run from a machine of no node; the learner's files come to its driver."""
    run = "/tmp/ray/of-the-job"  # each node has a /tmp/ray of its own
    words = [sys.executable, "-m", "apexrl.running.ray_cluster", "--ray-address", "auto", *SHORT, *ALONE]
    waits = json.dumps({"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "60"}})
    submit = ["submit", "--submission-id", "job", "--working-dir", ROOT, "--runtime-env-json", waits, "--", *words]
    submit += ["--run-dir", run]
    with nodes.job(*submit, name="job") as job:
        (node,) = until(job, lambda: nodes.where("learner.py"), 60, "the job's learner")
        until(job, trains(nodes.own_files(node) / "of-the-job"), 60, "updates of the job")
        with nodes.job("stop", "job", name="stop") as stop:
            assert stop.popen.wait(100) == 0, stop.text()
        job.popen.wait(100)
    with nodes.job("logs", "job", name="logs") as logs:
        assert logs.popen.wait(100) == 0
        assert "checkpoint written" in logs.text() and "fetched" in logs.text(), logs.text()
        assert "Traceback" not in logs.text()
    fetched, left = (latest_path(nodes.own_files(name) / "of-the-job") for name in ("head", node))
    assert fetched.read_bytes() == left.read_bytes()


def test_the_end_of_the_driver_and_of_the_head(nodes, tmp_path):
    """Without the driver a run ends with a checkpoint and is resumed; without the head the driver says what to do."""
    run = tmp_path / "second"
    with nodes.driver(*SHORT, *ALONE, *IMPATIENT, "--agent", "impala", "--run-dir", run, name="killed") as driver:
        until(driver, trains(run), 60, "updates")
        driver.kill()
    with nodes.driver("--resume", run, *IMPATIENT, name="resumed", on=nodes.where("raylet")[-1]) as driver:
        until(driver, lambda: "continuing" in driver.text(), 60, "the end of the run without a driver")
        until(driver, trains(run), 60, "updates of the resumed run")
        nodes.kill("head")
        assert driver.popen.wait(300) == 1
        assert "the Ray cluster has not answered" in driver.text() and f"--resume {run}" in driver.text()
        assert "Traceback" not in driver.text()
        wait_for(lambda: not nodes.where("learner.py"), 60, "the end without a head")
    assert (run / "checkpoints" / "latest.safetensors").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num-workers", "some"], "--num-workers some: give a number from 1 on, or auto"),
        (["--ray-patience-seconds", "5"], "--ray-patience-seconds 5.0 makes no sense: it has to be at least 15"),
        (["--ray-patience-seconds=nan"], "--ray-patience-seconds nan makes no sense: it has to be a finite number"),
        (["--ray-wait-seconds", "-1"], "--ray-wait-seconds -1.0 makes no sense: it has to be more than 0"),
        (["--reproducible"], "--reproducible needs no cluster"),
        (["--guest", "runs/x"], "--guest needs no cluster"),
        (["--stop-at-return", "18"], "--stop-at-return is not known on a cluster: give --total-frames"),
        (["--callback=a:B"], "--callback is not known on a cluster"),
    ],
)
def test_flags_without_sense_are_refused(flags, message):
    from apexrl.running.ray_flags import divided

    with pytest.raises(ConfigError, match=message):
        divided(flags)


def test_paths_are_whole_where_they_are_paths():
    from apexrl.running.ray_flags import divided

    flags = ["--journal-dir", "journals", "--keys=keys", "--record-dir", "videos"]
    here = [str(Path(name).resolve()) for name in ("journals", "keys", "videos")]
    _, divided_flags, _ = divided(flags)
    assert divided_flags == ["--journal-dir", here[0], "--keys", here[1], "--record-dir", here[2]]
    assert divided(["--journal-dir", "off"])[1] == ["--journal-dir", "off"]
    mix = f"{Path('a=b/journal').resolve()}=1/2"
    assert divided(["--mix-journal", "a=b/journal=1/2"])[1] == ["--mix-journal", mix]
    assert divided(["--mix-journal=1/2"])[1] == ["--mix-journal", "1/2"]  # the planner says what is missing


def test_a_run_that_goes_on_keeps_its_agent(tmp_path, monkeypatch):
    from apexrl.running.ray_cluster import Driver
    from apexrl.running.ray_flags import RayConfig

    monkeypatch.chdir(tmp_path)
    (tmp_path / "old").mkdir()
    save_config(parse(RunCommand, ["--agent", "impala", "--env", "Catch-v0", "--run-dir", str(tmp_path / "old")]))
    resumed = Driver(RayConfig(), ["--resume", str(tmp_path / "old"), "--entropy-cost", "0.02"], 0, Console())
    assert resumed.asked.update.entropy_cost == 0.02
    (tmp_path / "guest").mkdir()
    words = ["--env", "Catch-v0", "--guest", str(tmp_path / "old"), "--run-dir", str(tmp_path / "guest")]
    save_config(parse(RunCommand, words))
    with pytest.raises(ConfigError, match="guest needs no cluster: continue it by"):
        Driver(RayConfig(), ["--resume", str(tmp_path / "guest")], 0, Console())
    monkeypatch.chdir(tmp_path / "old")
    assert Driver(RayConfig(), ["--env", "Catch-v0"], 0, Console()).asked.agent == "apex-dqn", "it continues nothing"
    forked = Driver(RayConfig(), ["--fork", str(tmp_path / "old")], 0, Console())
    assert forked.directory.name.startswith("Catch-v0-")


def test_actors_take_the_cpus_that_nobody_else_holds(monkeypatch, tmp_path):
    from apexrl.running import ray_cluster

    monkeypatch.chdir(tmp_path)
    busy, full, dead = (digit * 56 for digit in "bfd")
    free = {busy: {"CPU": 5.0}, full: {"GPU": 1.0}, dead: {"CPU": 4.0}}
    nodes = [{"NodeID": node, "Alive": node != dead, "Resources": {"CPU": 16.0}} for node in free]
    monkeypatch.setattr(ray_cluster.ray, "nodes", lambda: nodes)
    monkeypatch.setattr(ray_cluster.ray.util, "placement_group_table", lambda place: {"state": "CREATED"})
    monkeypatch.setattr(ray_cluster, "available_resources_per_node", lambda: free)
    driver = ray_cluster.Driver(ray_cluster.RayConfig(), ["--env", "Catch-v0"], 0, Console())
    started = []
    monkeypatch.setattr(driver, "_start", lambda name, kind, *arguments, **options: started.append((name, options)))
    driver._spread(driver.asked, None)
    ((name, options),) = started
    assert name == f"actors {busy[:8]}" and options["num_cpus"] == 5
    assert options["scheduling_strategy"].node_id == busy


@pytest.mark.parametrize(
    ("device", "has", "asked"),
    [("cuda", 0, 1), ("cuda:0", 0, 1), ("cuda", 1, 1), ("auto", 0, 0), ("auto", 1, 1), ("cpu", 1, 0)],
)
def test_a_gpu_that_was_asked_for_is_waited_for(monkeypatch, tmp_path, device, has, asked):
    """As on a cluster whose GPU node still starts: `auto` takes what there is now."""
    from apexrl.running import ray_cluster

    monkeypatch.chdir(tmp_path)
    there = {"CPU": 16.0, "GPU": float(has)}
    monkeypatch.setattr(ray_cluster.ray, "cluster_resources", lambda: there)
    reserved = []
    place = SimpleNamespace(ready=lambda: None)
    monkeypatch.setattr(
        ray_cluster.ray.util, "placement_group", lambda wanted, *_, **__: reserved.append(wanted) or place
    )
    driver = ray_cluster.Driver(ray_cluster.RayConfig(), ["--env", "Catch-v0", "--device", device], 0, Console())
    monkeypatch.setattr(driver, "_wait", lambda *_: True)
    assert driver._reserve(None) is place
    there["replay"] = 1.0  # a node of the cluster is for it
    assert driver._reserve(None) is place
    (replay, learner), (placed, _) = reserved
    assert "GPU" not in replay and learner.get("GPU", 0) == asked
    assert placed == replay | {"replay": 1}


def test_a_cluster_that_is_not_there_is_one_line(nodes):
    with nodes.driver("--ray-address", "127.0.0.1:1", name="nobody") as driver:
        assert driver.popen.wait(200) == 2
        assert "no Ray cluster answers" in driver.text() and "Traceback" not in driver.text()
