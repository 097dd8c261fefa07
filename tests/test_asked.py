"""A command line in two steps: the words that decide the defaults, and the one parse."""

import dataclasses
import os

import pytest

from apexrl.config.commands import ReplayCommand, RunCommand
from apexrl.config.fields import check_ranges
from apexrl.config.flags import Asked, default_command, with_preset
from apexrl.config.words import Basis, flags_in, words_of
from apexrl.errors import ConfigError


def test_the_words_that_decide_the_defaults_are_found_before_they_are_parsed():
    basis = Basis.of(["--fork", "runs/a", "--preset=small", "--seed", "3", "--env", "CartPole-v1", "--env=Corridor-v0"])
    assert (basis.run, basis.preset, basis.env, basis.agent) == ("runs/a", "small", "Corridor-v0", "")
    assert basis.algorithm == "impala" and basis._replace(agent="apex-dqn").algorithm == "apex-dqn"
    assert not any(Basis.of(["--seed", "3"])) and Basis.of([]).algorithm == "apex-dqn"


def test_flags_are_found_with_their_values_and_values_become_words():
    words = ["no-flag", "--env=A=b", "--no-evaluator", "--resize", "8", "-9", "--env", "--fork="]
    assert [*flags_in(words)] == [
        ("--env", ["A=b"]), ("--no-evaluator", []), ("--resize", ["8", "-9"]), ("--env", []), ("--fork", [""])
    ]  # fmt: skip
    assert words_of("--evaluator", False) == ["--no-evaluator"] and words_of("--smoke", True) == ["--smoke"]
    assert words_of("--resize", (8, 9)) == ["--resize", "8", "9"]
    assert words_of("--env-kwargs", {"a": None}) == ["--env-kwargs", '{"a": null}']


def test_a_command_line_is_parsed_once_and_knows_what_it_gives():
    default = default_command(RunCommand)
    words = ["--capacity=2M", "--no-evaluator", "--wrapper", "a:b", "--seed", "0", "--wrapper", "c:d"]
    asked = Asked.of(default, words)
    assert asked.given == {"capacity", "evaluator", "wrapper", "seed"} and not asked.wants_help
    assert asked.flags(["seed", "num_workers", "capacity"]) == ["--seed", "--capacity"]
    other = with_preset(dataclasses.replace(default, seed=7, max_restarts=3), "small")
    found = asked.onto(other)
    assert found == Asked.of(other, words).command
    assert (found.seed, found.replay.capacity, found.max_restarts) == (0, 2_000_000, 3)


def test_a_wish_for_help_waits_for_the_defaults_that_it_shows(capsys):
    default = default_command(RunCommand)
    asked = Asked.of(default, ["--seed", "3", "--help"])
    assert asked.command.seed == 3 and not capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        asked.onto(dataclasses.replace(default, seed=77))
    assert not ended.value.code and "(default: 77)" in " ".join(capsys.readouterr().out.split())


def test_texts_that_no_file_of_a_run_can_hold_are_refused_where_they_are_given():
    for directory in (os.fsdecode(b"runs/M\xfcller"), "runs/\0"):
        with pytest.raises(ConfigError, match=r"is not UTF-8|no text has a NUL"):
            Asked.of(default_command(RunCommand), ["--run-dir", directory])
    odd = os.fsdecode(b"/mnt/\xff/journal")  # of a replay server by hand, whose files name no directories
    assert Asked.of(default_command(ReplayCommand), ["--journal-dir", odd]).command.replay.journal_dir == odd


@pytest.mark.parametrize("number", [10**400, -(10**400)])
def test_numbers_of_files_may_have_any_length(number):
    with pytest.raises(ConfigError, match=r"makes no sense: it has to be at (most|least)"):
        check_ranges(dataclasses.replace(default_command(RunCommand), seed=number))
