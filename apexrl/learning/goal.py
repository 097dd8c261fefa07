"""The distance of a run from its totals."""

from apexrl.config.sections import LearningConfig
from apexrl.types import StreamSpec


def progress(learning: LearningConfig, transitions: int, spec: StreamSpec) -> tuple[int, float]:
    """Returns the environment frames so far, and their share of the total: 0 where the run has none."""
    frames, total = transitions * spec.frames_per_step, learning.total_frames
    return frames, min(frames / total, 1.0) if total else 0.0


def is_complete(learning: LearningConfig, num_updates: int, share: float) -> bool:
    """Returns whether a run has reached one of its totals: of updates, or of frames by their share."""
    return share == 1 or bool(learning.total_updates and num_updates >= learning.total_updates)
