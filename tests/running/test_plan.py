import dataclasses
from pathlib import Path

import pytest
import torch

from apexrl.config import EnvConfig, LearnerCommand, RunCommand
from apexrl.errors import ConfigError
from apexrl.flags import default_command, parse, parse_onto, to_flags, wants_of, with_preset
from apexrl.learning.unroll_store import UnrollStore
from apexrl.replay.replay import ring_unrolls
from apexrl.running.launch import roles_of
from apexrl.running.plan import SMOKE_SECONDS, Machine, check_asked, check_ports, describe, largest_capacity, make_plan
from apexrl.types import StreamSpec

SPEC = StreamSpec("Atari-v0", (84, 84), "uint8", 4, 18, 4, unroll_starts=80, overlap_steps=3)
WANTS = wants_of(default_command(LearnerCommand))
GB = 10**9
OWN = "tests.own_agent:own"


def largest(device, host_gb, device_gb):
    return largest_capacity(Machine(16, host_gb * GB, torch.device(device), device_gb * GB), SPEC, WANTS, 8)


def test_the_gpu_is_the_bound_where_it_holds_more_than_the_host():
    capacity = largest("cuda", 64, 140)
    needed = UnrollStore.bytes_needed(SPEC, ring_unrolls(capacity, SPEC.unroll_starts), WANTS)
    assert needed == pytest.approx(0.85 * 140 * GB - 2 * GB, rel=0.01)


def test_the_host_is_the_bound_where_the_gpu_holds_less():
    capacity = largest("cuda", 64, 12)
    assert capacity == largest("cpu", 64, 64)
    needed = UnrollStore.bytes_needed(SPEC, ring_unrolls(capacity, SPEC.unroll_starts), WANTS) + 300 * capacity
    assert needed == pytest.approx((0.85 * 64 - 0.4 * 12) * GB, rel=0.01)


def test_the_server_of_a_great_gpu_has_to_fit_the_host():
    assert largest("cuda", 8, 10_000) == int((0.85 * 8 - 0.4 * 12) * GB / 300)


def test_memory_that_is_given_is_what_the_plan_is_made_for():
    assert Machine.here("cpu", 2.5).memory_bytes == 2_500_000_000


def saved(agent="apex-dqn", **changes):
    command = with_preset(default_command(RunCommand, agent), "small")
    return dataclasses.replace(command, env=EnvConfig(env="Catch-v0"), run_dir="runs/earlier", **changes)


def plan_again(flags, agent="apex-dqn"):
    return make_plan(saved(agent), saved(agent), flags).command


@pytest.mark.parametrize(
    "flags",
    [
        *(["--preset", "two-cores"], ["--run-dir", "runs/other"], ["--env", "CartPole-v1"]),
        *(["--n-steps", "5"], ["--unroll-starts", "40"], ["--optimizer", "rmsprop"], ["--hidden-size", "64"]),
        ["--channels", "1", "2", "3"],
        ["--from-scratch", "--env", "CartPole-v1"],
        ["--from-scratch", "--n-steps", "5"],
    ],
)
def test_a_resumed_run_keeps_what_its_experience_and_its_network_need(flags):
    with pytest.raises(ConfigError, match=f"cannot change {[flag for flag in flags if flag.startswith('--')][-1]}:"):
        plan_again(flags)


@pytest.mark.parametrize("flags", [["--width", "7"], ["--overlap-steps", "1"], ["--unroll-starts", "4"]])
def test_a_resumed_run_of_ones_own_algorithm_keeps_its_stream_and_its_network(flags):
    with pytest.raises(ConfigError, match=f"cannot change {flags[0]}:"):
        plan_again(flags, OWN)
    assert plan_again(["--trace-length", "0.5"], OWN).algorithm.trace_length == 0.5


def test_a_resumed_run_keeps_its_algorithm():
    with pytest.raises(ConfigError, match="cannot change --agent"):
        make_plan(default_command(RunCommand, OWN), saved(), ["--agent", OWN, "--width", "7"])


def test_a_new_network_on_earlier_experience_may_be_another_one():
    changed = plan_again(["--from-scratch", "--optimizer", "rmsprop", "--hidden-size", "64"])
    assert (changed.update.optimizer, changed.network.hidden_size) == ("rmsprop", 64)
    assert plan_again(["--learning-rate", "0.1"]).update.learning_rate == 0.1


def plan(*flags):
    arguments = ["--agent", OWN, "--env", "Catch-v0", *flags]
    return make_plan(parse_onto(default_command(RunCommand, OWN), arguments), None, arguments)


def test_the_stream_of_a_plan_is_that_of_its_algorithm():
    made = plan("--overlap-steps", "4")
    assert (made.spec.unroll_starts, made.spec.overlap_steps, made.command.preset) == (20, 4, "small")
    rows = dict(describe(made))
    assert (rows["agent"], rows["network"]) == (OWN, "width 3")


def test_the_flags_of_a_smoke_run_win_over_its_sizes():
    smoke = plan("--smoke", "--episodes", "3").command
    assert (smoke.max_seconds, smoke.replay.capacity, smoke.evaluation.episodes) == (SMOKE_SECONDS, 20_000, 3)


def test_actions_that_an_algorithm_does_not_take_are_refused():
    asked = dataclasses.replace(default_command(RunCommand), env=EnvConfig(env="Pendulum-v1"))
    with pytest.raises(ConfigError, match=r"'Pendulum-v1' has actions of 1 numbers: .* only discrete"):
        make_plan(asked, None, ["--env", "Pendulum-v1"])


def test_a_network_that_cannot_work_is_refused_before_anything_starts():
    with pytest.raises(ConfigError, match="--width 101"):
        plan("--width", "101")


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--resume", "runs/earlier"], "continues none"),
        *((["--device", "cuda"], "on the CPU"), (["--actor-device", "cuda:1"], "on the CPU")),
        (["--num-workers", "2"], "--environments-per-worker"),
        (["--journal-dir", "somewhere"], "in memory only"),
    ],
)
def test_a_reproducible_run_refuses_flags_that_it_cannot_heed(flags, reason):
    with pytest.raises(ConfigError, match=f"--reproducible .*{reason}"):
        check_asked(parse_onto(default_command(RunCommand), ["--reproducible", *flags]))


def test_a_reproducible_run_has_the_same_numbers_on_every_machine(monkeypatch):
    flags = ["--reproducible", "--run-dir", "runs/x", "--memory-gb"]

    def plan_with(cores, gigabytes):
        monkeypatch.setattr("os.sched_getaffinity", lambda _: range(cores))
        arguments = [*flags, gigabytes]
        command = make_plan(parse_onto(default_command(RunCommand), arguments), None, arguments).command
        return dataclasses.replace(command, learning=dataclasses.replace(command.learning, memory_gb=0.0))

    assert plan_with(2, "10") == plan_with(64, "500")
    with pytest.raises(ConfigError, match="a capacity of 400,000 transitions does not fit"):
        plan_with(2, "3")


def test_a_reproducible_run_is_one_process_without_ports(monkeypatch):
    monkeypatch.setattr("apexrl.running.plan.socket", None)
    made = plan("--reproducible", "--run-dir", "runs/x", "--no-tensorboard")
    check_ports(made.command)
    assert "slower" in dict(describe(made))["processes"] and "ports" not in dict(describe(made))
    ((name, (script, part)),) = roles_of(made.command).items()
    assert (name, script, part.evaluation.record_dir) == ("lockstep", "lockstep.py", "runs/x/videos")
    assert parse(RunCommand, to_flags(part)) == part


def test_each_role_gets_its_part_of_a_run():
    command = dataclasses.replace(plan("--seed", "3").command, run_dir="runs/x", actor_device="cuda")
    roles = roles_of(command)
    assert {name: script for name, (script, _) in roles.items()} == {
        **{"replay": "replay.py", "learner": "learner.py", "actors": "actor.py", "evaluator": "actor.py"}
    }
    for role, (_, part) in roles.items():
        assert parse(type(part), to_flags(part)) == part
        for field in dataclasses.fields(part):
            if (role, field.name) not in {("replay", "replay"), ("evaluator", "evaluation")}:
                assert getattr(part, field.name) == getattr(command, field.name, getattr(part, field.name))
    replay, evaluator = roles["replay"][1].replay, roles["evaluator"][1]
    assert (replay.tables, replay.journal_dir) == (("queue=fifo",), str(Path("runs/x/journal").resolve()))
    assert (evaluator.evaluation.record_dir, evaluator.evaluate) == ("runs/x/videos", True)
    assert (evaluator.device, roles["actors"][1].device) == ("cpu", "cuda")
    assert "evaluator" not in roles_of(dataclasses.replace(command, evaluator=False))
