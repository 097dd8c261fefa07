import dataclasses

import pytest

from apexrl.config import (
    PRESETS,
    ActorCommand,
    LearnerCommand,
    ReplayCommand,
    RunCommand,
    parse,
    to_flags,
    with_defaults,
)
from apexrl.errors import ConfigError

OTHER = {bool: lambda v: not v, int: lambda v: v + 3, float: lambda v: v / 2 or 0.25, str: lambda v: v + "x"}
CHOICES = {"clip_rewards": "no", "optimizer": "adam", "channels": (7, 8, 9)}


def changed(config):
    """Every field at another value than its default."""
    changes = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            changes[field.name] = changed(value)
        elif field.name != "preset":
            changes[field.name] = CHOICES.get(field.name) or OTHER[type(value)](value)
    return dataclasses.replace(config, **changes)


@pytest.mark.parametrize("command", [ActorCommand, ReplayCommand, LearnerCommand, RunCommand])
@pytest.mark.parametrize("preset", PRESETS)
def test_every_flag_survives_the_command_line(command, preset):
    papers = dataclasses.replace(command(), preset=preset)  # differs from the preset where the preset differs
    usual = with_defaults(papers, PRESETS[preset])
    for config in (changed(papers), papers, usual):
        assert parse(command, to_flags(config)) == config
    assert to_flags(usual) == ["--preset", preset]


def test_what_is_given_wins_over_the_preset():
    command = parse(LearnerCommand, ["--batch-size", "32", "--preset", "small"])
    assert (command.update.batch_size, command.update.optimizer, command.network.hidden_size) == (32, "adam", 128)
    paper = parse(LearnerCommand, ["--preset", "paper"])
    assert (paper.update.batch_size, paper.update.learning_rate, paper.network.channels) == (512, 6.25e-5, (32, 64, 64))


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--learning-rate", "nan"], "--learning-rate nan makes no sense"),
        (["--target-period-updates", "0"], "more than 0"),
        (["--samples-per-insert", "-1"], "at least 0"),
        (["--gamma", "1.1"], "at most 1"),
        (["--channels", "16", "0", "16"], "--channels 0"),
        (["--capacity", "10"], "--min-size-to-sample 50000 is more than --capacity 10"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(flags, complaint):
    with pytest.raises(ConfigError, match=complaint):
        parse(RunCommand, [*flags, "--preset", "paper"])


def test_a_capacity_is_compared_with_the_minimum_of_the_preset():
    command = parse(ReplayCommand, ["--preset", "small", "--capacity", "5000"])
    assert (command.replay.capacity, command.replay.min_size_to_sample) == (5000, 2000)


def test_the_preset_auto_is_resolved():
    command = parse(ActorCommand, ["--num-workers", "2"])
    assert command.preset in PRESETS
    assert parse(ActorCommand, to_flags(command)) == command


def test_flag_names_are_unique_over_all_parts():
    names = [
        name for part in dataclasses.fields(RunCommand) for name in leaves(getattr(RunCommand(), part.name), part.name)
    ]
    assert len(names) == len(set(names))


def leaves(value, name):
    if not dataclasses.is_dataclass(value):
        return [name]
    return [leaf for field in dataclasses.fields(value) for leaf in leaves(getattr(value, field.name), field.name)]


def test_a_mistyped_flag_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        parse(RunCommand, ["--enviroment", "Pong-v4"])
    assert ended.value.code == 2
    assert "--enviroment" in capsys.readouterr().err
