"""Trackers of experiments, with their real packages: offline, or in files."""

import importlib.util
import json

import msgspec
import pytest

from apexrl.config.commands import RunCommand
from apexrl.config.flags import default_command
from apexrl.errors import ConfigError
from apexrl.learning.record.status_file import STATUS_FILE, Status
from apexrl.networks.headers import Counters
from apexrl.running import prepare, trackers
from apexrl.runs import CONFIG_FILE
from tests.system.processes import Process, wait_for


@pytest.fixture
def run(tmp_path):
    """A run's directory with two evaluations."""
    directory = tmp_path / "runs" / "catch"
    directory.mkdir(parents=True)
    (directory / CONFIG_FILE).write_text('{"command": {"seed": 3, "update": {"learning_rate": 0.5}}}')
    (directory / "evaluations.csv").write_text(
        "seconds,frames,updates,episodes,mean,median,min,max\n1,10,2,5,1,1,0,2\n"
    )
    status = Status("Catch-v0", 40, Counters(), {"replay/size": 7.0, "own/a(b)": 2.0}, "")
    (directory / STATUS_FILE).write_bytes(msgspec.json.encode(status))
    return directory


class Now:
    """A stop that comes at the second look."""

    def __init__(self):
        self.looks = 0

    def wait(self, seconds):
        self.looks += 1
        return self.looks == 2


def test_metrics_are_told_once(run):
    told = []
    tracker = trackers.Tracker("1", lambda metrics, frames: told.append((dict(metrics), frames)), *[None] * 2)
    trackers.follow(run, tracker, Now())
    assert told == [({"replay/size": 7.0, "own/a(b)": 2.0}, 40)]


def test_what_comes_without_new_frames_is_told(run):
    told, at_end = [], Counters(updates=9, evaluation_episodes=10)
    last = Status("Catch-v0", 40, at_end, {"evaluation/return_mean": 1.0}, "")

    def log(metrics, frames):
        told.append((dict(metrics), frames))
        (run / STATUS_FILE).write_bytes(msgspec.json.encode(last))

    trackers.follow(run, trackers.Tracker("1", log, *[None] * 2), Now())
    assert told == [({"replay/size": 7.0, "own/a(b)": 2.0}, 40), ({"evaluation/return_mean": 1.0}, 40)]


@pytest.mark.parametrize("record_dir", ["", "films"])
def test_an_evaluation_is_told_once_and_where_its_network_was_trained_and_so_is_its_film(run, record_dir):
    told, shown = [], []
    videos = run / (record_dir or "videos")
    videos.mkdir()
    (videos / "game-00000008.webm").touch()
    if record_dir:
        (run / CONFIG_FILE).write_text(json.dumps({"command": {"evaluation": {"record_dir": str(videos)}}}))

    def write(frames, evaluated):
        results = {"evaluation/return_mean": evaluated / 4, "evaluation/frames": float(evaluated)}
        results["evaluation/params_version"] = evaluated / 10
        living = {"replay/size": float(frames), "evaluation/games_finished": 3.0, "evaluation/return_so_far": 1.0}
        status = Status("Catch-v0", frames, Counters(), living | results, "")
        (run / STATUS_FILE).write_bytes(msgspec.json.encode(status))

    class Going(Now):
        def wait(self, seconds):
            self.looks += 1
            write(100 * self.looks, 40 if self.looks < 3 else 80)
            if self.looks == 2:  # its figures were told before
                (videos / "game-00000004.webm").touch()
            return self.looks == 4

    def show(video, frames):
        shown.append((video.name, frames))

    tracker = trackers.Tracker("1", lambda metrics, frames: told.append((dict(metrics), frames)), show, None)
    trackers.follow(run, tracker, Going())
    assert shown == [("game-00000004.webm", 40), ("game-00000008.webm", 80)]
    drawn = [(frames, metrics["evaluation/return_mean"]) for metrics, frames in told if "evaluation/frames" in metrics]
    assert drawn == [(40, 10.0), (80, 20.0)]
    living = [(metrics, frames) for metrics, frames in told if "evaluation/frames" not in metrics]
    assert living == [({"replay/size": 100.0 * look}, 100 * look) for look in (1, 2, 3, 4)]


def test_a_later_start_goes_on_with_the_run_of_the_tracker(run, monkeypatch):
    begun = []

    def begin(name, known, directory, flags):
        begun.append((name, known, flags["learning-rate"]))
        return trackers.Tracker(known or "id-1", None, None, None)

    monkeypatch.setattr(trackers, "KINDS", {"wandb": begin})
    assert trackers.begin("wandb", run).id == trackers.begin("wandb", run).id == "id-1"
    assert begun == [("catch", "", 0.5), ("catch", "id-1", 0.5)]


@pytest.mark.long("trackers of experiments")
@pytest.mark.parametrize("kind", ["wandb", "mlflow"])
def test_a_run_is_told_to_the_real_package(run, tmp_path, kind):
    environment = {
        "WANDB_MODE": "offline",
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db",
        "WANDB_SILENT": "true",
    }
    environment["MLFLOW_ALLOW_FILE_STORE"] = "true"
    environment["MLFLOW_TRACKING_URI"] = f"file:{tmp_path}/mlruns"
    log = tmp_path / "log.txt"
    with Process(["-m", "apexrl.running.trackers", kind, run], log, environment) as process:

        def told():
            if kind == "wandb":
                return any(path.stat().st_size > 2000 for path in run.glob("wandb/offline-run-*/run-*.wandb"))
            return list(tmp_path.glob("mlruns/*/*/metrics/replay/size"))

        wait_for(lambda: told() or process.popen.poll() is not None, 60, "figures")
        process.signal(15)
        assert process.popen.wait(100) == 0, process.text()
    if kind == "mlflow":
        (size,) = told()
        assert size.read_text().split()[1:] == ["7.0", "40"]
        assert list(tmp_path.glob("mlruns/*/*/metrics/own/a_b_"))  # mlflow has no parentheses
        (rate,) = tmp_path.glob("mlruns/*/*/params/learning-rate")
        assert rate.read_text() == "0.5"


def test_a_tracker_that_is_not_installed_is_one_line(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    command = default_command(RunCommand)
    assert prepare.trackers_of(command) == []
    with pytest.raises(
        ConfigError, match=r"--wandb needs .*: wandb is not installed: say `.*python\S* -m pip install wandb`"
    ):
        prepare.trackers_of(command.__class__(**{**vars(command), "wandb": True}))
