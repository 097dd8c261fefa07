"""TensorBoard as a role: its memory has a bound, however long a run is and however many lie beside it."""

import json
import urllib.parse
import urllib.request

import pytest

from apexrl.errors import PeerError
from apexrl.learning.record.event_file import EventFile
from apexrl.lifecycle import Stop
from apexrl.running import tensorboard
from apexrl.running.tensorboard import LEAST_SAMPLES, MOST_BYTES, SAMPLES, link_runs, samples_of
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
    query = urllib.parse.urlencode({"run": "run", "tag": "learner/loss"})

    def found():
        try:
            url = f"http://127.0.0.1:{port}/data/plugin/scalars/scalars?{query}"
            rows = json.load(urllib.request.urlopen(url, timeout=10))
            return rows if rows and rows[-1][1] == 3 * SAMPLES - 1 else []  # it adds one after the other
        except OSError:  # it does not listen yet, or has not loaded it
            return []

    with Process(["-m", "apexrl.running.tensorboard", tmp_path, "127.0.0.1", port], tmp_path / "board.txt"):
        rows = wait_for(found, 60, "the numbers")
    assert len(rows) == 500 and rows[-1][1:] == [3 * SAMPLES - 1, 3.0 * SAMPLES - 1]


def test_runs_are_shown_under_their_names_wherever_they_lie(tmp_path):
    runs, shown = tmp_path / "runs", tmp_path / "shown"
    make_runs(runs, 2)
    make_runs(runs / "run-0" / "earlier-1", 0)
    make_runs(runs / "sweep", 1)
    shown.mkdir()
    for _ in range(2):
        link_runs(runs, shown)
        names = {str(link.parent.relative_to(shown)) for link in shown.rglob("events*")}
        assert names == {"run-0", "run-1", "sweep/run-0"} and len(list(shown.rglob("events*"))) == 9
    (runs / "run-1").rename(tmp_path / "elsewhere")
    (runs / "run-0" / "tensorboard").rename(runs / "run-0" / "earlier-1")
    link_runs(runs, shown)
    assert {str(link.parent.relative_to(shown)) for link in shown.rglob("events*")} == {"sweep/run-0"}
    (tmp_path / "one").mkdir()
    link_runs(tmp_path / "elsewhere", tmp_path / "one")
    assert {str(link.parent.relative_to(tmp_path)) for link in (tmp_path / "one").rglob("events*")} == {"one/elsewhere"}


class Growing:
    """A process whose memory is larger at each look, as a stand-in for this one; and its server."""

    def __init__(self, *sizes):
        self._sizes = list(sizes)

    def memory_info(self):
        return type("Memory", (), {"rss": self._sizes.pop(0)})

    def configure(self, **settings):
        pass

    def launch(self):
        pass


@pytest.mark.parametrize(
    ("sizes", "end"),
    [((90, 200, 399, 401), "grown to 401 MB"), ((500, 1_400, 1_501), "grown to 1501 MB")],
)
def test_a_board_that_has_grown_too_much_ends_and_is_begun_anew(tmp_path, monkeypatch, sizes, end):
    growing = Growing(*(size * 10**6 for size in sizes))
    monkeypatch.setattr("psutil.Process", lambda: growing)
    monkeypatch.setattr(tensorboard, "program", type("Program", (), {"TensorBoard": lambda: growing}))
    monkeypatch.setattr(tensorboard, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr("sys.argv", ["tensorboard", str(tmp_path), "127.0.0.1", "6006"])
    assert MOST_BYTES == 400 * 10**6
    with pytest.raises(PeerError, match=end):
        tensorboard.main(Stop())
