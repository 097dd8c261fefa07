"""Numbers of an update that change while a run goes on: START:END:FRAMES, where a plain number would stay.

The frames begin where the run does. Without them the way ends with the run: after --total-frames or --total-updates,
or at --max-seconds.
"""

import math
import re
import typing
from typing import Literal, NamedTuple

from apexrl.config.sections import Changing, LearningConfig, UpdateConfig, whole_number

ENDLESS_FRAMES = 16_000_000  # after which half of the way lies behind a run without an end
Shape = Literal["linear", "cosine"]
SHAPES = {"linear": "linearly", "cosine": "along a cosine"}
PATTERN = re.compile(r"([^:]+):([^:]+)(?::(?!cosine)([^:]+))?(:cosine)?")


class Schedule(NamedTuple):
    """The way of a number through a run."""

    start: float
    end: float
    frames: int = 0  # of the environment, after which it is at its end; 0: until the run ends
    shape: Shape = "linear"

    @classmethod
    def of(cls, number: Changing) -> "Schedule":
        """Reads a flag's value. Raises ValueError when it is neither a number nor a schedule."""
        if not isinstance(number, str):
            return cls(number, number)
        try:
            if not (found := PATTERN.fullmatch(number)):
                return cls(float(number), float(number))
            frames = whole_number(found[3]) if found[3] else 0
            if found[3] and frames < 1:
                raise ValueError
            return cls(float(found[1]), float(found[2]), frames, "cosine" if found[4] else "linear")
        except ValueError:
            form = "a number, or START:END:FRAMES such as 3e-4:1e-5:16M, where :FRAMES may be left out"
            raise ValueError(f"{number} is no number that may change: give {form}; :cosine may follow") from None

    @property
    def ends(self) -> tuple[float, float]:
        """Both numbers as a range has to hold them: one may end at 0 also where it may not begin there."""
        return self.start, self.end or self.start

    @property
    def is_constant(self) -> bool:
        """Whether it stays as it is."""
        return self.start == self.end

    def at(self, share: float) -> float:
        """Returns the number after a share 0 to 1 of its way."""
        left = 1 - share if self.shape == "linear" else (1 + math.cos(math.pi * share)) / 2
        return self.end + (self.start - self.end) * left

    def describe(self, learning: LearningConfig, max_seconds: float) -> str:
        """Returns the number and what becomes of it, in words."""
        if self.is_constant:
            return f"{self.start:g}"
        ends = [f"{frames:,} frames" for frames in (self.frames or learning.total_frames,) if frames]
        if not self.frames:
            ends += [f"{learning.total_updates:,} updates"] if learning.total_updates else []
            ends += [f"{max_seconds:g} seconds"] if max_seconds else []
        over = f" over {' or '.join(ends)}" if ends else f", half of the way over {ENDLESS_FRAMES:,} frames"
        verb = "falling" if self.end < self.start else "rising"
        return f"{self.start:g} {verb} {SHAPES[self.shape]} to {self.end:g}{over}"


def changing_number(text: str) -> Changing:
    """Returns the number, or the schedule as it is written. Raises ValueError when it is neither."""
    schedule = Schedule.of(text)
    return schedule.start if schedule.is_constant else text


def schedules_of(update: UpdateConfig) -> dict[str, Schedule]:
    """Returns the ways of all numbers of an update that may change, by field."""
    hints = typing.get_type_hints(type(update)) | typing.get_type_hints(UpdateConfig)
    return {name: Schedule.of(getattr(update, name)) for name, hint in hints.items() if hint == Changing}


def share_of_endless(frames: int) -> float:
    """Returns how much of a way lies behind a run without an end: never all of it."""
    return frames / (frames + ENDLESS_FRAMES)
