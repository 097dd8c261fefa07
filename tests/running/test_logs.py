"""Logs with a bound, whatever writes into them, and the last words of a child that has written much."""

import contextlib
import os
import signal
from pathlib import Path

import pytest

from apexrl.errors import PeerError
from apexrl.running.last_words import TAIL_BYTES, FromLog, cut
from apexrl.running.supervise import Supervisor
from tests.system.processes import wait_for

MAX_BYTES = 50_000
# One megabyte a second, for half a minute: a process that outlives its test must not fill the disk.
C_LIBRARY = """
import os, time
for _ in range(30_000):
    os.write(2, b"x" * 999 + b"\\n")
    os.write(1, b"y" * 99 + b"\\n")
    time.sleep(0.001)
"""
SIMULATOR = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {C_LIBRARY!r}])"
FORKED = f"import os; os.fork() or os.setsid()\n{C_LIBRARY}"  # into a session of its own


@pytest.fixture
def supervise(tmp_path):
    """Makes supervisors whose children have short logs, and ends all children."""
    made = []

    def make(script, **options):
        supervisor = Supervisor(options.pop("max_restarts", 10), max_log_bytes=MAX_BYTES, **options)
        made.append(supervisor)
        supervisor.start("role", ["-c", script], log=tmp_path / "role.log")
        return supervisor

    yield make
    for supervisor in made:
        supervisor.stop(["role"], 0.0)


@pytest.fixture
def log(tmp_path):
    """A log of a child whose process is this test, and the descriptor that it writes to."""
    words = FromLog(tmp_path / "role.log", MAX_BYTES)
    with contextlib.ExitStack() as held:

        def begin():
            with words.outputs() as (file, _):
                return held.enter_context(os.fdopen(os.dup(file.fileno()), "ab", buffering=0))

        yield words, begin


def older(path: Path) -> bytes:
    return path.with_name(f"{path.name}.1").read_bytes()


@pytest.mark.parametrize("script", [C_LIBRARY, SIMULATOR, FORKED])
def test_a_log_is_bounded_whatever_writes_into_it(supervise, tmp_path, script):
    supervisor, path = supervise(script), tmp_path / "role.log"
    cuts, sizes = 0, [0]

    def has_been_cut_often():
        nonlocal cuts
        size = path.stat().st_size
        supervisor.watch()
        cuts += path.stat().st_size < size
        sizes.append(path.stat().st_size)
        return cuts >= 3

    wait_for(has_been_cut_often, 100, "cuts of the log")
    assert len(older(path)) >= MAX_BYTES and supervisor.children["role"].status is None
    assert sorted(file.name for file in tmp_path.iterdir()) == ["role.log", "role.log.1"]


def test_a_child_that_ends_is_cut_short_too(supervise, tmp_path):
    supervisor, path = supervise(f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{C_LIBRARY}"), tmp_path
    wait_for(lambda: (path / "role.log").stat().st_size > MAX_BYTES, 100, "a long log")
    supervisor.stop(["role"], 600.0, 1.0)
    assert (path / "role.log.1").exists() and supervisor.children["role"].status == -signal.SIGKILL


def test_an_echo_has_a_bound(supervise, tmp_path):
    path = tmp_path / "role.log"
    script = "import sys\nfor i in range(2000): print('x' * 99, file=sys.stderr)\nsys.exit(1)"
    supervisor = supervise(script, echoes=True)
    with pytest.raises(PeerError, match=r"status 1: x+, twice"):
        wait_for(supervisor.watch, 100, "the end of the child")
    supervisor.bound_logs()
    assert path.stat().st_size <= MAX_BYTES <= len(older(path)) <= 3 * MAX_BYTES


@pytest.mark.parametrize("after", [0, 10, 3 * MAX_BYTES])
def test_the_last_words_outlive_cuts(log, after):
    words, begin = log
    child = begin()
    child.write(b"x" * 99 * 1000 + b"\n12:00:00 role: no such game\n" + b".\n" * after)
    for _ in range(2):
        words.bound()
    assert words.last() == ("no such game" if after < MAX_BYTES else "")
    child.write(b"more\n")
    assert words.last() == "more"


def test_words_of_an_earlier_life_are_not_taken_for_those_of_the_last(log):
    words, begin = log
    begin().write(b"x" * 3 * MAX_BYTES + b"\nan earlier error\n")
    child = begin()
    words.bound()
    assert words.last() == ""
    child.write(b"y" * TAIL_BYTES)
    words.bound()
    child.write(b"x" * 2 * MAX_BYTES)
    words.bound()
    begin()
    assert words.last() == ""


def test_a_log_goes_on_in_the_older_file_and_in_the_new_one_without_a_gap(log, tmp_path):
    words, begin = log
    child, path = begin(), tmp_path / "role.log"
    for i in range(10_000):
        child.write(b"%09d\n" % i)
        words.bound()
    numbers = list(map(int, (older(path) + path.read_bytes()).split()))
    assert numbers == list(range(numbers[0], 10_000)) and len(numbers) >= MAX_BYTES // 10


def test_restarts_are_news_before_and_after_a_cut(log):
    words, begin = log
    child = begin()
    line = "actor worker 1 ended with status 1: {}; restart 1 in 0.5 s"
    for name in ("one", "two", "three"):
        child.write(f"12:00:00 actor: {line.format(name)}\n".encode())
        assert words.news() == [line.format(name)]
        child.write(b"x" * MAX_BYTES + b"\n")
        words.news()
        words.bound()


@pytest.mark.parametrize(
    "line",
    [
        'no pictures of this environment: pygame is not installed, run `python -m pip install "gymnasium"`',
        "Walk-v0: no pictures; its class needs metadata",
        "no video: /full/game.webm cannot be written; see its disk",
    ],
)
def test_why_a_game_is_not_filmed_is_news(log, line):
    words, begin = log
    child = begin()
    child.write(f"12:00:00 evaluator: {line}\n12:00:01 evaluator: update 3: no videos here\n".encode())
    assert words.news() == [line] and words.news() == []


def test_a_log_that_somebody_else_has_cut_has_news_again(log, tmp_path):
    words, begin = log
    child = begin()
    child.write(b"x" * 1000 + b"\n")
    assert words.news() == []
    os.truncate(tmp_path / "role.log", 0)
    assert words.news() == []
    child.write(b"12:00:00 actor: one ended with status 1; restart 1 in 0.5 s\n")
    assert words.news() == ["one ended with status 1; restart 1 in 0.5 s"]
    assert words.last().startswith("one ended")


def test_a_disk_that_takes_no_older_file_is_no_reason_for_a_long_log(tmp_path, monkeypatch):
    path = tmp_path / "role.log"
    path.write_bytes(b"x" * 2 * MAX_BYTES + b"\nlast\n")
    (tmp_path / "role.log.1").mkdir()
    held, newest = cut(path, MAX_BYTES)
    assert held == 2 * MAX_BYTES + 6 and newest.endswith(b"last\n") and path.stat().st_size == 0


def test_a_log_that_is_gone_is_no_error(log, tmp_path):
    words, begin = log
    begin().write(b"x" * 2 * MAX_BYTES)
    (tmp_path / "role.log").unlink()
    words.bound()
    assert words.last() == "" and words.news() == []
