"""The supervisor with real child processes: short Python scripts."""

import os
import signal
import time

import psutil
import pytest

from apexrl.errors import ConfigError, PeerError, PeerTimeout
from apexrl.lifecycle import PATIENCE_STATUS, TOLD_STATUS
from apexrl.running import supervise as supervising
from apexrl.running.supervise import Supervisor, describe_status
from tests.few_files import no_files_left
from tests.system.processes import is_gone, wait_for

SLEEP = "import time; time.sleep(600)"
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); "
SLEEPER = "import subprocess; print(subprocess.Popen(['sleep', '600'], start_new_session={}).pid, flush=True)"
BUSY = "end = time.monotonic() + 600\nwhile time.monotonic() < end: pass"


@pytest.fixture
def supervise(tmp_path):
    """Makes supervisors whose children log to the test's directory, and ends all children."""
    made = []

    def make(max_restarts=10, **scripts):
        supervisor = Supervisor(max_restarts)
        made.append(supervisor)
        for name, script in scripts.items():
            supervisor.start(name, ["-c", script], log=tmp_path / f"{name}.log")
        return supervisor

    yield make
    for supervisor in made:
        supervisor.stop(list(supervisor.children), 0.0)


def watched(supervisor, condition=lambda: False):
    """Watches until the condition holds, or an error ends the watch."""

    def look():
        supervisor.watch()
        return condition()

    wait_for(look, 100, "the end of the watch")


def said(tmp_path, name):
    log = tmp_path / f"{name}.log"
    return log.read_text() if log.exists() else ""


def test_what_dies_is_started_again(supervise, tmp_path):
    path = tmp_path / "died"
    script = (
        f"import os, time\nif not os.path.exists({str(path)!r}):\n open({str(path)!r}, 'w'); raise ValueError('x')\n"
    )
    supervisor = supervise(role=script + SLEEP)
    watched(supervisor, lambda: supervisor.num_restarts == 1 and supervisor.children["role"].process is not None)


def test_a_child_that_somebody_else_has_told_to_end_has_not_finished(supervise, tmp_path, caplog):
    supervisor = supervise()
    ended = f"print('updates go on', flush=True); import sys; sys.exit({TOLD_STATUS})"
    supervisor.start("learner", ["-c", ended], may_finish=True, log=tmp_path / "learner.log")
    watched(supervisor, lambda: supervisor.num_restarts >= 2)
    assert "learner ended with a signal that told it to end; restart 2" in caplog.text


def test_only_the_words_of_its_last_life_are_said(supervise, tmp_path, caplog):
    (tmp_path / "role.log").write_text("12:00:00 role: an earlier error\n")
    supervisor = supervise(role="import os; os._exit(3)")
    watched(supervisor, lambda: supervisor.num_restarts)
    assert "role ended with status 3; restart 1" in caplog.text and "earlier" not in caplog.text


def test_a_permanent_error_is_not_tried_again(supervise):
    supervisor = supervise(role="import sys; print('12:00:00 role: no such game', file=sys.stderr); sys.exit(2)")
    with pytest.raises(ConfigError, match=r"^role ended with status 2: no such game"):
        watched(supervisor)
    assert supervisor.num_restarts == 0


@pytest.mark.parametrize("peers_come_back", [False, True])
def test_lost_patience_ends_a_child_whose_peers_do_not_come_back(supervise, monkeypatch, peers_come_back):
    monkeypatch.setattr(supervising, "SHORT_LIFE_SECONDS", 0.0)
    monkeypatch.setattr(supervising, "LONG_LIFE_SECONDS", 0.0)  # as with a patience of ten minutes
    script = f"import sys; print('12:00:00 role: nobody there', file=sys.stderr); sys.exit({PATIENCE_STATUS})"
    supervisor = supervise(max_restarts=1)
    supervisor.start("role", ["-c", script], peers_come_back=peers_come_back)
    if peers_come_back:
        watched(supervisor, lambda: supervisor.num_restarts == 3)
        return
    with pytest.raises(PeerTimeout, match=r"^role ended with status 69: nobody there$"):
        watched(supervisor)
    assert supervisor.num_restarts == 0


def test_the_same_error_twice_at_once_ends_the_run(supervise):
    supervisor = supervise(role="import os; raise OSError(f'process {os.getpid()} of no use')")
    with pytest.raises(PeerError, match=r"role ended with status 1: OSError: process \d+ of no use, twice"):
        watched(supervisor)
    assert supervisor.num_restarts == 1


@pytest.mark.parametrize(
    "script",
    [
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import sys; print('the disk is full'); sys.exit(75)",  # it may be gone at the next start
        "import os; os._exit(1)",  # without a word
        "import random; raise ValueError(''.join(random.choices('abcdefgh', k=40)))",  # another one each time
    ],
)
def test_other_deaths_are_tried_as_often_as_they_may(supervise, script):
    supervisor = supervise(max_restarts=2, role=script)
    with pytest.raises(PeerError, match="after 2 restarts"):
        watched(supervisor)


def test_a_child_that_cannot_be_started_for_want_of_files_is_started_later(supervise, monkeypatch, caplog):
    monkeypatch.setattr(supervising, "LONGEST_PAUSE_SECONDS", 0.1)
    supervisor = supervise(role="import sys; sys.exit('once')")
    role = supervisor.children["role"]
    watched(supervisor, lambda: role.process is None)
    with no_files_left():
        watched(supervisor, lambda: "role cannot be started (Too many open files)" in caplog.text)
        assert role.process is None
    watched(supervisor, lambda: role.process is not None)


def test_a_child_that_is_given_up_is_not_said_to_come_back(supervise, monkeypatch, caplog):
    monkeypatch.setattr(supervising, "LONGEST_PAUSE_SECONDS", 0.01)
    supervisor = supervise(role="import sys; sys.exit('once')")
    role = supervisor.children["role"]
    role.is_needed = False
    watched(supervisor, lambda: role.process is None)
    with no_files_left():
        watched(supervisor, lambda: role.is_given_up)
    assert "the run goes on without it" in caplog.records[-1].getMessage()


def test_the_end_of_a_child_needs_no_file(supervise, tmp_path):
    supervisor = supervise(role=DEAF + SLEEP)
    wait_for(lambda: said(tmp_path, "role"), 100, "a child that ignores SIGTERM")
    with no_files_left():
        supervisor.stop(["role"], 0.1)
    assert supervisor.children["role"].status is not None


def test_what_a_child_says_of_its_own_children_is_said_once(supervise, tmp_path, caplog):
    line = "actor worker 1 ended with status 1: ValueError: the [robot] arm is stuck; restart 1 in 0.5 s"
    (tmp_path / "actors.log").write_text(f"09:00:00 actor: {line}, of an earlier start\n09:00:00 actor: {line}\n")
    script = f"import sys; print('12:00:00 actor: {line}', 'frames', sep=chr(10), file=sys.stderr); " + SLEEP
    supervisor = supervise(actors=script)
    watched(supervisor, lambda: caplog.records)
    supervisor.watch()
    assert [record.getMessage() for record in caplog.records] == [f"actors: {line}"]


def test_what_is_not_needed_is_given_up(supervise, tmp_path):
    supervisor = supervise(role=SLEEP)
    supervisor.start("extra", ["-c", "raise SystemExit(2)"], is_needed=False, log=tmp_path / "extra.log")
    watched(supervisor, lambda: supervisor.children["extra"].is_given_up)
    supervisor.watch()
    assert supervisor.children["extra"].process is None


def test_what_may_finish_is_told(supervise, tmp_path):
    supervisor = supervise()
    supervisor.start("one", ["-c", "pass"], may_finish=True, log=tmp_path / "one.log")
    assert wait_for(supervisor.watch, 100, "the end of a child") == ["one"]


def test_words_without_a_log_are_passed_on_and_remembered(supervise, capfd):
    supervisor = supervise()
    supervisor.start("worker", ["-c", "import sys; sys.exit('no \\x1b[31msuch\\x1b[0m [game]')"])
    with pytest.raises(PeerError, match=r"worker ended with status 1: no .*such.* \[game\], twice") as ended:
        watched(supervisor)
    assert "\x1b" not in str(ended.value)
    assert capfd.readouterr().err.count("[game]") == 2


def test_a_child_that_works_on_gets_its_time(supervise, tmp_path):
    work = (
        "import signal, sys, time\n"
        "def end(*_):\n"
        " end = time.monotonic() + 12\n while time.monotonic() < end: pass\n"
        f" open({str(tmp_path / 'done')!r}, 'w')\n sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\nprint('ready', flush=True)\n"
    )
    supervisor = supervise(role=work + SLEEP)
    wait_for(lambda: "ready" in said(tmp_path, "role"), 100, "the child")
    supervisor.stop(["role"], 5.0, 600.0)
    assert (tmp_path / "done").exists() and supervisor.children["role"].status == 0


def test_a_child_that_does_nothing_is_killed(supervise, tmp_path):
    supervisor = supervise(role=DEAF + SLEEP)
    wait_for(lambda: "deaf" in said(tmp_path, "role"), 100, "the child")
    supervisor.stop(["role"], 1.0, 600.0)
    assert supervisor.children["role"].status == -signal.SIGKILL


def test_a_child_that_never_ends_is_killed_with_all_that_it_started(supervise, tmp_path):
    start = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}], start_new_session=True); "
    supervisor = supervise(role=DEAF + start + "print('started', flush=True)\n" + BUSY)
    wait_for(lambda: "started" in said(tmp_path, "role"), 100, "the child")
    family = psutil.Process(supervisor.children["role"].process.pid).children(recursive=True)
    assert len(family) == 1
    supervisor.stop(["role"], 600.0, 7.0)
    assert supervisor.children["role"].status == -signal.SIGKILL
    wait_for(lambda: not psutil.pid_exists(family[0].pid) or family[0].status() == "zombie", 100, "the end of all")


@pytest.mark.parametrize("own_session", [False, True])
@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 11)", "os._exit(3)", "os.kill(os.getpid(), 9)"])
def test_what_a_dead_child_started_is_gone_before_its_restart(supervise, tmp_path, end, own_session):
    supervisor = supervise(role=f"import os; {SLEEPER.format(own_session)}; {end}")
    watched(supervisor, lambda: supervisor.num_restarts == 1)
    wait_for(lambda: is_gone(int(said(tmp_path, "role").split()[0])), 100, "the end of the sleeper")


def test_what_a_child_that_has_finished_started_is_gone_at_the_end(supervise, tmp_path):
    supervisor = supervise()
    supervisor.start("one", ["-c", SLEEPER.format(True)], may_finish=True, log=tmp_path / "one.log")
    wait_for(supervisor.watch, 100, "the end of a child")
    supervisor.stop(["one"], 600.0)
    wait_for(lambda: is_gone(int(said(tmp_path, "one"))), 100, "the end of the sleeper")


def test_a_second_signal_kills_at_once(supervise, tmp_path):
    supervisor = supervise(role=DEAF + BUSY)
    wait_for(lambda: "deaf" in said(tmp_path, "role"), 100, "the child")
    supervisor.stop(["role"], 600.0, 600.0, hurried=lambda: True)
    assert supervisor.children["role"].status == -signal.SIGKILL


def test_children_are_not_reached_by_the_signals_of_a_terminal(supervise):
    supervisor = supervise(role=SLEEP)
    assert os.getsid(supervisor.children["role"].process.pid) != os.getsid(0)


def test_a_child_that_waits_for_its_restart_needs_no_stop(supervise):
    supervisor = supervise(role="import os; os._exit(1)")
    watched(supervisor, lambda: supervisor.num_restarts)
    supervisor.stop(["role", "nobody"], 600.0)
    time.sleep(0.0)
    assert supervisor.children["role"].process is None


@pytest.mark.parametrize(("status", "text"), [(1, "status 1"), (-9, "signal SIGKILL"), (-40, "signal 40")])
def test_statuses_in_words(status, text):
    assert describe_status(status) == text


def test_a_child_that_loses_a_signal_to_foreign_code_is_asked_again(tmp_path, caplog):
    """Like an environment that takes the signals in each reset, until the role has them back."""
    sign, again = tmp_path / "sign", tmp_path / "again"
    script = (
        f"import pathlib, signal, sys, time\nsignal.signal(15, signal.SIG_IGN)\npathlib.Path({str(sign)!r}).touch()\n"
        f"while not pathlib.Path({str(again)!r}).exists(): time.sleep(0.01)\n"
        "signal.signal(15, lambda *_: sys.exit(0))\nwhile True: sum(range(1000))\n"
    )
    supervisor = Supervisor(0)
    supervisor.start("actors", ["-c", script], log=tmp_path / "log.txt")
    wait_for(sign.exists, 60, "the start")
    supervisor.stop(["actors"], 600.0, 600.0, hurried=again.touch, repeats=["actors"])
    assert "killed" not in caplog.text
