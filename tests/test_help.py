import dataclasses
import re
import sys

import pytest

from apexrl.config.commands import ActorCommand, LearnerCommand, OfflineCommand, ReplayCommand, RunCommand
from apexrl.config.flags import Asked, default_command, parse, whole_number, with_preset
from apexrl.config.help import DAILY, HIDDEN
from apexrl.config.words import flag_of, program, sister
from apexrl.errors import ConfigError

COMMANDS = [ActorCommand, ReplayCommand, LearnerCommand, OfflineCommand, RunCommand]


def help_of(capsys, call):
    """The help that a call prints before it ends the program."""
    with pytest.raises(SystemExit) as ended:
        call()
    assert not ended.value.code
    return capsys.readouterr().out


def in_one_line(text):
    return " ".join(text.replace("│", " ").split())


def names_of(config):
    """The names of a command's flags, those of its sections among them."""
    names = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        names += names_of(value) if dataclasses.is_dataclass(value) else [field.name]
    return names


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_shows_each_flag_once_but_those_without_a_use(command, capsys):
    shown = help_of(capsys, lambda: parse(command, ["--help"]))
    names = {*names_of(default_command(command))} - HIDDEN[command.__name__]
    assert sorted(re.findall(r"^[│ ] (--[a-z][\w-]*)", shown, re.MULTILINE)) == sorted(map(flag_of, names))
    assert "Where the roles find each other." in shown and "(default: 600.0)" in in_one_line(shown)


def test_daily_flags_come_first_and_the_environment_before_all(capsys):
    shown = in_one_line(help_of(capsys, lambda: parse(RunCommand, ["--help"])))
    flags = ["--env", "--agent", "--resume", "--total-frames", "--smoke", "--clip-rewards", "--max-restarts"]
    places = [shown.index(f" {flag}") for flag in flags]
    assert places == sorted(places)
    assert set(DAILY) <= {name for command in COMMANDS for name in names_of(default_command(command))}


@pytest.mark.parametrize(
    ("preset", "batch", "optimizer"),
    [("paper", 512, "rmsprop"), ("gpu", 64, "adam"), ("two-cores", 64, "adam"), ("small", 128, "adam")],
)
def test_the_help_shows_the_defaults_of_the_preset(preset, batch, optimizer, capsys):
    shown = in_one_line(help_of(capsys, lambda: parse(LearnerCommand, ["--help", "--preset", preset])))
    assert f"--batch-size INT Transitions in a batch (Ape-X). (default: {batch})" in shown
    assert f"(default: {optimizer})" in shown and f"(default: {preset})" in shown


def test_the_help_shows_the_numbers_of_a_saved_run(capsys):
    saved = with_preset(default_command(RunCommand), "small")
    saved = dataclasses.replace(saved, seed=77, update=dataclasses.replace(saved.update, batch_size=33))
    shown = in_one_line(help_of(capsys, lambda: Asked.of(saved, ["--help"]).onto(saved)))
    assert "Seed of everything random. (default: 77)" in shown and "(default: 33)" in shown


def test_a_mistake_is_answered_with_the_defaults_of_the_preset(capsys):
    with pytest.raises(SystemExit):
        parse(LearnerCommand, ["--batch-size", "many", "--preset", "small"])
    assert "(default: 128)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "named", "other"),
    [
        ("actor.py", "actor.py", "python -m apexrl watch"),
        ("apexrl train", "apexrl train", "apexrl watch"),
        ("apexrl resume", "apexrl resume", "apexrl watch"),
        ("bash run.sh", "bash run.sh", "bash run.sh watch"),
        ("bash run.sh resume", "bash run.sh resume", "bash run.sh watch"),
        (sys.modules["apexrl.config.flags"].__file__, "python -m apexrl.config.flags", "python -m apexrl watch"),
    ],
)
def test_a_command_is_named_as_it_was_typed(monkeypatch, capsys, typed, named, other):
    monkeypatch.setattr(sys, "argv", [typed, "--help"])
    assert (program(), sister("watch")) == (named, other)
    assert f"usage: {named} [-h]" in help_of(capsys, lambda: parse(ReplayCommand))


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *(("200000", 200_000), ("200_000", 200_000), ("2e5", 200_000), ("2E5", 200_000), ("5M", 5_000_000)),
        *(("0.5k", 500), ("1.5G", 1_500_000_000), ("-3", -3), ("+7", 7), ("0", 0), ("1000e-3", 1)),
    ],
)
def test_whole_numbers_are_read_as_people_write_them(text, number):
    assert whole_number(text) == number
    parsed = parse(RunCommand, ["--preset", "small", f"--total-frames={abs(number)}"])
    assert parsed.learning.total_frames == abs(number)


@pytest.mark.parametrize(
    "text", ["2.5", "0.5", "x", "5m", "1e", "k", "", "_", ".", "1 2", "nan", "inf", "0x10", "1e999"]
)
def test_other_words_are_no_whole_numbers(text, capsys):
    with pytest.raises(ValueError, match="is no whole number: give one like 200000, 200_000, 2e5 or 5M"):
        whole_number(text)
    with pytest.raises(SystemExit) as ended:
        parse(RunCommand, ["--total-frames", text])
    assert ended.value.code == 2 and "--total-frames" in capsys.readouterr().err


def test_whole_numbers_stay_in_their_ranges_and_lists():
    assert parse(LearnerCommand, ["--channels", "1e1", "0.02k", "30"]).network.channels == (10, 20, 30)
    with pytest.raises(ConfigError, match="--batch-size 0 makes no sense"):
        parse(LearnerCommand, ["--batch-size", "0e3"])
