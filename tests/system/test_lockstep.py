"""Reproducible runs: a seed decides every tensor, whenever and however a run ends."""

import csv
import hashlib
import json
import random
import signal

import gymnasium
import numpy as np
import pytest
import torch

from apexrl.config.commands import RunCommand
from apexrl.config.flags import parse
from apexrl.errors import ConfigError
from apexrl.lifecycle import PERMANENT_STATUS, Stop
from apexrl.lockstep.loop import LockstepLoop
from apexrl.networks.checkpoint import load_checkpoint
from tests.system.processes import launch, refuse, updates_of, wait_for

CATCH = ["--env", "Catch-v0"]
LASER = [*CATCH, "--agent", "impala", "--mix", "queue=1/8", "uniform=7/8", "--batch-size", "8", "--lstm"]
R2D2 = ["--env", "MemoryCatch-v0", "--agent", "r2d2", "--batch-size", "4", "--sequence-unrolls", "2"]
IMPACT = [*CATCH, "--agent", "impact", "--batch-size", "8", "--minibatches", "4"]
PQN = [*CATCH, "--agent", "pqn"]
VECTORS = ["--env", "Pendulum-v1", "--agent", "impact", "--preset", "vectors", "--batch-size", "4",
           "--minibatches", "2", "--min-size-to-sample", "500", "--hidden-size", "32"]  # fmt: skip
SAC = ["--env", "Pendulum-v1", "--min-size-to-sample", "500", "--batch-size", "16", "--hidden-size", "32"]
DPG = [*SAC, "--agent", "apex-dpg"]
COUNTING = ["--agent", "tests.system.counting_agent:counting", "--env", "tests.system.counting_env:Counting-v0",
            "--environments-per-worker", "3"]  # fmt: skip


def digest(directory, name="latest"):
    """The sha256 of all tensors of a checkpoint."""
    checkpoint = load_checkpoint(directory / "checkpoints" / f"{name}.safetensors")
    found = hashlib.sha256()
    for key, tensor in sorted(checkpoint.tensors.items()):
        found.update(key.encode() + bytes(tensor.flatten().contiguous().numpy().data))
    return found.hexdigest()


def curve(directory):
    """The evaluations without their times."""
    with (directory / "evaluations.csv").open() as file:
        return [row[1:] for row in csv.reader(file)]


def run(tmp_path, ports, name, *flags):
    """Runs to the end; returns the directory."""
    with launch(tmp_path, ports, "--reproducible", "--episodes", 2, *flags, name=name) as process:
        wait_for(lambda: process.popen.poll() is not None, 120, "the end of the run")
        assert process.popen.returncode == 0, process.text()
    return tmp_path / name


@pytest.mark.parametrize("family", [
    CATCH, LASER, R2D2, IMPACT, SAC, COUNTING,
    *(pytest.param(family, marks=pytest.mark.long("seeds")) for family in (PQN, VECTORS, DPG)),
])  # fmt: skip
def test_one_seed_gives_one_network_bit_for_bit(tmp_path, free_ports, family):
    flags = [*family, "--total-updates", 60, "--evaluation-period-updates", 20]
    first, again, other = (
        run(tmp_path, free_ports(4), name, *flags, "--seed", seed) for name, seed in (("a", 3), ("b", 3), ("c", 4))
    )
    assert digest(first) == digest(again) != digest(other)
    assert digest(first, "best") == digest(again, "best")
    assert curve(first) == curve(again)
    if family is CATCH:  # which can be filmed
        assert [path.name for path in sorted((first / "videos").iterdir())] == [
            "game-00000000.webm",
            "game-00000060.webm",
        ]
    assert [row[1] for row in curve(first)] == ["updates", "0", "20", "40", "60"]


def test_a_stopped_run_is_the_beginning_of_a_longer_one_and_evaluations_change_nothing(tmp_path, free_ports):
    with launch(tmp_path, free_ports(4), "--reproducible", *CATCH, name="stopped") as process:
        wait_for(lambda: updates_of(tmp_path / "stopped") > 0, 60, "an update")
        process.signal(signal.SIGINT)
        wait_for(lambda: process.popen.poll() is not None, 60, "the end of the run")
        assert process.popen.returncode == 0, process.text()
    checkpoint = load_checkpoint(tmp_path / "stopped" / "checkpoints" / "latest.safetensors")
    updates = checkpoint.header.counters.updates
    again = run(tmp_path, free_ports(4), "again", *CATCH, "--no-evaluator", "--total-updates", updates)
    assert digest(tmp_path / "stopped") == digest(again)


def test_a_killed_run_ends_and_is_not_continued(tmp_path, free_ports):
    with launch(tmp_path, free_ports(4), "--reproducible", *CATCH, "--checkpoint-period-updates", 1) as process:
        wait_for((tmp_path / "run" / "checkpoints" / "latest.safetensors").exists, 60, "a checkpoint")
        (role,) = process.descendants()
        role.kill()
        wait_for(lambda: process.popen.poll() is not None, 60, "the end of the run")
        assert process.popen.returncode == 1
        assert "lockstep ended with signal SIGKILL" in process.text()
        assert "restart 1" not in process.text(), "it would say only that a reproducible run continues none"
    status, text = refuse("--resume", tmp_path / "run")
    assert status == PERMANENT_STATUS and "is a reproducible run, which cannot be continued" in text, text


def make(tmp_path, *flags):
    flags = ["--preset", "small", "--no-evaluator", "--run-dir", str(tmp_path / "run"), *flags]
    return LockstepLoop(parse(RunCommand, flags), Stop())


class Unseeded(gymnasium.Env):
    """Five steps; draws from the generators of the process, whatever seed it gets."""

    observation_space = gymnasium.spaces.Box(-1.0, 2.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self):
        self.offset = random.random()

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return np.array([np.random.rand(), self.offset], np.float32), {}

    def step(self, action):
        self.steps += 1
        seen = np.array([np.random.rand(), torch.rand(1).item()], np.float32)
        return seen, random.random(), self.steps == 5, False, {}


def test_evaluations_change_nothing_where_environments_draw_from_the_generators_of_the_process(tmp_path):
    gymnasium.register("Unseeded-v0", Unseeded)
    digests = []
    for evaluator in ("--evaluator", "--no-evaluator"):
        random.seed(3)
        np.random.seed(3)
        flags = ["--env", "Unseeded-v0", "--total-updates", "20", "--min-size-to-sample", "200"]
        loop = make(tmp_path / evaluator, *flags, "--evaluation-period-updates", "5", "--episodes", "2", evaluator)
        loop.run()
        digests.append(digest(tmp_path / evaluator / "run"))
    assert digests[0] == digests[1]
    assert len(curve(tmp_path / "--evaluator" / "run")) == 1 + 5


class Breaking(gymnasium.Env):
    """Five steps, each of which may break it, as the seed of its games says."""

    observation_space = gymnasium.spaces.Box(0.0, 1.0, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.np_random.random(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        if self.np_random.random() < 0.05:
            raise ConnectionError("the simulator is gone")
        return self.np_random.random(1, np.float32), float(action), self.steps == 5, False, {}


def test_environments_that_fail_change_nothing_about_a_reproducible_run(tmp_path):
    gymnasium.register("Breaking-v0", Breaking)
    digests, failures = [], []
    for name in ("first", "again"):
        loop = make(tmp_path / name, "--env", "Breaking-v0", "--total-updates", "20", "--min-size-to-sample", "200")
        loop.run()
        digests.append(digest(tmp_path / name / "run"))
        failures.append(loop.actor.player.num_failures)
    assert digests[0] == digests[1] and failures[0] == failures[1] > 5
    status = json.loads((tmp_path / "first" / "run" / "status.json").read_text())
    assert status["metrics"]["actor/environment_failures_total"] == failures[0]


@pytest.mark.parametrize("result", ["status.json", "evaluations.csv", "checkpoints/best.safetensors"])
def test_a_reproducible_run_begins_beside_no_results(tmp_path, result):
    path = tmp_path / "run" / result
    path.parent.mkdir(parents=True)
    path.write_text("")
    with pytest.raises(ConfigError, match="holds results"):
        make(tmp_path, *CATCH)


@pytest.mark.parametrize(("per_insert", "batch"), [(0.5, 64), (3.0, 32), (8.0, 128)])
def test_limiters_keep_samples_and_inserts_in_proportion_from_the_first_to_the_last(tmp_path, per_insert, batch):
    """An oracle counts both sides: each draw was due, and actors went on only when none was due any more."""
    numbers = ["--samples-per-insert", str(per_insert), "--batch-size", str(batch), "--min-size-to-sample", "1000"]
    loop = make(tmp_path, *CATCH, "--total-updates", "150", *numbers)
    slack = max(4 * batch, 0.1 * per_insert * 1000)
    seen = {"drawn": 0, "rounds": 0}
    play, update = loop.actor.play, loop.learner.update

    def due():
        return (loop.replay.log.num_inserted - 1000) * per_insert - seen["drawn"] * batch

    def played(*arguments):
        assert loop.replay.log.num_inserted < 1000 or -slack <= due() < batch - slack
        play(*arguments)
        seen["rounds"] += 1

    def updated():
        may_draw = loop.replay.log.num_inserted >= 1000 and due() >= batch - slack
        assert update() == may_draw
        seen["drawn"] += may_draw
        return may_draw

    loop.actor.play, loop.learner.update = played, updated
    loop.run()
    limiter = loop.replay.tables["transitions"].limiter
    assert seen["drawn"] == loop.learner.updater.num_updates == 150 and seen["rounds"] > 100
    assert (limiter.inserted, limiter.sampled) == (loop.replay.log.num_inserted, 150 * batch)


def test_limiters_that_wait_for_each_other_end_the_run(tmp_path):
    tables = ["--tables", "queue=fifo:1:1", "sequences=priority:1:500"]
    with pytest.raises(ConfigError, match=r"\(sequences waits for actors\): give --tables other"):
        make(tmp_path, *COUNTING, *tables).run()
