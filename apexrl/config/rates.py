"""Learning rates that fall from --learning-rate to --learning-rate-end: the shapes, and words about them."""

import math

from apexrl.config.sections import LearningConfig, UpdateConfig

ENDLESS_FRAMES = 16_000_000  # after which a rate has half fallen that is to fall in a run without an end
SHAPES = {"linear": "linearly", "cosine": "along a cosine"}


def rate_at(update: UpdateConfig, share: float) -> float:
    """Returns the learning rate after a share 0 to 1 of its fall."""
    start, end = update.learning_rate, update.learning_rate_end
    match update.learning_rate_schedule:
        case "linear":
            return end + (start - end) * (1 - share)
        case "cosine":
            return end + (start - end) * (1 + math.cos(math.pi * share)) / 2
    return start


def share_of_endless(frames: int) -> float:
    """Returns how far a rate has fallen in a run without an end: never all of the way."""
    return frames / (frames + ENDLESS_FRAMES)


def why_senseless(update: UpdateConfig) -> str:
    """Returns why the numbers of a fall contradict each other, an empty string when they do not."""
    if update.learning_rate_end > update.learning_rate:
        return f"--learning-rate-end {update.learning_rate_end:g} is above --learning-rate {update.learning_rate:g}"
    if update.learning_rate_schedule == "constant" and (update.learning_rate_end or update.learning_rate_frames):
        return "--learning-rate-end and --learning-rate-frames need --learning-rate-schedule linear or cosine"
    return ""


def describe_fall(update: UpdateConfig, learning: LearningConfig, max_seconds: float) -> str:
    """Returns what becomes of the learning rate, in words that follow its number."""
    shape = SHAPES.get(update.learning_rate_schedule)
    if shape is None:
        return ""
    frames = [total for total in (learning.total_frames, update.learning_rate_frames) if total]
    ends = [f"{min(frames):,} frames"] if frames else []
    ends += [f"{max_seconds:g} seconds"] if max_seconds else []
    if not ends:
        return f" falling {shape} to {update.learning_rate_end:g}, half of the way over {ENDLESS_FRAMES:,} frames"
    return f" falling {shape} to {update.learning_rate_end:g} over {' or '.join(ends)}"
