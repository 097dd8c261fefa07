"""Wrappers that remember more than a game are refused before anything is trained; all others are welcome."""

import pytest

from apexrl.config.commands import RunCommand
from apexrl.config.flags import Asked, default_command
from apexrl.config.sections import EnvConfig
from apexrl.environments.vector import make_environment
from apexrl.environments.wrapper_state import check_wrapper_state
from apexrl.errors import ConfigError
from apexrl.running.plan import make_plan
from tests.environments.own_wrappers import Drift

OWN = "tests.environments.own_wrappers"


def behind(*names, env="Drift-v0"):
    return EnvConfig(f"{OWN}:{env}", wrapper=tuple(f"{OWN}:{name}" for name in names))


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("normalized", "has a NormalizeObservation, whose running statistics are in no checkpoint.*TransformObs"),
        ("normalized_inside", "has a NormalizeObservation"),
        ("normalized_rewards", "has a NormalizeReward, .*TransformReward, or one that sets the statistics"),
    ],
)
def test_running_statistics_of_gymnasium_are_refused_wherever_they_are_made(name, complaint):
    with pytest.raises(ConfigError, match=complaint):
        make_environment(behind(name), 1)
    with pytest.raises(ConfigError, match=complaint):
        make_environment(behind(name, "delayed"), 1)


@pytest.mark.parametrize(
    ("wrappers", "guilty", "changes"),
    [
        (("OwnMean",), "OwnMean", "observations"),
        (("LastGame",), "LastGame", "observations"),
        (("AtEnd",), "AtEnd", "observations"),
        (("delayed", "OwnMean", "time_aware"), "OwnMean", "observations"),
        (("Habit",), "Habit", "actions"),
        (("exchanged", "Habit", "sticky"), "Habit", "actions"),
    ],
)
def test_a_wrapper_that_remembers_games_is_named(wrappers, guilty, changes):
    with pytest.raises(ConfigError, match=f"^--wrapper {OWN}:{guilty} makes other {changes} of the same ones"):
        check_wrapper_state(behind(*wrappers))


def test_a_wrapper_that_learns_at_the_end_of_a_long_game_is_named():
    with pytest.raises(ConfigError, match=f"^--wrapper {OWN}:AtEnd makes other observations of the same ones"):
        check_wrapper_state(behind("AtEnd", env="Long-v0"))


@pytest.mark.parametrize(
    "wrappers",
    [
        *(
            (name,)
            for name in ("time_aware", "share_of_time", "stacked", "delayed", "skipping", "sticky", "by_function")
        ),
        *((name,) for name in ("ByClass", "Other", "fixed", "Noise", "OtherNoise", "Bonus", "exchanged")),
        ("sticky", "skipping", "delayed", "Noise", "stacked"),
    ],
)
@pytest.mark.parametrize("env", ["Drift-v0", "Remembering-v0", "Random-v0"])
def test_wrappers_that_begin_anew_with_each_game_are_taken(env, wrappers):
    config = behind(*wrappers, env=env)
    make_environment(config, 1).close()
    check_wrapper_state(config)


@pytest.mark.parametrize("name", ["OtherNoise", "SharedSum"])
def test_a_wrapper_that_is_other_in_each_environment_is_said(name, caplog):
    """It may be chance, or what the copies of a process share: only a process of its own could tell."""
    check_wrapper_state(behind(name, "delayed"))
    assert f"--wrapper {OWN}:{name} makes other observations of the same ones in each environment" in caplog.text


def test_an_environment_that_fails_is_left_to_its_role(caplog):
    check_wrapper_state(behind("OwnMean", env="Failing-v0"))
    assert "nobody knows whether its wrappers remember games" in caplog.text


class Ambiguous:
    """As a table of pandas: what its comparison gives is neither true nor false."""

    __hash__ = None

    def __eq__(self, other):
        return self

    def __bool__(self):
        raise ValueError("the truth value is ambiguous")


def test_an_environment_that_tells_what_cannot_be_compared_is_left_to_its_role(monkeypatch, caplog):
    step = Drift.step
    monkeypatch.setattr(Drift, "step", lambda env, action: (*step(env, action)[:4], {"prices": Ambiguous()}))
    check_wrapper_state(behind("time_aware"))
    assert "nobody knows whether its wrappers remember games: ValueError: the truth value is ambig" in caplog.text


@pytest.mark.parametrize("name", ["normalized", "OwnMean"])
def test_no_run_begins_with_a_wrapper_that_remembers_games(name):
    arguments = ["--env", f"{OWN}:Drift-v0", "--wrapper", f"{OWN}:{name}"]
    with pytest.raises(ConfigError, match=r"in no checkpoint|No checkpoint holds"):
        make_plan(Asked.of(default_command(RunCommand), arguments), None)
