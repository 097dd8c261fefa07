"""When a run is over: by a clock that the tests turn."""

import dataclasses

import pytest

from apexrl.config.commands import RunCommand
from apexrl.config.flags import default_command
from apexrl.networks.headers import Counters
from apexrl.running.clock import SMOKE_DEADLINE_SECONDS, Clock, what_is_missing
from apexrl.running.launch import roles_of
from apexrl.types import LogPosition

SOME = Counters(logs=(LogPosition(transitions=10),))
ALL = Counters(1, (LogPosition(transitions=10),), transitions_sampled=10, evaluation_episodes=1)


class Time:
    now = 1000.0

    def __call__(self):
        return self.now


def run_command(**changes):
    return dataclasses.replace(default_command(RunCommand), **changes)


@pytest.fixture
def time():
    return Time()


def test_a_run_without_a_limit_is_never_over(time):
    never = Clock(run_command(), time)
    time.now += 1e9
    assert not never.is_over(ALL)


def test_a_run_ends_after_its_seconds(time):
    ten = Clock(run_command(max_seconds=10.0), time)
    time.now += 9.0
    assert not ten.is_over(Counters())
    time.now += 1.0
    assert ten.is_over(Counters()) and ten.elapsed() == 10.0


def test_a_run_that_began_elsewhere_ends_when_its_time_is_over_there(time):
    ten = Clock(run_command(max_seconds=10.0), time, began_at=time.now - 4)
    assert (ten.elapsed(), ten.ends_at) == (4.0, time.now + 6)
    assert Clock(run_command(), time).ends_at == Clock(run_command(max_seconds=60.0, smoke=True), time).ends_at == 0
    learner = roles_of(run_command(max_seconds=10.0, run_dir="x"), ends_at=ten.ends_at)["learner"][1]
    assert learner.ends_at == ten.ends_at


def test_the_time_of_a_smoke_run_counts_from_its_first_frame(time):
    smoke = Clock(run_command(max_seconds=60.0, smoke=True), time)
    time.now += 200.0
    assert not smoke.is_over(Counters())
    assert not smoke.is_over(ALL)
    time.now += 59.0
    assert not smoke.is_over(ALL)
    time.now += 1.0
    assert smoke.is_over(ALL)


def test_a_smoke_run_goes_on_until_everything_happened_or_its_deadline_is_over(time):
    smoke = Clock(run_command(max_seconds=60.0, smoke=True), time)
    assert not smoke.is_over(SOME)
    time.now += SMOKE_DEADLINE_SECONDS - 1
    assert not smoke.is_over(SOME)
    time.now += 1
    assert smoke.is_over(SOME) and smoke.is_over(Counters())


def test_what_is_missing():
    assert what_is_missing(Counters()) == ["inserted", "sampled", "learned", "evaluated"]
    assert what_is_missing(SOME) == ["sampled", "learned", "evaluated"]
    assert what_is_missing(ALL) == []
