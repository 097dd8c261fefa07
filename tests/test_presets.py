"""Each table of presets.toml is a run that can be planned, whatever the machine, and the command line wins over it."""

import pytest

from apexrl.config.commands import RunCommand
from apexrl.config.flags import Asked, default_command
from apexrl.config.presets import flags_for, presets, usual_agent
from apexrl.config.words import Basis, words_of
from apexrl.running.plan import describe, make_plan


def planned(*arguments):
    return make_plan(Asked.of(default_command(RunCommand, Basis.of(arguments).algorithm), arguments), None)


GRID = "minigrid:MiniGrid-MemoryS7-v0"
ENVIRONMENTS = [GRID if "*" in env else env for env in presets()]


@pytest.mark.parametrize("env", ENVIRONMENTS)
def test_each_table_is_a_plan(env):
    plan = planned("--env", env)
    flags = flags_for(env, plan.command.agent)
    known = [word for name, value in flags.items() for word in words_of(f"--{name}", value)]
    assert plan.command.agent == usual_agent(env) and list(plan.known) == known
    assert Asked.of(plan.command, known).command == plan.command  # all of them hold
    assert dict(describe(plan))["preset"].count("presets.toml") == bool(known)


def test_a_preset_an_agent_and_flags_of_ones_own_win():
    frames = int(presets()["CartPole-v1"]["total-frames"])
    assert planned("--env", "CartPole-v1").command.learning.total_frames == frames
    own = planned("--env", "CartPole-v1", "--total-frames", "5k")
    assert own.command.learning.total_frames == 5_000
    assert "--total-frames" not in own.known and "--batch-size" in own.known, "the plan shows those that hold"
    for end in (["--max-seconds", "60"], ["--total-updates", "5"]):
        assert planned("--env", "CartPole-v1", *end).command.learning.total_frames == 0
    other = {"apex-dqn": "impala", "impala": "apex-dqn"}[usual_agent("CartPole-v1")]
    for flags in (["--preset", "small"], ["--agent", other]):
        plan = planned("--env", "CartPole-v1", *flags)
        assert plan.command.learning.total_frames == 0 and not plan.known


def test_a_table_may_be_of_several_environments_and_present_them():
    plan = planned("--env", GRID)
    assert plan.command.preset == "vectors" and plan.command.algorithm.lstm
    assert plan.spec.frame_shape == (7 * 7 * 20 + 4,), "with the wrapper of the table"
    own = planned("--env", GRID, "--wrapper", "minigrid.wrappers:ImgObsWrapper", "--no-lstm")
    assert own.spec.frame_shape == (7, 7, 3) and not own.command.algorithm.lstm
    assert not {"--wrapper", "--lstm"} & set(own.known)


def test_an_unknown_environment_has_no_numbers():
    assert flags_for("Nobody-v0", "apex-dqn") == {} and usual_agent("Nobody-v0") == "apex-dqn"
