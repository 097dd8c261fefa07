"""The screen that shows a run."""

import io
import logging
import os
import time
from collections import namedtuple
from pathlib import Path

import pytest
from rich.console import Console

from apexrl.files import write_json
from apexrl.networks.checkpoint import Counters
from apexrl.running.display import (
    STALE_SECONDS,
    STATUS_FILE,
    ConsoleHandler,
    Display,
    Status,
    probabilities_of,
    progress_rows,
    read_status,
)
from apexrl.running.supervise import Supervisor

METRICS = {
    "actor/frames_per_second": 3000.4,
    "learner/updates_per_second": 12.34,
    "replay/fill": 0.5,
    "replay/samples_per_insert": 7.9,
    "actor/waits_for/learner": 1.013,
    "learner/waits_for/[red]min_size": 0.25,
    "actor/waits_for/nothing": 0.001,
}


def status_with(metrics):
    return Status("Catch-v0", 4000, Counters(updates=70), metrics, "")


@pytest.fixture
def shown(tmp_path):
    """A display of a run, and the supervisor whose roles it shows."""
    supervisor = Supervisor(10)
    console = Console(file=io.StringIO(), force_terminal=True, width=200, markup=False, highlight=False)
    return Display(console, tmp_path, supervisor), supervisor


def write_status(directory: Path, metrics, age_seconds=0.0):
    write_json(directory / STATUS_FILE, status_with(metrics))
    written_at = time.time() - age_seconds
    os.utime(directory / STATUS_FILE, (written_at, written_at))


def test_rates_and_waits():
    rows = dict(progress_rows(status_with(METRICS)))
    assert rows["frames"] == "4,000 (3,000/s)" and rows["updates"] == "70 (12.3/s)"
    assert rows["replay"] == "50% full, 7.90 samples an insert"
    assert rows["waits"] == "actor for learner 100%, learner for [red]min_size 25%"


def test_what_nobody_reports_is_a_dash():
    rows = dict(progress_rows(status_with({})))
    assert rows["frames"] == "4,000 (-/s)" and rows["updates"] == "70 (-/s)" and rows["waits"] == "-"
    assert dict(progress_rows(status_with({"replay/fill": 1.0})))["waits"] == "nobody"


def test_a_full_disk_is_said(shown, tmp_path, monkeypatch):
    display, _ = shown
    assert "disk" not in dict(display.rows())
    monkeypatch.setattr("shutil.disk_usage", lambda path: namedtuple("Usage", "free")(5 * 2**20))
    assert dict(display.rows())["disk"].startswith(f"5 MiB are free for {tmp_path}")


def test_games_of_an_evaluation_that_goes_on():
    metrics = {"evaluation/games_finished": 3.0, "evaluation/return_so_far": 7.25}
    assert dict(progress_rows(status_with(metrics)))["evaluating"] == "3 games so far, mean 7.2"
    assert "evaluating" not in dict(progress_rows(status_with(METRICS)))


def test_a_policy_of_at_most_three_actions_is_shown():
    left, stay, right = ({f"learner/probability_{name}": p} for name, p in [("left", 0.4), ("stay", 0), ("right", 0.6)])
    assert dict(progress_rows(status_with(METRICS | left | right)))["policy"] == "left 0.400, right 0.600"
    assert dict(progress_rows(status_with(left | stay | right)))["policy"] == "left 0.400, stay 0.000, right 0.600"
    assert "policy" not in dict(progress_rows(status_with(METRICS)))
    four = {f"learner/probability_{i}": 0.25 for i in range(4)}
    assert "policy" not in dict(progress_rows(status_with(four)))
    assert probabilities_of(status_with(four | METRICS)) == {f"probability_{i}": 0.25 for i in range(4)}
    assert probabilities_of(None) == {}


def test_a_run_starts_until_its_learner_reports(shown, tmp_path):
    display, _ = shown
    assert ("state", "starting") in display.rows()
    write_status(tmp_path, METRICS, age_seconds=100.0)  # from an earlier start
    assert ("state", "starting") in display.rows()
    write_status(tmp_path, METRICS, age_seconds=-10.0)
    assert dict(display.rows())["frames"] == "4,000 (3,000/s)"


def test_metrics_that_are_old_are_not_shown_as_if_they_were_new(shown, tmp_path):
    display, _ = shown
    display._began_at -= 1000.0
    write_status(tmp_path, METRICS, age_seconds=STALE_SECONDS + 20)
    rows = dict(display.rows())
    assert rows["stale"].startswith("the learner has reported nothing for 3")
    assert rows["frames"] == "4,000 (-/s)" and rows["waits"] == "-"


def test_roles_that_are_down(shown, tmp_path):
    display, supervisor = shown
    for name in ("actors", "evaluator", "replay"):
        supervisor.start(name, ["-c", "raise SystemExit(1)"], log=tmp_path / f"{name}.log")
        supervisor.children[name].process.wait(100)
    for name in ("actors", "evaluator"):
        supervisor.children[name].process = None
    supervisor.children["actors"].restarts = 2
    supervisor.children["evaluator"].is_given_up = True
    rows = dict(display.rows())
    assert (rows["restarting"], rows["restarted"], rows["given up"]) == ("actors", "actors 2x", "evaluator")


def test_names_of_others_are_no_markup(shown, tmp_path):
    display, _ = shown
    write_status(tmp_path, METRICS, age_seconds=-10.0)
    display._console.print(display._table())
    assert "[red]min_size" in display._console.file.getvalue()


def test_what_is_logged_stays_above_the_live_table(shown):
    """A terminal shows the record, then the table again; a record on stderr would be overwritten by it."""
    display, _ = shown
    logger = logging.Logger("role")
    logger.addHandler(ConsoleHandler(display._console))
    with display:
        display.update()
        logger.warning("the [robot] arm is stuck")
    printed = display._console.file.getvalue()
    assert "time" in printed.partition("the [robot] arm is stuck\n")[2]


def test_a_status_that_cannot_be_read_is_none(tmp_path):
    assert read_status(tmp_path) is None
    (tmp_path / STATUS_FILE).mkdir()
    assert read_status(tmp_path) is None
