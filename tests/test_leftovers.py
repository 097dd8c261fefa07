"""Processes that a dead one leaves: real ones, which sleep."""

import os
import subprocess
import sys

import psutil
import pytest

from apexrl.leftovers import MARK_VARIABLE, kill_marked, new_mark, with_descendants
from tests.few_files import no_files_left
from tests.system.processes import ROOT, wait_for


@pytest.fixture
def sleeper():
    started = []

    def start(mark):
        started.append(subprocess.Popen(["sleep", "600"], env={MARK_VARIABLE: mark}, start_new_session=True))
        wait_for(lambda: psutil.Process(started[-1].pid).name() == "sleep", 100, "the start")
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_only_processes_with_the_mark_are_killed(sleeper):
    mark = new_mark()
    ours, nested, others = sleeper(mark), sleeper(f"{mark}/0"), [sleeper(f"{mark}0"), sleeper("")]
    kill_marked(mark, also_nested=False)
    assert ours.wait(100) == -9 and nested.poll() is None
    kill_marked(mark, also_nested=True)
    assert nested.wait(100) == -9
    assert [process.poll() for process in others] == [None, None]


def test_marks_differ_and_go_on_from_our_own(monkeypatch):
    monkeypatch.setenv(MARK_VARIABLE, "/ours")
    assert new_mark() != new_mark() and new_mark().startswith("/ours/")


def test_a_look_without_a_file_descriptor_ends_nothing(sleeper):
    mark = new_mark()
    process = sleeper(mark)
    with no_files_left():
        kill_marked(mark, also_nested=True)
        assert with_descendants(os.getpid()) == []
    assert process.poll() is None


def test_descendants_are_killed_in_sessions_of_their_own_too():
    script = (
        "import subprocess, sys\nfrom apexrl.leftovers import kill_descendants\n"
        "sleeper = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "kill_descendants()\nsys.exit(sleeper.wait(100) + 9)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=300, check=False).returncode == 0
