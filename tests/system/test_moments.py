"""Moments of observations and rewards go through a run's other starts, forks and learners. Real processes."""

import signal

import numpy as np
import pytest

from apexrl.networks.checkpoint import load_checkpoint
from apexrl.networks.headers import latest_path
from apexrl.replay.journal import identity_of, read_entries
from apexrl.unroll import UnrollCodec
from tests.system.processes import LAUNCHER, Process, launch, play_on, read_json, updates_of, wait_for

pytestmark = pytest.mark.timeout(1800)  # to end what hangs: whole runs, also on a machine with much else to do

NORMALIZED = ("--normalize-observations", "--scale-rewards")
FLAGS = ("--env", "Pendulum-v1", "--agent", "sac", "--preset", "small", "--samples-per-insert", "8", *NORMALIZED,
         "--min-size-to-sample", "1000", "--capacity", "50000", "--episodes", "1")  # fmt: skip


def frames_of(journal):
    """The observations of a journal that begin a step [M, 3], each once, in the order of the log."""
    spec = identity_of(journal).spec
    unrolls = [UnrollCodec(spec).decode(entry.block) for entry in read_entries(journal)]
    return np.concatenate([unroll.frames[: spec.unroll_starts] for unroll in unrolls]).astype(np.float64)


def check(directory, journal, least_rows=0):
    """Checks the last checkpoint's normalizer against the beginning of a journal; returns how many rows it knows."""
    tensors = load_checkpoint(latest_path(directory)).tensors
    num_rows = int(tensors["learning.moments.observation"][0])
    frames = frames_of(journal)
    assert least_rows < num_rows <= len(frames)
    known = frames[:num_rows]
    np.testing.assert_allclose(tensors["acting.normalizer.mean"].numpy().ravel(), known.mean(0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(tensors["acting.normalizer.scale"].numpy().ravel(), 1 / known.std(0), rtol=1e-4)
    assert tensors["learning.moments.return"][0] > 0
    return num_rows


def stop(run):
    run.signal(signal.SIGINT)
    assert run.popen.wait(300) == 0, run.text()


def test_each_observation_is_counted_once_by_a_run_and_those_that_come_of_it(tmp_path, free_ports):
    ports, directory, guest = free_ports(4), tmp_path / "run", tmp_path / "guest"
    with launch(tmp_path, ports, *FLAGS) as run:
        wait_for(lambda: updates_of(directory) > 50, 300, "updates")
        words = (*LAUNCHER, "--guest", directory, "--run-dir", guest, "--no-tensorboard", "--no-evaluator", *NORMALIZED)
        limits = ("--total-updates", 50, "--min-size-to-sample", 1000)
        with Process([*words, *limits], tmp_path / "guest.txt") as visitor:
            assert visitor.popen.wait(300) == 0, visitor.text()
        stop(run)
    journal, before = directory / "journal", read_json(directory / "summary.json")
    num_rows = check(directory, journal)
    check(guest, journal)
    with launch(tmp_path, ports, "--resume", directory, name="resumed") as run:
        play_on(run, directory, before)
    num_rows = check(directory, journal, num_rows)
    before = read_json(directory / "summary.json")
    with launch(tmp_path, ports, "--fork", directory, name="fork") as run:
        play_on(run, tmp_path / "fork", before)
    check(tmp_path / "fork", tmp_path / "fork" / "journal", num_rows)
    offline = ("--from-journal", journal, "--total-updates", 60, *NORMALIZED)
    with launch(tmp_path, ports, *offline, name="offline") as run:
        assert run.popen.wait(300) == 0, run.text()
    check(tmp_path / "offline", journal)
