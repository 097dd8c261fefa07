"""Programs whose output nobody reads any more: they end without a word, by a shell's convention."""

import os
import subprocess
import sys

import pytest

from apexrl.lifecycle import UNREAD_STATUS
from tests.system.processes import ROOT

PROGRAMS = [
    ("-m", "apexrl", "help"),
    ("-m", "apexrl", "nonsense"),
    ("-m", "apexrl", "runs"),
    ("-m", "apexrl", "replay", "--help"),
    ("-m", "apexrl", "inspect", "--help"),
    ("-m", "apexrl", "runs", "--help"),
    ("-m", "apexrl", "keys", "keys"),
    ("-m", "apexrl", "compare", "--help"),
    ("replay.py", "--help"),
]


def run_unread(arguments, directory, unbuffered, streams=("stdout", "stderr")):
    """Status and standard error, where it is read, of a program that writes into a pipe without a reader."""
    reading, writing = os.pipe()
    os.close(reading)
    path = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **path, **({"PYTHONUNBUFFERED": "1"} if unbuffered else {})}
    arguments = [str(ROOT / word) if word.endswith(".py") else word for word in arguments]
    unread = dict.fromkeys(streams, writing)
    try:
        found = subprocess.run(
            [sys.executable, *arguments], cwd=directory, env=environment, text=True, timeout=300, check=False,
            **{"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, **unread},
        )  # fmt: skip
    finally:
        os.close(writing)
    return found.returncode, found.stderr or ""


@pytest.mark.parametrize("unbuffered", [True, False])
@pytest.mark.parametrize("arguments", PROGRAMS, ids=" ".join)
def test_a_program_without_a_reader_ends_as_others_do(arguments, unbuffered, tmp_path):
    assert run_unread(arguments, tmp_path, unbuffered)[0] == UNREAD_STATUS


@pytest.mark.parametrize("unbuffered", [True, False])
def test_it_says_nothing_about_it(unbuffered, tmp_path):
    for arguments in PROGRAMS[0], PROGRAMS[3], PROGRAMS[6], PROGRAMS[7]:
        assert run_unread(arguments, tmp_path, unbuffered, ["stdout"]) == (UNREAD_STATUS, "")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_an_output_that_is_full_is_said_in_a_line(unbuffered, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        found = subprocess.run(
            [sys.executable, "-m", "apexrl", "help"], cwd=tmp_path, env=environment, stdout=full,
            stderr=subprocess.PIPE, text=True, timeout=300, check=False,
        )  # fmt: skip
    assert (found.returncode, found.stderr) == (1, "cannot write: No space left on device\n")


PIPE_OF_ITS_OWN = """
import os
from apexrl.lifecycle import run_role
def main(stop):
    reading, writing = os.pipe()
    os.close(reading)
    os.write(writing, b"x")
run_role("role", main)
"""


def test_another_pipe_that_breaks_is_an_error_of_the_role():
    found = subprocess.run(
        [sys.executable, "-c", PIPE_OF_ITS_OWN], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert found.returncode == 1 and "BrokenPipeError" in found.stderr
