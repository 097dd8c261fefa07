"""The examples, by the commands of their docstrings, pasted as a person does who has called run.sh once."""

import os
import subprocess
import sys

import pytest

from tests.examples import EXAMPLES, TRAIN, commands_of
from tests.system.processes import ROOT, read_json

SHORT = "--total-updates 3 --min-size-to-sample 200 --no-evaluator --no-tensorboard --reproducible"
NAMES = sorted({path.stem for path in EXAMPLES.glob("*.py")} - {"own_environment"})  # README has its command


@pytest.mark.parametrize("name", NAMES)
def test_an_example_tells_commands_that_a_checkout_has(name):
    assert commands_of(name), "none of the two forms"


@pytest.mark.parametrize("name", [name for name in NAMES if TRAIN in "".join(commands_of(name))])
def test_the_command_of_an_example_trains(tmp_path, name):
    """Other tests run those whose command is of Python."""
    (command,) = commands_of(name)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"APEXRL_VENV": sys.prefix, "OMP_NUM_THREADS": "1"}
    pasted = f"{command} {SHORT} --run-dir {tmp_path}/run"
    done = subprocess.run(
        ["bash", "-c", pasted], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert read_json(tmp_path / "run" / "summary.json")["updates"] == 3
    assert f"bash ../run.sh compare {tmp_path}/run" in done.stdout, "the next command is of the same program"
