"""Numbers that change while a run goes on, as flags give them: their shapes, texts."""

import dataclasses
import math

import msgspec
import pytest

from apexrl.agents.apex_dqn_config import ApexUpdate
from apexrl.agents.families import FAMILIES
from apexrl.config.commands import LearnerCommand, RunCommand
from apexrl.config.flags import default_command, parse, to_flags
from apexrl.config.schedules import Schedule, schedules_of
from apexrl.config.sections import LearningConfig
from apexrl.errors import ConfigError
from apexrl.files import write_json
from apexrl.running.run_directory import read_config
from apexrl.runs import CONFIG_FILE

RATE = 4e-4


@pytest.mark.parametrize(
    ("text", "schedule"),
    [
        (0.5, (0.5, 0.5, 0, "linear")),
        ("3e-4:1e-5:16M", (3e-4, 1e-5, 16_000_000, "linear")),
        ("3e-4:1e-5:5_000_000", (3e-4, 1e-5, 5_000_000, "linear")),
        ("0:1:5e6:cosine", (0.0, 1.0, 5_000_000, "cosine")),
        ("1:0:cosine", (1.0, 0.0, 0, "cosine")),
        ("-1:-.5", (-1.0, -0.5, 0, "linear")),
    ],
)
def test_a_number_is_read_as_its_way_through_a_run(text, schedule):
    assert Schedule.of(text) == schedule


@pytest.mark.parametrize("shape", ["", ":cosine"])
def test_the_shapes_begin_at_the_start_and_end_at_the_end(shape):
    schedule = Schedule.of(f"{RATE}:1e-4{shape}")
    assert [schedule.at(share) for share in (0.0, 0.5, 1.0)] == pytest.approx([RATE, 2.5e-4, 1e-4])
    assert Schedule.of("1:0:cosine").at(0.25) == pytest.approx((1 + math.cos(math.pi / 4)) / 2)
    assert Schedule.of(RATE).at(0.7) == RATE


def test_a_malformed_one_of_a_file_is_named(tmp_path):
    usual = msgspec.to_builtins(default_command(RunCommand, "impala"))
    write_json(tmp_path / CONFIG_FILE, {"command": usual | {"update": usual["update"] | {"value_cost": "1:2:x"}}})
    with pytest.raises(ConfigError, match=r"--value-cost 1:2:x is no number that may change"):
        read_config(tmp_path / CONFIG_FILE)


@pytest.mark.parametrize(
    ("number", "ends", "words"),
    [
        (0.5, (5, 3.0), "0.5"),
        ("1:1e-5:cosine", (5_000, 3.0), "1 falling along a cosine to 1e-05 over 5,000 frames or 3 seconds"),
        ("1:2", (0, 0.0), "1 rising linearly to 2, half of the way over 16,000,000 frames"),
        ("1:0:9000", (5_000, 3.0), "1 falling linearly to 0 over 9,000 frames"),
    ],
)
def test_the_way_is_told_in_words(number, ends, words):
    assert Schedule.of(number).describe(LearningConfig(total_frames=ends[0]), ends[1]) == words


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("3e-4:-1", "--learning-rate -1.0 makes no sense: it has to be more than 0"),
        ("0:1", "--learning-rate 0.0 makes no sense: it has to be more than 0"),
        ("1:inf", "has to be a finite number"),
        ("1e-3:0:1e16", "--learning-rate 1e-3:0:1e16 makes no sense: its frames have to be at most 1e\\+15"),
    ],
)
def test_start_and_end_are_numbers_of_their_flag(value, words):
    for kind in (RunCommand, LearnerCommand):
        with pytest.raises(ConfigError, match=words):
            parse(kind, ["--learning-rate", value])


@pytest.mark.parametrize(
    "value", ["fast", "1:", "1:2:", "1:2:0", "1:2:0.5", "1:2:3:4", "1:2:sine", "1:2:5M:sine", ":2"]
)
def test_other_words_are_refused(value, capsys):
    with pytest.raises(ValueError, match="no number that may change"):
        Schedule.of(value)
    with pytest.raises(SystemExit):
        parse(RunCommand, ["--learning-rate", value])
    assert "give a number, or START:END:FRAMES such as 3e-4:1e-5:16M" in " ".join(capsys.readouterr().err.split())


def test_a_schedule_survives_the_command_line():
    command = parse(LearnerCommand, ["--learning-rate", "3e-4:0:5M:cosine", "--max-gradient-norm=40:1"])
    assert (command.update.learning_rate, command.update.max_gradient_norm) == ("3e-4:0:5M:cosine", "40:1")
    assert parse(LearnerCommand, to_flags(command)) == command
    assert parse(LearnerCommand, ["--learning-rate", "5:5"]).update.learning_rate == 5.0


@pytest.mark.parametrize("preset", ["two-cores", "gpu"])
@pytest.mark.parametrize("agent", ["apex-dqn", "impala", "impact", "pqn", "r2d2"])
def test_the_presets_of_atari_let_the_rate_fall(agent, preset):
    command = parse(RunCommand, ["--agent", agent, "--preset", preset])
    assert schedules_of(command.update)["learning_rate"].end == 0


MAY_CHANGE = {
    "impala": {"value_cost", "entropy_cost", "entropy_target", "policy_cloning_cost", "value_cloning_cost"},
    "impact": {"value_cost", "entropy_cost", "entropy_target", "policy_cloning_cost", "value_cloning_cost",
               "surrogate_clip"},
    "sac": {"entropy_target"},
}  # fmt: skip


@pytest.mark.parametrize("agent", ["apex-dqn", "apex-dpg", "sac", "impala", "impact", "pqn", "r2d2"])
def test_each_algorithm_has_numbers_that_may_change(agent):
    expected = {"learning_rate", "max_gradient_norm"} | MAY_CHANGE.get(agent, set())
    assert schedules_of(FAMILIES[agent].update).keys() == expected
    narrowed = dataclasses.make_dataclass("Own", [("learning_rate", float, 1.0)], bases=(ApexUpdate,), frozen=True)()
    assert schedules_of(narrowed)["learning_rate"].start == 1.0
