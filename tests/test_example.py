import os
import subprocess
import sys

import numpy as np
import pytest

from tests.system.processes import ROOT, Process

TOLERANCE = 0.02
GAMMA, END = 0.9, 6


def true_values():
    """Action values of the corridor by value iteration: 0 at both ends, 1 for the step into the right one."""
    values = np.zeros((END + 1, 2))
    for _ in range(100):
        for place in range(1, END):
            values[place] = [GAMMA * values[place - 1].max(), float(place + 1 == END) + GAMMA * values[place + 1].max()]
    return values


@pytest.mark.timeout(600)
def test_the_example_learns_the_values_of_its_world(tmp_path, free_ports):
    ports = free_ports(2)
    flags = ("--min-size-to-sample", 500, "--samples-per-insert", 0, "--actor-port", ports[0], "--batch-port", ports[1])
    with Process(["replay.py", *flags], tmp_path / "replay.txt") as replay:
        command = [sys.executable, "examples/own_learner.py", *map(str, ports)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400, check=False
        )
        assert done.returncode == 0, done.stderr + replay.text()
    learned = np.array([[float(text) for text in line.split()] for line in done.stdout.splitlines()])
    assert learned[:, 0].tolist() == list(range(END + 1))
    assert np.abs(learned[:, 1:] - true_values()).max() <= TOLERANCE, done.stdout
