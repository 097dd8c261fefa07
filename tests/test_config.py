import dataclasses

import pytest

from apexrl.config import (
    PAPER,
    TWO_CORES,
    ActorCommand,
    LearnerCommand,
    ReplayCommand,
    RunCommand,
    defaults_of,
    parse,
    resolve,
    to_flags,
)

OTHER = {bool: lambda v: not v, int: lambda v: v + 3, float: lambda v: v + 0.5, str: lambda v: v + "x"}


def changed(config):
    """Every field at another value than its default."""
    changes = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            changes[field.name] = changed(value)
        elif field.name == "clip_rewards":
            changes[field.name] = "no"
        elif field.name == "preset":
            changes[field.name] = "paper"
        elif field.name in PAPER:
            changes[field.name] = TWO_CORES[field.name]
        elif value is None:
            changes[field.name] = 5
        else:
            changes[field.name] = OTHER[type(value)](value)
    return dataclasses.replace(config, **changes)


@pytest.mark.parametrize("command", [ActorCommand, ReplayCommand, LearnerCommand, RunCommand])
def test_every_flag_survives_the_command_line(command):
    config = changed(command())
    assert parse(command, to_flags(config)) == config
    assert to_flags(command()) == []


def test_resolve_fills_in_what_was_not_given_and_nothing_else():
    command = parse(LearnerCommand, ["--batch-size", "64"])
    resolved = resolve(command, defaults_of("paper"))
    assert resolved.update.batch_size == 64
    assert resolved.update.learning_rate == 6.25e-5
    assert resolved.network.channels == (32, 64, 64)


def test_flag_names_are_unique_over_all_parts():
    names = [name for part in dataclasses.fields(RunCommand) for name in leaves(getattr(RunCommand(), part.name), part.name)]
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
