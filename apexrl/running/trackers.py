"""A role that tells a tracker of experiments about a run: `python -m apexrl.running.trackers wandb|mlflow DIRECTORY`.

It reads the files of the run, so that a tracker that is slow or away costs the learner nothing. Both packages are
optional, and find their servers by their own environment variables (WANDB_MODE, MLFLOW_TRACKING_URI, ...).
"""

import csv
import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from apexrl.errors import PeerError
from apexrl.learning.run_page import flags_of
from apexrl.learning.run_record import CURVE_FILE
from apexrl.learning.status_file import read_status
from apexrl.lifecycle import Stop, run_role

PROJECT = "apexrl"
LOOK_SECONDS = 5.0


class Tracker(NamedTuple):
    """A run of a tracker."""

    log: Callable[[Mapping[str, float], int], object]  # metrics by tag, environment frames
    finish: Callable[[], None]


def wandb_run(name: str, directory: Path, flags: Mapping[str, Any]) -> Tracker:
    """Begins a run of Weights & Biases, or goes on with the one of that name."""
    import wandb  # noqa: PLC0415 - optional

    run = wandb.init(project=PROJECT, name=name, id=name, resume="allow", dir=directory, config=dict(flags))
    run.define_metric("*", step_metric="frames")
    return Tracker(lambda metrics, frames: run.log({**metrics, "frames": frames}), run.finish)


def mlflow_run(name: str, directory: Path, flags: Mapping[str, Any]) -> Tracker:
    """Begins a run of MLflow, or goes on with the newest of that name."""
    import mlflow  # noqa: PLC0415 - optional

    experiment = mlflow.set_experiment(PROJECT)
    earlier = mlflow.search_runs(
        [experiment.experiment_id], f"attributes.run_name = '{name}'", output_format="list", max_results=1
    )
    if earlier:
        mlflow.start_run(run_id=earlier[0].info.run_id)
    else:
        mlflow.start_run(run_name=name)
        mlflow.log_params({flag: str(value)[:500] for flag, value in flags.items()})
    return Tracker(lambda metrics, frames: mlflow.log_metrics(dict(metrics), step=frames), mlflow.end_run)


KINDS: Mapping[str, Callable[[str, Path, Mapping[str, Any]], Tracker]] = {"wandb": wandb_run, "mlflow": mlflow_run}


def follow(directory: Path, tracker: Tracker, stop: Stop) -> None:
    """Tells what is new in a run's directory, until told to stop; then once more."""
    told_frames, num_evaluations, last = -1, 0, False
    while not last:
        last = stop.wait(LOOK_SECONDS)
        status = read_status(directory)
        if status is not None and status.frames > told_frames:
            told_frames = status.frames
            tracker.log(status.metrics, status.frames)
        for row in curve(directory)[num_evaluations:]:
            num_evaluations += 1
            means = {f"curve/{name}": float(row[name]) for name in ("mean", "median", "min", "max")}
            tracker.log(means, int(row["frames"]))


def curve(directory: Path) -> list[dict[str, str]]:
    """Returns the evaluations of a run so far."""
    path = directory / CURVE_FILE
    return list(csv.DictReader(path.read_text().splitlines())) if path.exists() else []


def main(stop: Stop) -> None:
    """Follows a run."""
    kind, directory = sys.argv[1], Path(sys.argv[2])
    logging.getLogger(kind).setLevel(logging.WARNING)
    try:
        tracker = KINDS[kind](directory.resolve().name, directory, flags_of(directory))
        follow(directory, tracker, stop)
        tracker.finish()
    except Exception as error:  # whatever a tracker raises, when it has no key or no server
        raise PeerError(f"{kind} does not work ({type(error).__name__}: {error})") from error


if __name__ == "__main__":
    run_role("tracker", main)
