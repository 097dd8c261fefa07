"""Several learners make the updates of one, through real processes and gloo."""

import os
import subprocess
import sys

import pytest
from safetensors.torch import load_file

from tests.learning.team_rank import CASES
from tests.system.processes import ROOT

UPDATES = 100
SIZES = (1, 2, 4)


def start(size, port, *arguments):
    """Starts the processes of a team; their output is kept."""
    common = {**os.environ, "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, *map(str, arguments)]
    return [
        subprocess.Popen(command, cwd=ROOT, env={**common, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(size)
    ]


@pytest.fixture(scope="module")
def learned(tmp_path_factory, free_ports):
    """The states by size of the team and by case."""
    found = {}
    for size in SIZES:
        directory = tmp_path_factory.mktemp(f"team-{size}")
        team = start(size, free_ports(1)[0], "-m", "tests.learning.team_rank", UPDATES, directory)
        for process in team:
            _, said = process.communicate(timeout=600)
            assert process.returncode == 0, said
        found[size] = {name: load_file(directory / f"{name}.safetensors") for name in CASES}
    return found


@pytest.mark.timeout(900)
@pytest.mark.parametrize("size", SIZES[1:])
@pytest.mark.parametrize("case", CASES)
def test_a_team_with_parts_of_each_batch_makes_the_updates_of_one_learner(learned, case, size):
    """The rows, their importance weights, and the clip are those of the whole batch; only rounding differs."""
    alone, together = learned[1][case], learned[size][case]
    assert alone.keys() == together.keys()
    for name, expected in alone.items():
        scale = expected.abs().max().item()
        assert (together[name] - expected).abs().max().item() <= 2e-4 * scale + 1e-7, name
