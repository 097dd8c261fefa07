"""Learning rates that fall: their shapes, and their way through restarts, later ends and forks."""

import dataclasses
import itertools
import math

import msgspec
import pytest

from apexrl.agents.apex_dqn_config import ApexUpdate
from apexrl.agents.impala_config import ImpalaUpdate
from apexrl.config.commands import LearnerCommand, RunCommand
from apexrl.config.flags import check_together, default_command, parse, with_sections
from apexrl.config.rates import ENDLESS_FRAMES, describe_fall, rate_at
from apexrl.config.sections import LearningConfig
from apexrl.errors import ConfigError
from apexrl.learning.goal import Schedule, is_complete
from apexrl.networks.headers import Counters

RATE = 4e-4
CONSTANT = ["--learning-rate-schedule", "constant"]


def command(total_frames=0, ends_at=0.0, **update):
    numbers = {"learning_rate": RATE, "learning_rate_schedule": "linear", **update}
    made = with_sections(
        default_command(LearnerCommand), {"update": numbers, "learning": {"total_frames": total_frames}}
    )
    return dataclasses.replace(made, ends_at=ends_at)


def begun(command, frames=0, before=None, now=0.0):
    """A schedule as a learner begins it; `before` is another one, as its checkpoint tells."""
    schedule = Schedule(command, now)
    told = None if before is None else msgspec.json.decode(msgspec.json.encode(before.fall), type=type(before.fall))
    schedule.begin(frames, told)
    return schedule


def rates(schedule, frames, now=0.0):
    found = []
    for count in frames:
        schedule.advance(count, schedule.late(now))
        found.append(schedule.rate)
    return found


def test_the_shapes_begin_at_the_rate_and_end_at_the_floor():
    for shape, middle in (("linear", 2.5e-4), ("cosine", 2.5e-4)):
        update = ApexUpdate(learning_rate=RATE, learning_rate_schedule=shape, learning_rate_end=1e-4)
        assert [rate_at(update, share) for share in (0.0, 0.5, 1.0)] == pytest.approx([RATE, middle, 1e-4])
    assert rate_at(ApexUpdate(learning_rate_schedule="cosine", learning_rate=1.0), 0.25) == pytest.approx(
        (1 + math.cos(math.pi / 4)) / 2
    )
    assert rate_at(ApexUpdate(learning_rate=RATE), 0.7) == RATE


def test_a_linear_fall_to_0_has_the_bits_that_impala_always_had():
    update = ImpalaUpdate()
    schedule = begun(dataclasses.replace(command(total_frames=30_000), update=update))
    for frames in range(0, 33_000, 7):
        schedule.advance(frames, 0.0)
        assert schedule.rate == update.learning_rate * (1 - min(frames / 30_000, 1.0))


def test_the_rate_falls_with_what_ends_first():
    schedule = begun(command(total_frames=1000, ends_at=1100.0), now=1000.0)
    assert rates(schedule, [500], now=1020.0) == pytest.approx([RATE / 2])
    assert rates(schedule, [500], now=1080.0) == pytest.approx([RATE / 5])
    assert rates(schedule, [500], now=1200.0) == [0.0], "the end is late"
    endless = begun(command(learning_rate_frames=400, learning_rate_end=1e-4))
    assert rates(endless, [0, 200, 400, 900]) == pytest.approx([RATE, 2.5e-4, 1e-4, 1e-4])
    assert rates(begun(command(total_frames=1000, learning_rate_frames=400)), [200, 400]) == pytest.approx(
        [RATE / 2, 0]
    )


def test_without_an_end_the_rate_falls_ever_more_slowly():
    frames = [0, ENDLESS_FRAMES, 3 * ENDLESS_FRAMES]
    assert rates(begun(command()), frames) == pytest.approx([RATE, RATE / 2, RATE / 4])
    first = begun(command(learning_rate_end=1e-4))
    assert rates(first, frames) == pytest.approx([RATE, 2.5e-4, 1.75e-4])
    restarted = begun(command(learning_rate_end=1e-4), frames[-1], first)
    assert rates(restarted, frames[-1:]) == pytest.approx([1.75e-4])
    ended = begun(command(total_frames=4 * ENDLESS_FRAMES, learning_rate_end=1e-4), frames[-1], first)
    assert rates(ended, [frames[-1], 4 * ENDLESS_FRAMES]) == pytest.approx([1.75e-4, 1e-4])


@pytest.mark.parametrize("ends", [{"total_frames": 1000}, {"ends_at": 100.0}, {"learning_rate_frames": 1000}])
def test_a_restart_changes_nothing(ends):
    """Also where the rate is nearly 0 by then."""
    whole = begun(command(**ends), now=0.0)
    for frames in (100, 333, 777, 999):
        now = frames / 10
        expected = rates(whole, [frames], now)
        restarted = begun(command(**ends), frames, whole, now)
        assert rates(restarted, [frames, frames], now) == expected * 2
    assert expected[0] < RATE / 100


@pytest.mark.parametrize("later", [{"total_frames": 3000}, {"ends_at": 500.0}, {"learning_rate_frames": 900}, {}])
def test_a_run_that_goes_on_with_another_end_falls_from_where_the_rate_is(later):
    first = begun(command(total_frames=1000))
    (at,) = rates(first, [600])
    longer = begun(command(**later), 600, first, now=60.0)
    found = [rates(longer, [frames], frames / 10)[0] for frames in range(600, 5001, 100)]
    assert found[0] == pytest.approx(at) and all(b <= a for a, b in itertools.pairwise(found))
    assert found[-1] == (pytest.approx(at, rel=1e-3) if not later else 0)
    assert not later or found[2] < at


def test_resumes_do_not_stretch_a_fall_over_frames():
    """Each start of a sweep's run has another end by time."""
    schedule = begun(command(ends_at=1e6, learning_rate_frames=1000))
    for frames in (200, 500, 800):
        rates(schedule, [frames])
        schedule = begun(command(ends_at=1e6 + frames, learning_rate_frames=1000), frames, schedule)
    assert rates(schedule, [900, 1000]) == pytest.approx([RATE / 10, 0], abs=1e-8)


def test_a_run_whose_rate_is_spent_goes_on_as_if_its_end_had_been_known():
    """A rate of 0 would teach nothing. A floor is kept."""
    first = begun(command(total_frames=1000))
    assert rates(first, [1000]) == [0.0]
    assert rates(begun(command(total_frames=4000), 1000, first), [1000, 2500]) == pytest.approx([3e-4, 1.5e-4])
    assert rates(begun(command(), 1000, first), [1000, 2500]) == pytest.approx([RATE, RATE], rel=1e-3)
    floored = begun(command(total_frames=1000, learning_rate_end=1e-4))
    rates(floored, [1000])
    assert rates(begun(command(total_frames=4000, learning_rate_end=1e-4), 1000, floored), [1000, 2500]) == [1e-4] * 2


def test_a_fork_with_another_rate_begins_its_fall_there():
    first = begun(command(total_frames=1000))
    rates(first, [600])
    fork = begun(command(total_frames=1600, learning_rate=1e-4), 600, first)
    assert rates(fork, [600, 1100, 1600]) == pytest.approx([1e-4, 5e-5, 0])
    endless = begun(command(learning_rate_frames=100, learning_rate=1e-4), 600, first)
    assert rates(endless, [600, 650, 700]) == pytest.approx([1e-4, 5e-5, 0])


def test_a_checkpoint_of_an_earlier_version_tells_nothing_and_its_run_has_the_rate_of_its_frames():
    old = msgspec.json.decode(b'{"updates": 3}', type=Counters)
    assert old.fall is None
    assert rates(begun(command(total_frames=1000), 400), [400, 700]) == pytest.approx([0.6 * RATE, 0.3 * RATE])


def test_a_run_is_complete_at_its_first_total():
    learning = LearningConfig(total_frames=100, total_updates=7)
    assert [is_complete(learning, *done) for done in ((6, 99), (7, 0), (0, 100), (9, 900))] == [False, True, True, True]
    assert not is_complete(LearningConfig(), 10**9, 10**9)


def test_the_fall_is_told_in_words():
    update = ApexUpdate(learning_rate_schedule="cosine", learning_rate_end=1e-5)
    assert describe_fall(ApexUpdate(), LearningConfig(total_frames=5), 3.0) == ""
    assert describe_fall(update, LearningConfig(total_frames=5_000), 3.0) == (
        " falling along a cosine to 1e-05 over 5,000 frames or 3 seconds"
    )
    assert describe_fall(update, LearningConfig(), 0.0) == (
        " falling along a cosine to 1e-05, half of the way over 16,000,000 frames"
    )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--learning-rate-end", "1"], "--learning-rate-end 1 is above --learning-rate"),
        ([*CONSTANT, "--learning-rate-end", "1e-9"], "need --learning-rate-schedule linear or cosine"),
        ([*CONSTANT, "--learning-rate-frames", "5"], "need --learning-rate-schedule linear or cosine"),
    ],
)
def test_a_fall_that_makes_no_sense_is_refused(flags, words):
    for kind in (RunCommand, LearnerCommand):
        with pytest.raises(ConfigError, match=words):
            parse(kind, flags)
    check_together(parse(RunCommand, ["--learning-rate-end", "1e-9", "--learning-rate-schedule", "cosine"]))
