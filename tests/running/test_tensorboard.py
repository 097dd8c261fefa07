"""TensorBoard as a role: its memory has a bound, however long a run is and however many lie beside it."""

import json
import urllib.parse
import urllib.request

import pytest

from apexrl.learning.record.event_file import EventFile
from apexrl.running.tensorboard import LEAST_SAMPLES, SAMPLES, samples_of
from tests.system.processes import Process, wait_for

COUNTS = [(0, SAMPLES), (4, SAMPLES), (9, 500), (49, 100), (500, LEAST_SAMPLES)]


def make_runs(directory, count):
    """Event files of runs that were started three times each."""
    for i in range(count):
        (directory / f"run-{i}" / "tensorboard").mkdir(parents=True)
        for start in range(3):
            (directory / f"run-{i}" / "tensorboard" / f"events.out.tfevents.{start}.host").touch()


@pytest.mark.parametrize(("num_runs", "samples"), COUNTS)
def test_of_many_runs_fewer_numbers_are_kept(tmp_path, num_runs, samples):
    make_runs(tmp_path, num_runs)
    assert samples_of(tmp_path) == samples


def test_of_a_long_run_a_sample_is_kept_with_the_newest_number(tmp_path, free_ports):
    make_runs(tmp_path, 8)
    events = EventFile(tmp_path / "run" / "tensorboard")
    for frames in range(3 * SAMPLES):
        events.scalars({"learner/loss": float(frames)}, frames)
    events.flush()
    (port,) = free_ports(1)
    query = urllib.parse.urlencode({"run": "run/tensorboard", "tag": "learner/loss"})

    def found():
        try:
            url = f"http://127.0.0.1:{port}/data/plugin/scalars/scalars?{query}"
            return json.load(urllib.request.urlopen(url, timeout=10))
        except OSError:  # it does not listen yet, or has not loaded it
            return []

    with Process(["-m", "apexrl.running.tensorboard", tmp_path, "127.0.0.1", port], tmp_path / "board.txt"):
        rows = wait_for(found, 60, "the numbers")
    assert len(rows) == 500 and rows[-1][1:] == [3 * SAMPLES - 1, 3.0 * SAMPLES - 1]
