"""Copies of a process that has imported torch behave as new interpreters do."""

import signal
import subprocess
import sys

import psutil
import pytest

from tests.system.processes import ROOT, Process, is_gone, wait_for, words_of

BOTH = pytest.mark.parametrize("is_copy", [True, False])
SUPERVISOR = """
import logging, sys, time
from apexrl.running.supervise import Supervisor
logging.basicConfig()
supervisor = Supervisor(0)
supervisor.start("child", ["-c", "import os, sys, time; print(os.getppid(), flush=True); time.sleep(600)"])
time.sleep(600)
"""


@BOTH
@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('no, thanks')", 1, "no, thanks"),
        ("raise ValueError('it is so')", 1, "ValueError: it is so"),
        ("print('unflushed')", 0, "unflushed"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT, "KeyboardInterrupt"),
        ("import logging; logging.basicConfig(level='INFO'); logging.info('a line')", 0, "INFO:root:a line"),
        ("import threading, time; threading.Thread(target=lambda: (time.sleep(.3), print('late'))).start()", 0, "late"),
        ("from concurrent.futures import ThreadPoolExecutor as E; p = E(1); print(p.submit(int).result())", 0, "0"),
        ("import sys, os; print(sys.argv, os.environ['X'], __name__)", 0, "['-c', 'a b'] y __main__"),
    ],
)
def test_a_process_ends_with_its_status_and_its_words(tmp_path, is_copy, code, status, said):
    with Process(["-c", code, "a b"], tmp_path / "log.txt", {"X": "y"}, is_copy=is_copy) as process:
        assert process.popen.wait(100) == status == process.popen.poll()
        assert said in process.text()


@BOTH
def test_modules_and_scripts_find_what_lies_beside_them(tmp_path, is_copy):
    (tmp_path / "script.py").write_text("import beside, sys; sys.exit(beside.STATUS)")
    (tmp_path / "beside.py").write_text("STATUS = 4")
    with Process([tmp_path / "script.py"], tmp_path / "log.txt", is_copy=is_copy) as process:
        assert process.popen.wait(100) == 4, process.text()
    with Process(["-m", "apexrl", "no-such-command"], tmp_path / "log.txt", is_copy=is_copy) as process:
        assert process.popen.wait(100) == 2 and "there is no such command" in process.text()


@BOTH
def test_a_supervisors_children_are_its_own_and_hold_nothing_of_it(tmp_path, is_copy):
    with Process(["-c", SUPERVISOR], tmp_path / "log.txt", is_copy=is_copy) as process:
        wait_for(lambda: process.text().strip(), 60, "the child")
        assert int(process.text()) == process.popen.pid
        (child,) = process.descendants()
        assert words_of(child)[-2:][0] == "-c"
        assert {file.path for file in child.open_files()} <= {str(tmp_path / "log.txt")}
        process.signal(signal.SIGTERM)
        assert process.popen.wait(100) == -signal.SIGTERM
        child.kill()
        psutil.wait_procs([child], 60)


def test_a_copy_knows_the_interpreter(tmp_path):
    with Process(["-c", "import sys; print(sys.executable)"], tmp_path / "log.txt", is_copy=True) as process:
        assert process.popen.wait(100) == 0 and process.text().strip() == sys.executable


@pytest.mark.parametrize("words", [["-c", "import time; print(1, flush=True); time.sleep(600)"], ["replay.py"]],
                         ids=["copy", "replay"])  # fmt: skip
def test_what_a_test_run_has_started_ends_with_it_when_it_is_killed(tmp_path, free_ports, words):
    if words == ["replay.py"]:
        actor_port, batch_port = free_ports(2)
        words = ["replay.py", "--actor-port", actor_port, "--batch-port", batch_port]
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom tests.system.processes import Process\n"
        f"process = Process({words!r}, Path({str(tmp_path / 'log.txt')!r}), is_copy={words[0] == '-c'})\n"
        "print(process.popen.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True) as run:
        try:
            started = psutil.Process(int(run.stdout.readline()))
            wait_for((tmp_path / "log.txt").read_text, 60, "its first words")
        finally:
            run.kill()
    wait_for(lambda: is_gone(started.pid), 60, "its end")
