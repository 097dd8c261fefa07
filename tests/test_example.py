"""The examples over the replay service, by their docstrings, with the packages of the base installation alone."""

import contextlib
import os
import re
import subprocess
import sys

import numpy as np
import pytest

from tests.examples import PYTHON, commands_of, python_words
from tests.system.processes import ROOT, Process

TOLERANCE = 0.02
GAMMA, END = 0.9, 6


def in_base(*words, cwd=ROOT):
    """Runs a program of the repository to its end; returns what it prints."""
    command = [sys.executable, "-m", "tests.base_only", *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def serve(tmp_path, free_ports):
    """Starts a server by a command with further flags, and returns its two ports."""
    with contextlib.ExitStack() as started:

        def begin(command, *flags):
            ports = free_ports(2)
            words = [*python_words(command, ports), "--actor-port", ports[0], "--batch-port", ports[1], *flags]
            assert words[0] == "replay.py"
            started.enter_context(Process(["-m", "tests.base_only", *words], tmp_path / "replay.txt"))
            return ports

        yield begin


def true_values():
    """Action values of the corridor by value iteration: 0 at both ends, 1 for the step into the right one."""
    values = np.zeros((END + 1, 2))
    for _ in range(100):
        for place in range(1, END):
            values[place] = [GAMMA * values[place - 1].max(), float(place + 1 == END) + GAMMA * values[place + 1].max()]
    return values


@pytest.mark.timeout(600)
def test_the_example_learns_the_values_of_its_world(serve):
    server, program = commands_of("own_learner")
    printed = in_base(*python_words(program, serve(server)))
    learned = np.array([[float(text) for text in line.split()] for line in printed.splitlines()])
    assert learned[:, 0].tolist() == list(range(END + 1))
    assert np.abs(learned[:, 1:] - true_values()).max() <= TOLERANCE, printed


@pytest.mark.timeout(600)
def test_hard_examples_are_drawn_more_often_and_learned_better(serve, tmp_path):
    server, program = commands_of("hard_examples")
    ports = serve(server, "--journal-dir", tmp_path / "journal")
    plain, hard = in_base(*python_words(program, ports)).splitlines()
    form = r"(\w+): 4800 tickets seen, (0\.\d+) rare, right (0\.\d+) of rare, (0\.\d+) of others"
    numbers = [[float(text) for text in re.fullmatch(form, line).groups()[1:]] for line in (plain, hard)]
    (rare, of_rare, _), (more_rare, more_of_rare, of_others) = numbers
    assert rare < 0.03 < more_rare and of_rare + 0.1 < more_of_rare and of_others > 0.95, (plain, hard)
    assert "4800 transitions" in in_base("apexrl/__main__.py", "inspect", "summary", tmp_path / "journal")
    in_base("apexrl/__main__.py", "keys", tmp_path / "keys")


def test_the_asynchronous_learner_stays_near_its_actors_and_learns():
    (program,) = commands_of("async_learner")
    first, *lags = in_base(*python_words(program)).splitlines()
    reward, best = re.fullmatch(r"reward 0\.[34]\d+ at first, (0\.\d+) at last; (0\.\d+) is the best", first).groups()
    assert float(reward) > 0.9 * float(best)
    counts = dict(map(int, re.fullmatch(r"lag (\d+): (\d+) unrolls", line).groups()) for line in lags)
    assert sum(counts.values()) == 300 * 8, lags
    assert sum(count for lag, count in counts.items() if lag <= 10) > 0.95 * 300 * 8, "but for an actor that is stopped"


def test_the_client_of_the_page_runs_as_it_stands(serve, tmp_path):
    page = (ROOT / "docs/service.md").read_text()
    flags = re.search(r"\napexrl replay (--tables .*) --journal-dir service\n", page)[1]
    actor_port, batch_port = serve(f"{PYTHON} replay.py {flags}")
    program = re.search(r"```python\n(.*?)```", page, re.DOTALL)[1]
    assert len(program.splitlines()) <= 32
    for port, free in (("51001", actor_port), ("51002", batch_port)):
        assert program.count(port) == 1
        program = program.replace(port, str(free))
    (tmp_path / "client.py").write_text(program)
    assert in_base(tmp_path / "client.py") == "stored: True\n(32, 64) <U20\n"


def test_several_logs_in_one_server_as_the_page_has_it(tmp_path):
    page = (ROOT / "docs/service.md").read_text().partition("### Several logs in one server\n")[2]
    (tmp_path / "kinds.py").write_text(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1])
    assert in_base(tmp_path / "kinds.py", cwd=tmp_path) == "['an answer']\n"
    assert sorted(path.name for path in (tmp_path / "service-logs").iterdir()) == ["pictures", "requests"]
    assert "1 transitions" in in_base("apexrl/__main__.py", "inspect", "summary", tmp_path / "service-logs/requests")
