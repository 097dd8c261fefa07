"""A role that tells a tracker of experiments about a run: `python -m apexrl.running.trackers wandb|mlflow DIRECTORY`.

It reads the files of the run, so that a tracker that is slow or away costs the learner nothing. Both packages are
optional, and find their servers by their own environment variables (WANDB_MODE, MLFLOW_TRACKING_URI, ...).
"""

import logging
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from apexrl.errors import PeerError
from apexrl.files import read_whole, write_durably
from apexrl.learning.record.run_page import flags_of
from apexrl.learning.record.status_file import read_status
from apexrl.lifecycle import Stop, run_role
from apexrl.net.metrics_channel import EVALUATED_FRAMES, LEARNER_TAGS
from apexrl.runs import VIDEOS, video_name

PROJECT = "apexrl"
LOOK_SECONDS = 5.0
MAX_ID_BYTES = 4096
GAME = "evaluation/game"


class Tracker(NamedTuple):
    """A run of a tracker."""

    id: str  # by which a later start goes on with it
    log: Callable[[Mapping[str, float], int], object]  # metrics by tag, environment frames, also earlier ones
    show: Callable[[Path, int], object]  # a video, environment frames
    finish: Callable[[], None]


def wandb_run(name: str, known: str, directory: Path, flags: Mapping[str, Any]) -> Tracker:
    """Begins a run of Weights & Biases, or goes on with the known one."""
    import wandb  # noqa: PLC0415 - optional

    run = wandb.init(
        project=PROJECT, name=name, id=known or None, resume="allow", dir=directory, config=dict(flags)
    )  # fmt: skip
    run.define_metric("*", step_metric="frames")

    def show(video: Path, frames: int) -> None:
        run.log({GAME: wandb.Video(str(video)), "frames": frames})

    return Tracker(run.id, lambda metrics, frames: run.log({**metrics, "frames": frames}), show, run.finish)


def mlflow_run(name: str, known: str, directory: Path, flags: Mapping[str, Any]) -> Tracker:
    """Begins a run of MLflow, or goes on with the known one."""
    import mlflow  # noqa: PLC0415 - optional

    mlflow.set_experiment(PROJECT)
    run = mlflow.start_run(run_id=known or None, run_name=None if known else name)
    if not known:
        mlflow.log_params({flag: str(value)[:500] for flag, value in flags.items()})

    def log(metrics: Mapping[str, float], frames: int) -> None:
        mlflow.log_metrics({re.sub(r"[^\w.\- :/]", "_", tag): value for tag, value in metrics.items()}, step=frames)

    return Tracker(run.info.run_id, log, lambda video, frames: mlflow.log_artifact(str(video), VIDEOS), mlflow.end_run)


KINDS: Mapping[str, Callable[[str, str, Path, Mapping[str, Any]], Tracker]] = {
    "wandb": wandb_run, "mlflow": mlflow_run
}  # fmt: skip


def begin(kind: str, directory: Path) -> Tracker:
    """Begins the run of a tracker, or goes on with the one that an earlier start has begun for this directory."""
    path = directory / f"{kind}.id"
    known = read_whole(path, MAX_ID_BYTES).decode().strip() if path.exists() else ""
    tracker = KINDS[kind](directory.resolve().name, known, directory, flags_of(directory))
    write_durably(path, f"{tracker.id}\n".encode())
    return tracker


def follow(directory: Path, tracker: Tracker, stop: Stop) -> None:
    """Tells the metrics of a run when they are new, until told to stop; then once more.

    An evaluation is told once, at the frames of its network, which the run has left behind meanwhile. So is its video,
    which is whole when the next evaluation is told, or the run has ended.
    """
    told, evaluated, last = None, dict[str, float](), False
    videos = Path(str(flags_of(directory).get("record-dir") or directory / VIDEOS))

    def show() -> None:
        video = videos / video_name(int(evaluated.get("evaluation/params_version", 0)))
        if evaluated and video.is_file():
            tracker.show(video, int(evaluated.get(EVALUATED_FRAMES, 0)))

    while not last:
        last = stop.wait(LOOK_SECONDS)
        status = read_status(directory)
        if status is None:
            continue
        living = {tag: value for tag, value in status.metrics.items() if not tag.startswith("evaluation/")}
        known = status.frames, status.counters.updates  # updates from a journal come without new frames
        if living and known != told:
            told = known
            tracker.log(living, status.frames)
        evaluation = {tag: value for tag, value in status.metrics.items() if tag in LEARNER_TAGS}
        if evaluation and evaluation != evaluated:
            show()
            evaluated = evaluation
            # The status of an earlier version does not say where the network was trained.
            tracker.log(evaluation, int(evaluation.get(EVALUATED_FRAMES, status.frames)))
    show()


def main(stop: Stop) -> None:
    """Follows a run."""
    kind, directory = sys.argv[1], Path(sys.argv[2])
    logging.getLogger(kind).setLevel(logging.WARNING)
    try:
        tracker = begin(kind, directory)
        follow(directory, tracker, stop)
        tracker.finish()
    except Exception as error:  # whatever a tracker raises, when it has no key or no server
        raise PeerError(f"{kind} does not work ({type(error).__name__}: {error})") from error


if __name__ == "__main__":
    run_role("tracker", main)
