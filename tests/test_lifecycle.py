"""The end of a role: its exit status and its last words, as a process of its own."""

import contextlib
import os
import resource
import signal
import subprocess
import sys

import pytest

from apexrl.children import PARENT_VARIABLE
from apexrl.errors import ConfigError, PeerError, PeerTimeout
from apexrl.lifecycle import TOLD_STATUS, exit_status, measured, resident_bytes, switch_threads_often
from tests.few_files import no_files_left
from tests.system.processes import ROOT, is_gone, wait_for

ROLE = (
    "from apexrl.errors import *\nfrom apexrl.lifecycle import run_role\ndef main(stop):\n {}\n"
    "import atexit\natexit.register(print, 'finalized')\nrun_role('role', main, finalizes={})\n"
)


def run_role(body, finalizes=True):
    result = subprocess.run(
        [sys.executable, "-c", ROLE.format(body, finalizes)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ("finalized" in result.stdout) == finalizes
    return result.returncode, result.stderr


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("pass", 0),
        ("raise ConfigError('wrong flags')", 2),
        ("stop.fail(ConfigError('wrong in a thread'))", 2),
        ("raise PeerError('nobody there')", 1),
        ("raise ValueError('a fault')", 1),
        ("raise OSError(24, 'Too many open files')", 75),
    ],
)
@pytest.mark.parametrize("finalizes", [True, False])
def test_the_exit_status_tells_a_permanent_error(body, status, finalizes):
    ended, text = run_role(body, finalizes)
    assert ended == status and ("Traceback" in text) == (body.startswith(("raise ValueError", "raise OSError")))
    assert not status or body.split("'")[1] in text.splitlines()[-1]


SILENT = """
 import logging.config, os, threading, time
 logging.config.dictConfig({"version": 1, "root": {"level": "CRITICAL", "handlers": []}})
 os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
 threading.Thread(target=time.sleep, args=(3600,)).start()
 raise """


@pytest.mark.parametrize(("error", "status"), [("PeerError('nobody there')", 1), ("ConfigError('wrong flags')", 2)])
def test_a_role_whose_log_and_end_others_have_taken_says_why_and_ends(error, status):
    done = subprocess.run(
        [sys.executable, "-c", ROLE.format(SILENT + error, True)], cwd=ROOT, capture_output=True, text=True,
        timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == status and error.split("'")[1] in done.stderr.splitlines()[-1]


def check_signalled(script, number, lines):
    """Runs a script that ends in order after a signal at each of these lines, which it prints."""
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    for line in lines:
        assert process.stdout.readline() == line
        process.send_signal(number)
    assert process.wait(600) == 0
    process.stdout.close()


def test_a_program_that_ctrl_c_ends_says_so_and_an_output_without_utf_8_gets_escapes():
    body = r"""
import signal, sys
from apexrl.lifecycle import run_program
def main():
    print("h\u00f6hle \u2192")
    signal.raise_signal(signal.SIGINT)
sys.exit(run_program(main))
"""
    variables = os.environ | {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PYTHONIOENCODING": ""}
    command = [sys.executable, "-c", body]
    done = subprocess.run(command, capture_output=True, cwd=ROOT, env=variables, timeout=600, check=False)
    assert (done.returncode, done.stdout) == (130, b"h\\xf6hle \\u2192\n")
    assert done.stderr == b"stopped before its end\n"


def test_signals_are_heeded_again_after_others_have_taken_them():
    script = (
        "import signal\nfrom apexrl.lifecycle import Stop\nstop = Stop()\nstop.heed_signals()\nstop.on_signals()\n"
        "signal.set_wakeup_fd(-1)\nfor number in (2, 15): signal.signal(number, signal.SIG_IGN)\n"
        "stop.heed_signals()\nprint('ready', flush=True)\nassert stop.wait(600)\n"
    )
    check_signalled(script, signal.SIGTERM, ["ready\n"])


def caused(error, cause):
    try:
        raise error from cause
    except type(error):
        return error


def test_what_the_operating_system_refuses_may_be_had_later():
    assert exit_status(caused(ConfigError("full"), OSError(28, "No space left on device"))) == 75
    assert exit_status(caused(ConfigError("no such file"), FileNotFoundError(2, "No such file"))) == 2
    assert exit_status(caused(ConfigError("no such game"), ImportError("no module"))) == 2
    assert exit_status(PeerError("gone")) == 1
    assert exit_status(PeerTimeout("for ten minutes")) == 69


def test_a_signal_that_foreign_code_handles_is_no_end():
    script = (
        "from apexrl.lifecycle import Stop\nimport signal, time\nstop = Stop()\nstop.on_signals()\nheard = []\n"
        "signal.signal(signal.SIGALRM, lambda *_: heard.append(1))\nsignal.alarm(1)\n"
        "while not heard: time.sleep(0.01)\n"
        "assert not stop.wait(0.5) and not stop.num_signals\nprint('ready', flush=True)\nassert stop.wait(100)\n"
    )
    check_signalled(script, signal.SIGTERM, ["ready\n"])


@pytest.mark.parametrize("is_ignored", [False, True])
def test_a_role_whose_terminal_is_closed_ends_in_order_unless_nohup_keeps_it(is_ignored):
    before = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n" if is_ignored else ""
    script = before + (
        "from apexrl.lifecycle import run_role\ndef main(stop):\n print('ready', flush=True)\n"
        " stop.wait(100)\n print('ended', flush=True)\nrun_role('learner', main)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGHUP)
    if is_ignored:
        process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "ended\n" and process.wait(600) == 0
    process.stdout.close()


def test_every_signal_is_counted():
    script = (
        "from apexrl.lifecycle import Stop\nimport time\nstop = Stop()\nstop.on_signals()\nprint('ready', flush=True)\n"
        "assert stop.wait(100)\nprint(stop.num_signals, flush=True)\n"
        "while stop.num_signals < 2: time.sleep(0.01)\n"
    )
    check_signalled(script, signal.SIGINT, ["ready\n", "1\n"])


@pytest.mark.parametrize(("is_kept", "status"), [(False, 0), (True, TOLD_STATUS)])
def test_a_role_that_is_told_to_end_by_somebody_else_has_not_finished_for_its_supervisor(is_kept, status):
    role = "def main(stop):\n print('ready', flush=True)\n stop.wait()\nfrom apexrl.lifecycle import run_role\n"
    environment = dict(os.environ) | ({PARENT_VARIABLE: str(os.getpid())} if is_kept else {})
    process = subprocess.Popen(
        [sys.executable, "-c", role + "run_role('role', main)"], cwd=ROOT, env=environment, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout.readline() == b"ready\n"
        process.terminate()
        assert process.wait(100) == status
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("last", ["time.sleep(600)", "pass"])
def test_a_role_is_gone_after_its_supervisor_with_all_that_it_started(last):
    role = (
        "import subprocess, time, apexrl.lifecycle as l; l.ORPHAN_SECONDS = 0.5\n"
        "def main(stop):\n"
        " print(subprocess.Popen(['sleep', '600'], start_new_session=True, stdout=2).pid, flush=True)\n"
        f" stop.wait(); {last}\n"
        "l.run_role('role', main)"
    )
    supervisor = (
        "import os, subprocess, sys, time\n"
        "os.environ['APEXRL_PARENT'] = str(os.getpid())\n"
        f"print(subprocess.Popen([sys.executable, '-c', {role!r}]).pid, flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", supervisor], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    pids = [int(process.stdout.readline()) for _ in range(2)]
    try:
        if last != "pass":
            os.kill(pids[0], signal.SIGTERM)
        process.kill()
        wait_for(lambda: all(map(is_gone, pids)), 60, "the end of the role, and of what it started")
    finally:
        process.kill()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


def test_threads_take_turns_ten_times_as_often():
    usual = sys.getswitchinterval()
    try:
        switch_threads_often()
        assert sys.getswitchinterval() == pytest.approx(0.0005)
    finally:
        sys.setswitchinterval(usual)


@pytest.mark.parametrize(("soft", "hard", "allowed"), [(100, 1000, 1000), (100, 100, 100), (100, 100_000, 65_536)])
def test_a_role_may_open_as_many_files_as_the_hard_limit_allows(soft, hard, allowed):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if before != resource.RLIM_INFINITY and before < hard:
        pytest.skip(f"the hard limit is {before}: more files are not permitted here")
    body = "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    command = [sys.executable, "-c", ROLE.format(body, True)]
    limited = ["bash", "-c", f'ulimit -S -n {soft}; ulimit -H -n {hard}; exec "$@"', "limited", *command]
    ended = subprocess.run(limited, cwd=ROOT, capture_output=True, text=True, timeout=100, check=True)
    assert ended.stdout.split() == [str(allowed), "finalized"]


def test_a_measurement_that_fails_costs_its_number_alone():
    assert measured("memory", resident_bytes)["memory"] > 0
    with no_files_left():
        assert measured("memory", resident_bytes) == {}
