import dataclasses

import pytest

from apexrl.config import (
    PRESETS,
    ActorCommand,
    LearnerCommand,
    ReplayCommand,
    ReplayConfig,
    RunCommand,
    TableConfig,
    tables_of,
)
from apexrl.errors import ConfigError
from apexrl.flags import parse, to_flags, with_defaults

OTHER = {bool: lambda v: not v, int: lambda v: v + 3, float: lambda v: v / 2 or 0.25, str: lambda v: v + "x"}
CHOICES = {
    "clip_rewards": "no",
    "optimizer": "adam",
    "channels": (7, 8, 9),
    "tables": ("a=uniform:0.5:3", "b=fifo", "c=priority"),
    "table": "c",
}


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
        (["--journal-flush-seconds", "-1"], "at least 0"),
        (["--journal-snapshot-seconds", "0"], "more than 0"),
        (["--tables", "x=stack"], "--tables x=stack"),
        (["--tables", "x=priority"], "--table transitions"),
        (["--tables", "transitions=uniform", "x=priority"], "--table transitions"),
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


def test_tables_take_the_common_numbers_unless_they_have_their_own():
    config = ReplayConfig(
        capacity=1000,
        min_size_to_sample=100,
        samples_per_insert=2.0,
        tables=("a=priority", "b=uniform", "c=fifo:0.5:7", "d=fifo"),
    )
    assert tables_of(config, 8) == {
        "a": TableConfig("priority", 2.0, 100),
        "b": TableConfig("uniform", 2.0, 12),  # unrolls
        "c": TableConfig("fifo", 0.5, 7),
        "d": TableConfig("fifo", 1.0, 1),  # each once
    }
    assert tables_of(config, 1000)["b"].min_size_to_sample == 1


@pytest.mark.parametrize(
    "tables",
    [
        (),
        ("",),
        ("x",),
        ("=fifo",),
        ("x=",),
        ("x=lifo",),
        ("x=fifo:1",),
        ("x=fifo:1:",),
        ("x=fifo:a:1",),
        ("x=fifo:1:2:3",),
        ("x=fifo:-1:1",),
        ("x=fifo:nan:1",),
        ("x=fifo:inf:1",),
        ("x=fifo:1:0",),
        ("x=fifo:1:1.5",),
        ("x=fifo:1:1001",),
        ("x=fifo", "x=uniform"),
    ],
)
def test_tables_that_make_no_sense_are_refused(tables):
    with pytest.raises(ConfigError, match="--tables"):
        tables_of(ReplayConfig(capacity=1000, min_size_to_sample=100, tables=tables), 8)


def test_several_tables_and_a_journal_come_from_the_command_line():
    flags = ["--preset", "small", "--tables", "a=priority", "b=fifo:1:1", "--journal-dir", "x", "--keys", "k"]
    command = parse(ReplayCommand, [*flags, "--journal-flush-seconds", "0"])
    assert command.replay.tables == ("a=priority", "b=fifo:1:1")
    assert (command.replay.journal_dir, command.replay.journal_flush_seconds) == ("x", 0.0)
    assert command.wires.keys == "k"
