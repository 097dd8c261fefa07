"""The ways of numbers that change while a run goes on, through restarts, later ends and forks."""

import dataclasses
import itertools
import math

import msgspec
import numpy as np
import pytest

from apexrl.agents.impala_config import ImpalaUpdate
from apexrl.config.commands import LearnerCommand, OfflineCommand
from apexrl.config.flags import default_command, with_preset, with_sections
from apexrl.config.schedules import ENDLESS_FRAMES, Schedule
from apexrl.config.sections import LearningConfig
from apexrl.learning.goal import Course, Courses, is_complete
from apexrl.learning.sharing import Beginning, beginning
from apexrl.networks.checkpoint import Checkpoint
from apexrl.networks.headers import CheckpointHeader, Counters, Progress
from apexrl.types import StreamSpec

RATE = 4e-4
SPEC = StreamSpec("Numbers-v0", (3,), "float32", 2, 3, 1)


def begun(rate=f"{RATE}:0", frames=0, before=None, now=0.0, **ends):
    """A course as a learner begins it; `before` is another one, as its checkpoint tells."""
    course = Course(Schedule.of(rate), now=now, **ends)
    told = None if before is None else msgspec.json.decode(msgspec.json.encode(before.progress), type=Progress)
    course.begin(frames, told)
    return course


def rates(course, frames, now=0.0):
    found = []
    for count in frames:
        found.append(course.advance(count, course.late(now)))
    return found


def test_a_linear_fall_to_0_has_the_bits_that_impala_always_had():
    course, start = begun(ImpalaUpdate().learning_rate, total_frames=30_000), 6e-4
    for frames in range(0, 33_000, 7):
        assert course.advance(frames) == start * (1 - min(frames / 30_000, 1.0))


def test_a_number_goes_with_what_ends_the_run_first():
    course = begun(total_frames=1000, ends_at=1100.0, now=1000.0)
    assert rates(course, [500], now=1020.0) == pytest.approx([RATE / 2])
    assert rates(course, [500], now=1080.0) == pytest.approx([RATE / 5])
    assert rates(course, [500], now=1200.0) == [0.0], "the end is late"


@pytest.mark.parametrize("source", [{"guest": True}, {"from_journal": "journal"}])
def test_frames_that_come_all_at_once_measure_no_way(source):
    """The preset's entropy cost rises over 6 M frames, as many as a run may have played before its guest begins."""
    command = with_preset(default_command(OfflineCommand, "impact"), "two-cores")
    command = dataclasses.replace(command, **source)
    assert Schedule.of(command.update.entropy_cost).frames == 6_000_000

    def numbers(**ends):
        courses = Courses(dataclasses.replace(command, **ends), now=1000.0)
        courses.begin(9_000_000, {})
        assert courses.advance(9_000_000, courses.late(1000.0)) == courses.advance(99_000_000, courses.late(1000.0))
        found = courses.advance(99_000_000, courses.late(1050.0))
        return found["learning_rate"], found["entropy_cost"]

    assert numbers() == (RATE, 0.0015)
    assert numbers(ends_at=1100.0) == pytest.approx((RATE / 2, 0.00225))


def test_frames_of_its_own_are_all_that_counts():
    for ends in ({}, {"total_frames": 100}, {"total_frames": 1000}, {"ends_at": 50.0}):
        course = begun(f"{RATE}:1e-4:400", **ends)
        assert rates(course, [0, 200, 400, 900], now=40.0) == pytest.approx([RATE, 2.5e-4, 1e-4, 1e-4])
    assert rates(begun("0:0.4:100"), [0, 50, 100, 10**9]) == pytest.approx([0, 0.2, 0.4, 0.4])


def test_without_an_end_a_number_changes_ever_more_slowly():
    frames, fall = [0, ENDLESS_FRAMES, 3 * ENDLESS_FRAMES], f"{RATE}:1e-4"
    assert rates(begun(), frames) == pytest.approx([RATE, RATE / 2, RATE / 4])
    first = begun(fall)
    assert rates(first, frames) == pytest.approx([RATE, 2.5e-4, 1.75e-4])
    restarted = begun(fall, frames[-1], first)
    assert rates(restarted, frames[-1:]) == pytest.approx([1.75e-4])
    ended = begun(fall, frames[-1], first, total_frames=4 * ENDLESS_FRAMES)
    assert rates(ended, [frames[-1], 4 * ENDLESS_FRAMES]) == pytest.approx([1.75e-4, 1e-4])


ENDS = [({"total_frames": 1000}, ""), ({"ends_at": 100.0}, ""), ({}, ":1000")]


@pytest.mark.parametrize(("ends", "over"), ENDS)
def test_a_restart_changes_nothing(ends, over):
    """Also where the rate is nearly 0 by then."""
    whole = begun(f"{RATE}:0{over}", **ends)
    for frames in (100, 333, 777, 999):
        now = frames / 10
        expected = rates(whole, [frames], now)
        restarted = begun(f"{RATE}:0{over}", frames, whole, now, **ends)
        assert rates(restarted, [frames, frames], now) == expected * 2
    assert expected[0] < RATE / 100


@pytest.mark.parametrize(
    ("later", "over"), [({"total_frames": 3000}, ""), ({"ends_at": 500.0}, ""), ({}, ":900"), ({}, "")]
)
def test_a_run_that_goes_on_with_another_end_falls_from_where_the_rate_is(later, over):
    first = begun(total_frames=1000)
    (at,) = rates(first, [600])
    longer = begun(f"{RATE}:0{over}", 600, first, now=60.0, **later)
    found = [rates(longer, [frames], frames / 10)[0] for frames in range(600, 5001, 100)]
    assert found[0] == pytest.approx(at) and all(b <= a for a, b in itertools.pairwise(found))
    assert found[-1] == (0 if later or over else pytest.approx(at, rel=1e-3))
    assert not (later or over) or found[2] < at


def test_resumes_do_not_stretch_a_fall_over_frames():
    """Each start of a sweep's run has another end by time."""
    fall = f"{RATE}:0:1000"
    course = begun(fall, ends_at=1e6)
    for frames in (200, 500, 800):
        rates(course, [frames])
        course = begun(fall, frames, course, ends_at=1e6 + frames)
    assert rates(course, [900, 1000]) == pytest.approx([RATE / 10, 0], abs=1e-8)


def test_a_run_whose_rate_is_spent_goes_on_as_if_its_end_had_been_known():
    """A rate of 0 would teach nothing. A floor is kept."""
    first = begun(total_frames=1000)
    assert rates(first, [1000]) == [0.0]
    longer = begun(frames=1000, before=first, total_frames=4000)
    assert rates(longer, [1000, 2500]) == pytest.approx([3e-4, 1.5e-4])
    assert rates(begun(frames=1000, before=first), [1000, 2500]) == pytest.approx([RATE, RATE], rel=1e-3)
    floored = begun(f"{RATE}:1e-4", total_frames=1000)
    rates(floored, [1000])
    assert rates(begun(f"{RATE}:1e-4", 1000, floored, total_frames=4000), [1000, 2500]) == [1e-4] * 2


def test_a_rate_that_is_spent_by_time_goes_on_as_if_its_end_had_been_known():
    first = begun(ends_at=1600.0, now=1000.0)
    assert rates(first, [60_000], now=1600.0) == [0.0]
    longer = Course(Schedule.of(f"{RATE}:0"), ends_at=2300.0, now=2000.0)
    longer.begin(60_000, first.progress, seconds=600.0)
    assert longer.advance(60_000, longer.late(2000.0)) == pytest.approx(RATE / 3)
    assert longer.advance(60_000, longer.late(2150.0)) == pytest.approx(RATE / 6)


def test_a_spent_number_goes_on_beside_a_constant_rate_and_another_that_is_not_spent():
    """They are told the same share of the run's time."""
    command = learner(learning_rate=RATE, entropy_cost="3:0", value_cost="0.5:0.25")
    first = Courses(dataclasses.replace(command, ends_at=1600.0), now=1000.0)
    assert first.advance(60_000, first.late(1600.0)).items() >= {"entropy_cost": 0.0, "value_cost": 0.25}.items()
    longer = Courses(dataclasses.replace(command, ends_at=2300.0), now=2000.0)
    longer.begin(60_000, first.progress, updates=50, seconds=600.0)
    for now, cost in ((2000.0, 1.0), (2150.0, 0.5), (2300.0, 0.0)):
        numbers = longer.advance(60_000, longer.late(now))
        assert numbers["entropy_cost"] == pytest.approx(cost) and numbers["value_cost"] == 0.25
        assert numbers["learning_rate"] == RATE


def test_a_run_that_ends_by_updates_goes_with_them():
    """As a learner of a journal does, whose frames are all there at the start."""
    course = begun(total_updates=100)
    assert [course.advance(400_000, course.late(0.0, updates)) for updates in (0, 25, 100)] == [RATE, 0.75 * RATE, 0]
    half = begun(total_updates=100)
    half.advance(400_000, half.late(0.0, 50))
    longer = Course(Schedule.of(f"{RATE}:0"), total_updates=250)
    longer.begin(400_000, half.progress, updates=50)
    found = [longer.advance(400_000, longer.late(0.0, updates)) for updates in (50, 150, 250)]
    assert found == pytest.approx([RATE / 2, RATE / 4, 0])


def test_numbers_below_0_go_on_as_others_do():
    for sign in (1, -1):
        first = begun(f"{0.5 * sign}:{2 * sign}:1000")
        (at,) = rates(first, [500])
        assert rates(begun(f"{0.5 * sign}:{2 * sign}:1000", 500, first, total_frames=3000), [500]) == [at]


def test_a_fork_with_another_start_begins_its_way_there():
    first = begun(total_frames=1000)
    rates(first, [600])
    fork = begun("1e-4:0", 600, first, total_frames=1600)
    assert rates(fork, [600, 1100, 1600]) == pytest.approx([1e-4, 5e-5, 0])
    over = begun("1e-4:0:100", 600, first)
    assert rates(over, [600, 650, 700]) == pytest.approx([1e-4, 5e-5, 0])


def test_a_number_that_stayed_begins_its_way_where_it_is_asked_to_change():
    constant = begun(RATE, total_frames=1000)
    assert rates(constant, [0, 600]) == [RATE, RATE]
    assert rates(begun(f"{RATE}:0:100", 600, constant), [600, 650, 700]) == pytest.approx([RATE, RATE / 2, 0])
    assert rates(begun(f"{RATE}:0", 600, constant, total_frames=800), [600, 700]) == pytest.approx([RATE, RATE / 2])


TOWARDS = [  # a number that goes on towards another one, the ends of both, and where it is at 900 frames of 1,000
    ("3:3", "3:0", "", "", 3.0),
    ("3:1", "3:0", "", "", 1.2),
    ("3:2", "3:0.1", ":1000", ":1000", 2.1),
    ("3:1", "3:2", "", "", 1.2),
    ("1:5", "1:9", "", "", 4.6),
    ("3:0", "3:0:cosine", "", "", 0.3),
    ("3:0:cosine", "3:1", "", "", 1.5 * (1 + math.cos(0.9 * math.pi))),
    ("3:3", "3:0", "", ":2000", 3.0),
]


@pytest.mark.parametrize(("first", "later", "over", "later_over", "at"), TOWARDS)
@pytest.mark.parametrize("longer", [0, 2000])
def test_a_number_goes_on_towards_another_one_from_where_it_is(first, later, over, later_over, at, longer):
    """Whether the run ends where it was to end, or later; restarts on the way change nothing."""

    def way(text, frames):
        number, _, shape = text.partition(":cosine")
        return number + frames + (":cosine" if "cosine" in text else shape)

    before = begun(way(first, over), total_frames=1000)
    assert rates(before, [900]) == pytest.approx([at])
    ends = {"total_frames": 1000 + longer}
    course = begun(way(later, later_over), 900, before, **ends)
    last = 900 + 2000 if later_over == ":2000" else 1000 if later_over else 1000 + longer
    goal = Schedule.of(later).end
    found = rates(course, [900, 950, (900 + last) // 2, last])
    assert found[0] == pytest.approx(at) and found[-1] == pytest.approx(goal)
    assert found[2] == pytest.approx((at + goal) / 2)
    restarted = begun(way(later, later_over), 950, begun(way(later, later_over), 900, before, **ends), **ends)
    assert rates(restarted, [950, last]) == pytest.approx([found[1], goal])


def test_other_frames_count_from_where_the_run_began():
    before = begun("3:1:80", total_frames=1000)
    assert rates(before, [40]) == [2]
    assert rates(begun("3:1:160", 40, before), [40, 100, 160]) == pytest.approx([2, 1.5, 1])
    passed = begun("3:1:30", 40, before)
    assert rates(passed, [40, 55, 70]) == pytest.approx([2, 1.5, 1])


def test_a_number_that_has_come_to_a_floor_goes_on_where_it_is_asked_to_come_there_later():
    before = begun("3:1:80", total_frames=1000)
    rates(before, [100])
    assert rates(begun("3:1:400", 100, before), [100, 200, 400]) == pytest.approx([2.5, 2, 1])
    assert rates(begun("3:1:50", 100, before), [100, 125, 150]) == pytest.approx([3, 2, 1])
    assert rates(begun("3:1:80", 100, before, total_frames=5000), [100, 400]) == [1, 1]


def test_a_guest_without_an_end_keeps_a_number_where_it_was():
    command = dataclasses.replace(with_preset(default_command(OfflineCommand, "impact"), "two-cores"), guest=True)
    first = Courses(dataclasses.replace(command, ends_at=1100.0), now=1000.0)
    assert first.advance(0, first.late(1050.0))["learning_rate"] == pytest.approx(RATE / 2)
    again = Courses(command, now=2000.0)
    again.begin(0, first.progress, seconds=50.0)
    restarted = Courses(command, now=3000.0)
    restarted.begin(0, again.progress, seconds=80.0)
    for courses in (again, restarted):
        assert courses.advance(900, courses.late(9000.0))["learning_rate"] == pytest.approx(RATE / 2)
    longer = Courses(dataclasses.replace(command, ends_at=4100.0), now=4000.0)
    longer.begin(0, restarted.progress, seconds=90.0)
    assert longer.advance(0, longer.late(4000.0))["learning_rate"] == pytest.approx(RATE / 2)


@pytest.mark.parametrize(("end", "ends"), [(0.01, {"total_frames": 5000}), (0.01, {"ends_at": 700.0}), (0, {})])
def test_a_number_that_has_arrived_stays_where_frames_of_its_own_are_all_that_counts(end, ends):
    """Also one that is spent there, or that a fork has begun late."""
    first = begun(f"3:{end}:80", total_frames=1000)
    assert rates(first, [100]) == pytest.approx([end])
    later = begun(f"3:{end}:80", 100, first, **ends)
    assert rates(later, [100, 140]) == pytest.approx([end, end])
    fork = begun(f"2:{end}:80", 100, first)
    assert rates(fork, [100, 140, 200]) == pytest.approx([2, 1 + end / 2, end])
    assert rates(begun(f"2:{end}:80", 200, fork, **ends), [200, 300]) == pytest.approx([end, end])
    longer = begun(f"3:{end}:400", 100, first)
    assert rates(longer, [100, 400]) == pytest.approx([3 - (3 - end) / 4, end])
    shorter = begun(f"3:{end}:40", 100, first)  # as a fork asks for, which would learn nothing otherwise
    assert rates(shorter, [100, 120, 140]) == pytest.approx([3, (3 + end) / 2, end])


def test_the_learners_of_a_team_have_one_clock():
    """A number that differed among them in its last bit would part their networks."""
    first = Courses(dataclasses.replace(learner(learning_rate="1:0"), ends_at=1600.0), now=1000.0)
    first.advance(60_000, first.late(1300.0))
    header = CheckpointHeader(SPEC, "impala", "", Counters(progress=first.progress))
    told = msgspec.json.encode(beginning(Checkpoint(header, {}), 1))

    def rate(clock):
        start = msgspec.json.decode(told, type=Beginning)
        courses = Courses(dataclasses.replace(learner(learning_rate="1:0"), ends_at=start.now + 300.0), clock(start))
        courses.begin(60_000, start.progress, seconds=300.0)
        return np.float32(courses.advance(60_000, 0.7)["learning_rate"])

    assert rate(lambda start: start.now) == rate(lambda start: start.now)
    assert rate(lambda start: start.now) != rate(lambda start: start.now + 0.05)


def test_a_number_stays_that_is_asked_to_stay():
    before = begun(total_frames=1000)
    rates(before, [900])
    constant = begun(RATE, 900, before, total_frames=1000)
    assert rates(constant, [900, 1000]) == [RATE, RATE]
    assert rates(begun(frames=950, before=constant, total_frames=1000), [950, 975]) == pytest.approx([RATE, RATE / 2])


def learner(total_frames=0, **update):
    sections = {"update": update, "learning": {"total_frames": total_frames}}
    return with_sections(default_command(LearnerCommand, "impala"), sections)


def test_all_numbers_of_an_update_go_on_together():
    command = learner(1000, learning_rate="1:0", entropy_cost="3:1:500", value_cost=0.5)
    courses = Courses(command)
    assert courses.metrics == {"learner/learning_rate": 1.0, "learner/scheduled/entropy_cost": 3.0}
    numbers = courses.advance(250)
    assert numbers.items() >= {"learning_rate": 0.75, "entropy_cost": 2.0, "value_cost": 0.5}.items()
    header = msgspec.json.decode(msgspec.json.encode(Counters(progress=courses.progress)), type=Counters)
    restarted = Courses(command)
    restarted.begin(250, header.progress)
    assert restarted.advance(250) == numbers and restarted.metrics["learner/scheduled/entropy_cost"] == 2.0
    assert restarted.advance(750)["entropy_cost"] == 1.0
    fork = Courses(learner(1000, learning_rate="1:0", entropy_cost="2:1:500"))
    fork.begin(250, header.progress)
    assert fork.advance(250).items() >= {"learning_rate": 0.75, "entropy_cost": 2.0}.items()


def test_a_run_whose_checkpoint_tells_no_progress_has_the_numbers_of_its_frames():
    courses = Courses(learner(1000, learning_rate="1:0", entropy_cost="3:1:500"))
    courses.begin(400, Counters(updates=3).progress)
    assert courses.advance(400).items() >= {"learning_rate": 0.6, "entropy_cost": 1.4}.items()


def test_a_run_is_complete_at_its_first_total():
    learning = LearningConfig(total_frames=100, total_updates=7)
    assert [is_complete(learning, *done) for done in ((6, 99), (7, 0), (0, 100), (9, 900))] == [False, True, True, True]
    assert not is_complete(LearningConfig(), 10**9, 10**9)
