"""Runs of pytest with the project's schedule: which tests they take, and how Ctrl-C ends them."""

import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.schedule import longest_first
from tests.system.processes import ROOT, is_gone, wait_for

INI = "[pytest]\naddopts = -q --numprocesses auto --no-loadscope-reorder\ntestpaths = inner\n"
CONFTEST = "from tests.schedule import *\n"
TESTS = """
import pytest
def test_short(): pass
@pytest.mark.long("a part")
def test_long(): pass
@pytest.mark.long("a part")
def test_longer(): pass
@pytest.mark.long("another")
def test_longest(): pass
"""
STUBBORN = """
import subprocess, time, pathlib
def test_stubborn():
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    pathlib.Path({path!r}).write_text(str(child.pid))
    while True:
        try:
            time.sleep(600)
        except KeyboardInterrupt:
            continue
"""


@pytest.fixture
def run(tmp_path):
    """Starts pytest on a file of tests."""
    (tmp_path / "pytest.ini").write_text(INI)
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "conftest.py").write_text(CONFTEST)
    given = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}

    def start(tests, *words):
        (tmp_path / "inner" / "test_it.py").write_text(tests)
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words]
        return subprocess.Popen(command, cwd=tmp_path, env={**given, "PYTHONPATH": str(ROOT)}, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip

    return start


@pytest.mark.parametrize(
    ("words", "passed", "last"),
    [
        ((), 1, "left out: 2 of a part, 1 of another. `bash run.sh test --all` takes them, too."),
        (("--numprocesses", "0"), 1, "left out: 2 of a part, 1 of another. `bash run.sh test --all` takes them, too."),
        (("--all",), 4, None),
        (("inner/test_it.py",), 4, None),
        (("inner/test_it.py::test_long",), 1, None),
    ],
)
def test_long_tests_are_left_out_and_counted_unless_they_are_asked_for(run, words, passed, last):
    process = run(TESTS, *words)
    said = process.communicate(timeout=300)[0].splitlines()
    assert process.returncode == 0, said
    assert (said[-1] == last) == (last is not None) and any(f"{passed} passed" in line for line in said), said


@pytest.mark.parametrize("words", [(), ("inner/test_it.py",)], ids=["processes", "one process"])
def test_ctrl_c_ends_a_run_and_all_that_it_started(run, tmp_path, words):
    path = tmp_path / "child"
    process = run(STUBBORN.format(path=str(path)), *words)
    child = int(wait_for(lambda: path.exists() and path.read_text(), 60, "the test's child"))
    process.send_signal(signal.SIGINT)
    assert process.wait(300) == pytest.ExitCode.INTERRUPTED
    process.stdout.close()
    wait_for(lambda: is_gone(child), 60, "the end of the test's child")


def test_the_longest_group_is_begun_first_and_stays_together():
    names = ["t/a.py::a", "t/test_docs.py::b", "t/a.py::c", "t/test_docs.py::d", "t/a.py::e"]
    ordered = longest_first(
        [SimpleNamespace(nodeid=name) for name in names], dict(zip(names, (3, 2.5, 9, 2), strict=False))
    )
    assert "".join(item.nodeid[-1] for item in ordered) == "cbdae"
