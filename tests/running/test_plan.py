import dataclasses
from pathlib import Path

import pytest
import torch

from apexrl.config.commands import RunCommand
from apexrl.config.flags import Asked, default_command, parse, to_flags, with_preset
from apexrl.config.sections import EnvConfig, ReplayConfig
from apexrl.config.words import Basis
from apexrl.errors import ConfigError
from apexrl.own_modules import Trust
from apexrl.running.launch import roles_of
from apexrl.running.plan import SMOKE, describe, make_plan
from apexrl.running.ports import with_free_ports
from apexrl.running.prepare import first_default
from apexrl.running.refusals import check_asked
from apexrl.running.run_directory import as_fork
from apexrl.running.torch_look import Answer, here

GB = 10**9
OWN = "tests.own_agent:own"


@pytest.fixture
def four_gpus(monkeypatch):
    """A machine of 16 cores and 4 GPUs, which another process sees; a context in this one fails the test."""

    def context(*_):
        pytest.fail("the launcher makes a context on a GPU")

    monkeypatch.setattr("apexrl.running.machine.num_cores", lambda: 16)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("_lazy_init", "set_device", "mem_get_info"):
        monkeypatch.setattr(torch.cuda, name, context)

    def ask(question):
        if not question.device:
            return here(question)
        is_cpu = question.device == "cpu"
        return Answer(device="cpu" if is_cpu else "cuda:0", free_bytes=0 if is_cpu else 80 * GB, num_gpus=4)

    return ask


def planned(*arguments, ask=here):
    return make_plan(Asked.of(default_command(RunCommand, Basis.of(arguments).algorithm), arguments), None, ask)


def plan_of_pong(ask, *flags):
    return planned("--run-dir", "runs/x", "--memory-gb", "64", *flags, ask=ask)


@pytest.mark.parametrize("agent", ["apex-dqn", "impala"])
def test_a_machine_with_a_gpu_gets_numbers_that_have_learned(four_gpus, agent):
    made = plan_of_pong(four_gpus, "--agent", agent)
    learned = with_preset(default_command(RunCommand, agent), "two-cores")
    assert (made.command.update, made.command.network) == (learned.update, learned.network)
    assert dict(describe(made))["preset"] == "gpu"
    assert plan_of_pong(four_gpus, "--agent", agent, "--preset", "paper").command.update.optimizer == "rmsprop"


def test_a_name_beside_a_directory_is_refused():
    with pytest.raises(ConfigError, match=r"this run's is runs/x: leave --name out"):
        planned("--env", "Catch-v0", "--run-dir", "runs/x", "--name", "mine")
    named = planned("--env", "Catch-v0", "--name", "mine").command
    assert "mine" in named.run_dir
    assert planned("--env", "Catch-v0", "--run-dir", "runs/x", "--name", "").command.run_dir == "runs/x"


def test_a_preset_says_how_the_environment_is_presented_and_flags_win(four_gpus):
    paper = ("--agent", "r2d2", "--preset", "paper")
    env = plan_of_pong(four_gpus, *paper, "--noop-max", "7").command.env
    assert (env.clip_rewards, env.life_loss_terminal, env.noop_max) == ("no", False, 7)
    env = plan_of_pong(four_gpus, *paper, "--clip-rewards", "yes").command.env
    assert (env.clip_rewards, env.life_loss_terminal) == ("yes", False)


def test_actors_on_a_gpu_are_few_processes_of_many_environments(four_gpus):
    made = plan_of_pong(four_gpus, "--actor-device", "cuda").command
    assert (made.acting.num_workers, made.acting.environments_per_worker) == (7, 128)
    assert made.replay.capacity == 2_000_000 and roles_of(made)["actors"][1].device == "cuda"
    assert plan_of_pong(four_gpus, "--actor-device", "cuda", "--num-workers", "3").command.acting.num_workers == 3
    assert plan_of_pong(four_gpus).command.acting.num_workers == 13


def test_several_learners_are_planned_without_a_context_on_a_gpu(four_gpus):
    assert plan_of_pong(four_gpus, "--num-learners", "4").command.wires.shards == 4
    with pytest.raises(ConfigError, match="8 learners want 8 GPUs, 4 are here"):
        plan_of_pong(four_gpus, "--num-learners", "8")


def saved(agent="apex-dqn", **changes):
    command = with_preset(default_command(RunCommand, agent), "small")
    return dataclasses.replace(command, env=EnvConfig(env="Catch-v0"), run_dir="runs/earlier", **changes)


def plan_again(flags, agent="apex-dqn"):
    return make_plan(Asked.of(saved(agent), flags), saved(agent)).command


@pytest.mark.parametrize(
    "flags",
    [
        *(["--preset", "two-cores"], ["--run-dir", "runs/other"], ["--env", "CartPole-v1"]),
        *(["--env-kwargs", '{"rows": 12}'], ["--frame-stack", "2"], ["--resize", "20"]),
        ["--wrapper", "tests.environments.odd_envs:unchanged"],
        ["--clip-rewards", "no"],
        *(["--n-steps", "5"], ["--unroll-starts", "40"], ["--optimizer", "rmsprop"], ["--hidden-size", "64"]),
        *(["--channels", "1", "2", "3"], ["--scale-rewards"]),
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
    with pytest.raises(ConfigError, match="cannot change --entropy-target:"):  # which adds a part that learns
        plan_again(["--entropy-target", "0.3"], "impact")


def test_a_new_network_on_earlier_experience_may_be_another_one():
    with pytest.raises(ConfigError, match="cannot change --hidden-size: leave that out, or give --from-scratch, too,"):
        plan_again(["--hidden-size", "64"])
    changed = plan_again(["--from-scratch", "--optimizer", "rmsprop", "--hidden-size", "64"])
    assert (changed.update.optimizer, changed.network.hidden_size) == ("rmsprop", 64)
    assert plan_again(["--learning-rate", "0.1"]).update.learning_rate == 0.1


def fork_of(before, flags):
    arguments = ["--fork", "runs/earlier", *flags]
    asked = Asked.of(default_command(RunCommand, before.agent), arguments)
    return make_plan(asked, as_fork(before)).command


@pytest.mark.parametrize(
    "flags", [["--n-steps", "5"], ["--hidden-size", "64"], ["--env", "CartPole-v1"], ["--journal-dir", "/elsewhere"]]
)
def test_a_fork_keeps_what_the_experience_and_the_network_need(flags):
    with pytest.raises(ConfigError, match=f"a run that is forked cannot change {flags[0]}:"):
        fork_of(saved(), flags)


def test_a_fork_has_a_directory_and_a_journal_of_its_own():
    before = dataclasses.replace(saved(), replay=ReplayConfig(journal_dir="/elsewhere"), fork="runs/first", at=7)
    command = fork_of(before, ["--learning-rate", "0.1"])
    assert command.run_dir.startswith("runs/Catch-v0-") and command.replay.journal_dir == "auto"
    assert (command.fork, command.at, command.update.learning_rate) == ("runs/earlier", 0, 0.1)
    in_memory = dataclasses.replace(before, replay=ReplayConfig(journal_dir="off"))
    assert fork_of(in_memory, ["--run-dir", "runs/x"]).replay.journal_dir == "off"
    assert fork_of(before, ["--from-scratch", "--hidden-size", "64"]).network.hidden_size == 64


def test_a_fork_has_the_environment_of_its_run():
    environment = EnvConfig("Catch-v0", '{"rows": 12}', ("tests.environments.odd_envs:unchanged",), frame_stack=2)
    command = fork_of(dataclasses.replace(saved(), env=environment), ["--learning-rate", "0.1"])
    assert command.env == environment


def plan(*flags):
    arguments = ["--agent", OWN, "--env", "Catch-v0", *flags]
    return make_plan(Asked.of(default_command(RunCommand, OWN), arguments), None)


def test_the_stream_of_a_plan_is_that_of_its_algorithm():
    made = plan("--overlap-steps", "4")
    assert (made.spec.unroll_starts, made.spec.overlap_steps, made.command.preset) == (20, 4, "small")
    rows = dict(describe(made))
    assert (rows["agent"], rows["network"]) == (OWN, "width 3")


@pytest.mark.parametrize(
    ("env", "agent"), [("Corridor-v0", "apex-dqn"), ("Corridor-v0", "impala"), ("Catch-v0", "apex-dqn")]
)
def test_a_greedy_algorithm_that_cannot_solve_an_environment_is_told_so(env, agent):
    arguments = ["--agent", agent, "--env", env]
    rows = dict(describe(make_plan(Asked.of(default_command(RunCommand, agent), arguments), None)))
    if (env, agent) == ("Corridor-v0", "apex-dqn"):
        assert rows["warning"] == "apex-dqn is greedy: it cannot solve Corridor-v0, impala can"
    else:
        assert "warning" not in rows


def test_the_flags_of_a_smoke_run_win_over_its_sizes():
    smoke = plan("--smoke", "--episodes", "3").command
    assert (smoke.max_seconds, smoke.replay.capacity, smoke.evaluation.episodes) == (SMOKE["max_seconds"], 20_000, 3)


def test_actions_that_an_algorithm_does_not_take_are_refused():
    for agent in ("apex-dqn", "impala"):
        with pytest.raises(
            ConfigError, match=r"'Pendulum-v1' has actions of 1 numbers, .* give --agent sac, apex-dpg or impact"
        ):
            planned("--env", "Pendulum-v1", "--agent", agent)
    for agent in ("sac", "apex-dpg"):
        with pytest.raises(ConfigError, match=r"'CartPole-v1' has 2 actions .* give --agent apex-dqn or impala"):
            planned("--env", "CartPole-v1", "--agent", agent)


def test_the_actions_choose_the_algorithm_where_nobody_does():
    words = ["--env", "LunarLander-v3", "--env-kwargs", '{"continuous": true}', "--batch-size", "64"]
    made = planned(*words)
    assert (made.command.agent, made.command.update.batch_size, made.known) == ("sac", 64, [])
    assert planned("--env", "LunarLander-v3", "--batch-size", "64").command.agent == "apex-dqn"
    with pytest.raises(ConfigError, match="--munchausen is a flag of --agent apex-dqn, this is --agent sac"):
        planned(*words, "--munchausen", "0.9")


def test_a_flag_of_the_usual_algorithm_for_vectors_chooses_it():
    """As the actions do, which nobody knows before the environment is made."""
    usual = (["--critic-norm", "batch"], "sac"), (["--batch-size", "8"], "apex-dqn"), (["--lstm"], "apex-dqn")
    for words, agent in (*usual, (["--critic-norm", "batch", "--agent", "impala"], "impala")):
        arguments = ["--env", "tests.environments.odd_envs:Steered-v0", *words]
        assert first_default(Basis.of(arguments), None, Trust(), arguments).agent == agent
    for env, agent in (("Catch-v0", "apex-dqn"), ("LunarLanderContinuous-v3", "impact")):
        arguments = ["--env", env, "--critic-norm", "batch"]
        with pytest.raises(ConfigError, match=f"--critic-norm is a flag of --agent sac, this is --agent {agent}"):
            make_plan(Asked.of(first_default(Basis.of(arguments), None, Trust(), arguments), arguments), None)
    with pytest.raises(ConfigError, match=r"--agent sac has auto, .*; td3 is one of --agent apex-dpg"):
        planned("--env", "Pendulum-v1", "--agent", "sac", "--preset", "td3")


def test_only_vectors_are_normalized():
    made = planned("--env", "tests.environments.odd_envs:Steered-v0", "--agent", "impact")
    assert (made.command.preset, made.command.learning.normalize_observations) == ("vectors", False)
    assert made.command.learning.scale_rewards
    asked = Asked.of(default_command(RunCommand), ["--env", "PongNoFrameskip-v4", "--normalize-observations"])
    with pytest.raises(ConfigError, match=r"--normalize-observations: this is for vectors, .* \(84, 84\) of uint8"):
        make_plan(asked, None)


@pytest.mark.parametrize(
    ("flags", "sampling"),
    [
        (["--agent", "apex-dqn"], "transitions, from 2,000 on, 8 samples an insert"),
        (["--agent", "impala"], "queue, from 1 on, 1 samples an insert"),
        (
            ["--agent", "impala", "--mix", "queue=1/8", "uniform@500=7/8"],
            "queue, from 1 on, 1 samples an insert; uniform@500, from 100 on, nobody waits",
        ),
    ],
)
def test_the_plan_tells_how_each_table_is_sampled(flags, sampling):
    arguments = [*flags, "--env", "Catch-v0", "--run-dir", "runs/x"]
    made = make_plan(Asked.of(default_command(RunCommand, flags[1]), arguments), None)
    assert dict(describe(made))["sampling"] == sampling


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
        (["--checkpoint-period-seconds", "10"], "--checkpoint-period-updates instead of --checkpoint-period-seconds"),
        (["--evaluation-period-seconds", "5"], "instead of --evaluation-period-seconds"),
        (["--publish-period-seconds", "5"], "instead of --publish-period-seconds"),
        (["--final-evaluation-seconds", "5"], "instead of --final-evaluation-seconds"),
        (["--shards", "2"], "one replay"),
    ],
)
def test_a_reproducible_run_refuses_flags_that_it_cannot_heed(flags, reason):
    with pytest.raises(ConfigError, match=f"--reproducible .*{reason}"):
        check_asked(Asked.of(default_command(RunCommand), ["--reproducible", *flags]))


def test_a_reproducible_run_has_the_same_numbers_on_every_machine(monkeypatch):
    flags = ["--reproducible", "--run-dir", "runs/x", "--memory-gb"]

    def plan_with(cores, gigabytes):
        monkeypatch.setattr("os.sched_getaffinity", lambda _: range(cores))
        arguments = [*flags, gigabytes]
        command = make_plan(Asked.of(default_command(RunCommand), arguments), None).command
        return dataclasses.replace(command, learning=dataclasses.replace(command.learning, memory_gb=0.0))

    assert plan_with(2, "10") == plan_with(64, "500")
    with pytest.raises(ConfigError, match="a capacity of 400,000 transitions does not fit"):
        plan_with(2, "3")


def test_a_reproducible_run_is_one_process_without_ports(monkeypatch):
    monkeypatch.setattr("apexrl.running.ports.socket", None)
    made = plan("--reproducible", "--run-dir", "runs/x", "--no-tensorboard")
    assert with_free_ports(made.command, (), None) == (made.command, "")
    assert "slower" in dict(describe(made))["processes"] and "ports" not in dict(describe(made))
    ((name, (script, part)),) = roles_of(made.command).items()
    assert (name, script, part.evaluation.record_dir) == ("lockstep", "apexrl.lockstep", "runs/x/videos")
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
            if field.name != "network" and (role, field.name) not in {
                ("replay", "replay"),
                ("evaluator", "evaluation"),
            }:
                assert getattr(part, field.name) == getattr(command, field.name, getattr(part, field.name))
    replay, evaluator = roles["replay"][1].replay, roles["evaluator"][1]
    assert (replay.tables, replay.journal_dir) == (("queue=fifo",), str(Path("runs/x/journal").resolve()))
    assert (evaluator.evaluation.record_dir, evaluator.evaluate) == ("runs/x/videos", True)
    assert (evaluator.device, roles["actors"][1].device) == ("cpu", "cuda")
    assert roles["learner"][1].network == command.network
    own = dataclasses.replace(command, network=dataclasses.replace(command.network, network="my:Own"))
    assert [roles_of(own)[role][1].network for role in ("actors", "evaluator")] == ["my:Own"] * 2
    assert "evaluator" not in roles_of(dataclasses.replace(command, evaluator=False))


def test_the_plan_says_each_learners_part_of_the_sizes(four_gpus):
    own = ["--env", "tests.system.counting_env:Counting-v0", "--agent", "tests.system.counting_agent:counting"]
    rows = dict(
        describe(plan_of_pong(four_gpus, *own, "--num-learners", "2", "--batch-size", "6", "--queue-size", "4"))
    )
    assert rows["update"].startswith("batch 6, queue 4, ") and rows["shards"].endswith("each with batch 3, queue 2")


def test_each_shard_has_to_hold_its_part_of_a_batch():
    flags = ["--env", "Catch-v0", "--agent", "impala", "--mix", "queue=1/2", "uniform@8=1/2", "--batch-size", "16"]
    planned(*flags)
    with pytest.raises(ConfigError, match="uniform@8 holds 4 unrolls, and --agent impala draws 8"):
        planned(*flags, "--shards", "2")


def test_the_plan_tells_which_numbers_change():
    flags = ["--agent", "impala", "--env", "Catch-v0", "--total-frames", "9000", "--entropy-cost", "3:0.01:80_000"]
    rows = dict(describe(make_plan(Asked.of(default_command(RunCommand, "impala"), flags), None)))
    rate, cost = rows["update"].split(", ")[-2:]
    assert rate == "adam 0.0002 falling linearly to 0 over 9,000 frames"
    assert cost == "entropy cost 3 falling linearly to 0.01 over 80,000 frames"


def test_a_smoke_runs_rate_is_told_as_it_is():
    rows = dict(describe(plan("--smoke", "--learning-rate", "1e-3:0")))
    assert rows["update"].endswith("half of the way over 16,000,000 frames")
