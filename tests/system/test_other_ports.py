"""Actors and learners whose ports were exchanged."""

import pytest

from tests.system.fuzz import start_replay
from tests.system.processes import ROOT, Process, wait_for


@pytest.mark.parametrize(("role", "flag", "port"), [("actor", "--actor-port", 1), ("learner", "--batch-port", 0)])
def test_a_role_at_the_other_port_ends_with_a_line_that_names_its_own(tmp_path, free_ports, role, flag, port):
    ports = free_ports(4)
    command = [ROOT / f"{role}.py", "--preset", "small", flag, ports[port]]
    command += ["--parameter-port", ports[2], "--metrics-port", ports[3]]
    command += {"actor": ["--env", "Catch-v0", "--num-workers", 1], "learner": ["--run-dir", tmp_path / "run"]}[role]
    with start_replay(tmp_path, ports[:2]), Process(command, tmp_path / "role.txt") as process:
        wait_for(lambda: process.popen.poll() is not None, 60, "the end of the role")
        lines = process.text().splitlines()
    assert process.popen.returncode == 1
    assert f"connects to {flag}" in lines[-1], lines
