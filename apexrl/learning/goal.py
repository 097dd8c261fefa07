"""The distance of a run from its totals, and how far its numbers have come on their schedules."""

from collections.abc import Mapping

import msgspec

from apexrl.config.commands import LearnerCommand, OfflineCommand
from apexrl.config.schedules import Schedule, schedules_of, share_of_endless
from apexrl.config.sections import LearningConfig
from apexrl.networks.headers import Progress

RATE = "learning_rate"  # which is shown also where it stays
SPENT = 0.01  # of a number: what is below teaches nothing


class Course:
    """The way of one number. One owner.

    It goes with the frames of its schedule; without them with the frames of the run, its updates and the time until its
    end, whichever is furthest; without an end ever more slowly (`schedules.share_of_endless`). In a run that goes on
    with other ends, or towards another number, it goes on from where it is; with another start it begins there. A
    number that is spent, or that has come to an end which is now asked for after other frames, begins as if it had had
    its new ends from the start, or anew where so many frames have passed.
    """

    def __init__(
        self, schedule: Schedule, total_frames: int = 0, ends_at: float = 0.0, now: float = 0.0, total_updates: int = 0
    ):
        """Begins at the first frame; seconds count from `now`, since 1970."""
        self.schedule, frames = schedule, schedule.frames
        ends = total_frames, frames, ends_at, frames
        way = Progress(schedule.start, *ends, end=schedule.end, shape=schedule.shape)
        self.progress = msgspec.structs.replace(way, began_at=now, total_updates=total_updates)

    def begin(
        self, frames: int, before: Progress | None, updates: int = 0, seconds: float = 0.0, stays: bool = False
    ) -> None:
        """Goes on where a checkpoint was, at so many frames, updates and seconds of the run; None: it does not tell.

        Args:
          stays: it was asked to change, and has no end that it could go towards.
        """
        own = self.progress
        if before is None:
            return
        if before.asked == own.asked:
            self.progress = before
            return
        was, is_same = number_of(before), before.rate == own.rate
        is_same_way = (before.end, before.shape) == (own.end, own.shape)
        new_frames = own.over_frames if before.over_frames != own.over_frames else 0
        has_arrived = new_frames > 0 and is_same_way and before.share >= 1
        is_spent = is_same and (has_arrived or abs(was) < SPENT * abs(own.rate))
        self.progress = msgspec.structs.replace(own, began_at=own.began_at - seconds)
        if is_spent and not 0 < new_frames <= frames:
            return
        end_frames, share, number = frames + own.over_frames if own.over_frames else 0, 0.0, None
        if is_same and not is_spent:
            if before.over_frames == own.over_frames:
                end_frames = before.end_frames
            elif before.end != before.rate and new_frames > frames:
                end_frames = new_frames
            if is_same_way:
                share, number = before.share, before.begun_number
            elif stays or not self.schedule.is_constant:
                number = was
        ends = {"begun_frames": frames, "begun_late": self.late(own.began_at, updates), "end_frames": end_frames}
        way = {"begun_share": share, "share": share, "begun_number": number}
        self.progress = msgspec.structs.replace(self.progress, **ends, **way)

    def late(self, now: float, updates: int = 0) -> float:
        """Returns the share of the run's time, or of its updates, that is over; 0 where it ends by neither.

        It is the same for all numbers of a run.
        """
        own = self.progress
        by_time = (now - own.began_at) / max(own.ends_at - own.began_at, 1.0) if own.ends_at else 0.0
        return max(by_time, updates / own.total_updates if own.total_updates else 0.0)

    def advance(self, frames: int, late: float = 0.0) -> float:
        """Takes the frames of the run and the result of `late`; returns the number as it is now."""
        own = self.progress
        end, begun = own.end_frames or own.total_frames, own.begun_frames
        if not self.schedule.is_constant:
            passed = (frames - begun) / max(end - begun, 1) if end else 0.0
            if not own.end_frames:
                has_end = end or own.ends_at or own.total_updates
                later = (late - own.begun_late) / max(1 - own.begun_late, 1e-9)
                passed = max(later, passed) if has_end else share_of_endless(frames - begun)
            share = own.begun_share + (1 - own.begun_share) * min(max(passed, 0.0), 1.0)
            self.progress = msgspec.structs.replace(own, share=share)
        return self.number

    @property
    def number(self) -> float:
        """The number as it is now."""
        return number_of(self.progress)


def number_of(progress: Progress) -> float:
    """Returns a number as far as it has come."""
    start = progress.rate if progress.begun_number is None else progress.begun_number
    return Schedule(start, progress.end, shape=progress.shape).at(progress.share)


def ways_of(command: LearnerCommand) -> dict[str, Schedule]:
    """Returns the ways of all numbers of a learner's updates that may change, by field.

    A journal's learner and a guest get their frames at once, which measure no way: each goes with the run, or stays
    where that has no end.
    """
    learning, ways = command.learning, schedules_of(command.update)
    if not (isinstance(command, OfflineCommand) and (command.from_journal or command.guest)):
        return ways
    has_end = learning.total_frames or learning.total_updates or command.ends_at
    return {name: way._replace(frames=0, end=way.end if has_end else way.start) for name, way in ways.items()}


class Courses:
    """The ways of all numbers of a learner's updates that may change, by field. One owner."""

    def __init__(self, command: LearnerCommand, now: float = 0.0):
        """Begins at the first frame, as each `Course` does."""
        ends = command.learning.total_frames, command.ends_at, now, command.learning.total_updates
        asked, ways = schedules_of(command.update), ways_of(command)
        self._courses = {name: Course(schedule, *ends) for name, schedule in ways.items()}
        self._staying = {name for name in ways if ways[name].is_constant and not asked[name].is_constant}

    def begin(self, frames: int, before: Mapping[str, Progress], updates: int = 0, seconds: float = 0.0) -> None:
        """Goes on where a checkpoint was, at so many frames, updates and seconds of the run."""
        for name, course in self._courses.items():
            course.begin(frames, before.get(name), updates, seconds, stays=name in self._staying)

    def late(self, now: float, updates: int = 0) -> float:
        """Returns the share of the run's time or of its updates that is over, see `Course.late`."""
        return self._courses[RATE].late(now, updates)

    def advance(self, frames: int, late: float = 0.0) -> dict[str, float]:
        """Takes the frames of the run and the result of `late`; returns the numbers as they are now."""
        return {name: course.advance(frames, late) for name, course in self._courses.items()}

    @property
    def progress(self) -> dict[str, Progress]:
        """The progress of each, for a checkpoint."""
        return {name: course.progress for name, course in self._courses.items()}

    @property
    def metrics(self) -> dict[str, float]:
        """The learning rate, and all other numbers that change, by tag."""
        changing = {name: course.number for name, course in self._courses.items() if not course.schedule.is_constant}
        scheduled = {f"learner/scheduled/{name}": number for name, number in changing.items() if name != RATE}
        return scheduled | {f"learner/{RATE}": self._courses[RATE].number}


def is_complete(learning: LearningConfig, num_updates: int, frames: int) -> bool:
    """Returns whether a run has reached one of its totals."""
    return any(total and done >= total for done, total in
               ((num_updates, learning.total_updates), (frames, learning.total_frames)))  # fmt: skip
