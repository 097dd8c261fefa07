"""The distance of a run from its totals, and how far its learning rate has fallen."""

import msgspec

from apexrl.config.commands import LearnerCommand
from apexrl.config.rates import rate_at, share_of_endless
from apexrl.config.sections import LearningConfig
from apexrl.networks.headers import Fall

SPENT = 0.01  # of a learning rate: what is below teaches nothing


class Schedule:
    """The fall of a learning rate. One owner.

    It goes with the frames of the run and with the time until its end, whichever is further; without an end it falls
    ever more slowly (`rates.share_of_endless`). A run that goes on with
    other ends falls from where it is to the new ones; with another --learning-rate it begins there. One whose rate is
    spent begins as if it had had its new ends from the start.
    """

    def __init__(self, command: LearnerCommand, now: float = 0.0):
        """Begins at the first frame; seconds count from `now`, since 1970."""
        self._update = update = command.update
        asked = update.learning_rate, command.learning.total_frames, update.learning_rate_frames, command.ends_at
        self.fall = Fall(*asked, end_frames=update.learning_rate_frames, began_at=now)

    def begin(self, frames: int, before: Fall | None) -> None:
        """Goes on where a checkpoint at so many frames was; `before`: as it tells, older versions tell nothing."""
        own = self.fall
        if before is None:
            return
        if before.asked == own.asked:
            self.fall = before
            return
        is_same = before.rate == own.rate
        is_spent = is_same and rate_at(self._update, before.share) < SPENT * own.rate
        end_frames = frames + own.over_frames if own.over_frames else 0
        if is_same and not is_spent and before.over_frames == own.over_frames:
            end_frames = before.end_frames
        share = before.share if is_same and not is_spent else 0.0
        begun = {"begun_frames": 0 if is_spent else frames, "begun_share": share, "share": share}
        self.fall = msgspec.structs.replace(own, end_frames=end_frames, **begun)

    def late(self, now: float) -> float:
        """Returns the share of the time from the beginning of the fall to the end of the run; 0 without an end."""
        fall = self.fall
        return (now - fall.began_at) / max(fall.ends_at - fall.began_at, 1.0) if fall.ends_at else 0.0

    def advance(self, frames: int, late: float = 0.0) -> float:
        """Takes the frames of the run and the result of `late`; returns how far the rate has fallen, 0 to 1."""
        fall, totals = self.fall, (self.fall.total_frames, self.fall.end_frames)
        passed = [(frames - fall.begun_frames) / max(end - fall.begun_frames, 1) for end in totals if end]
        if not passed and not fall.ends_at:
            passed = [share_of_endless(frames - fall.begun_frames)]
        share = fall.begun_share + (1 - fall.begun_share) * min(max(late, *passed, 0.0), 1.0)
        self.fall = msgspec.structs.replace(fall, share=share)
        return share

    @property
    def rate(self) -> float:
        """The learning rate as it is now."""
        return rate_at(self._update, self.fall.share)


def is_complete(learning: LearningConfig, num_updates: int, frames: int) -> bool:
    """Returns whether a run has reached one of its totals."""
    return any(total and done >= total for done, total in
               ((num_updates, learning.total_updates), (frames, learning.total_frames)))  # fmt: skip
