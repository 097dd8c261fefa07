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

OTHER = {bool: lambda v: not v, int: lambda v: v + 3, float: lambda v: v + 0.5, str: lambda v: v + "x"}
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
