"""Fixtures that run apexrl_host.py as the units do: its process, and what stands in for AWS and systemd."""

import os

import pytest

from tests.system.processes import ROOT, Process

HOST = ROOT / "deploy" / "files" / "apexrl_host.py"
BUCKET = "apexrl-results"
PREFIX = "catch/run-1/"
DEADLINE = "/apexrl/catch/deadline"


@pytest.fixture
def bucket(aws):
    """The results bucket, empty; it keeps versions, as bootstrap makes it."""
    s3 = aws.client("s3")
    s3.create_bucket(Bucket=BUCKET)
    s3.put_bucket_versioning(Bucket=BUCKET, VersioningConfiguration={"Status": "Enabled"})
    return s3


@pytest.fixture
def start(aws, tmp_path):
    """Starts a command on a host of a role, with the environment that its role.env would give; ends it in the end."""
    started = []

    def begin(command, *arguments, role="learner", **environment):
        role_env = {
            **{"APEXRL_ROLE": role, "APEXRL_CLUSTER": "catch", "APEXRL_KEYS_PATH": "/apexrl/catch/keys"},
            **{"APEXRL_DEADLINE": DEADLINE, "APEXRL_BUCKET": BUCKET, "APEXRL_RUN": "run-1", "APEXRL_HOST_RANK": "0"},
            "APEXRL_FLAGS": "--agent apex-dqn",
        }
        log = tmp_path / f"{command}-{len(started)}.txt"
        process = Process([HOST, command, *arguments], log, aws.environment | role_env | environment)
        started.append(process)
        return process

    yield begin
    for process in started:
        process.__exit__()


@pytest.fixture
def finish(start):
    """Runs a command to its end; returns the status and what it said."""

    def run(command, *arguments, **settings):
        process = start(command, *arguments, **settings)
        return process.popen.wait(60), process.text()

    return run


@pytest.fixture
def systemctl(tmp_path):
    """A systemctl that only notes what it was asked, and when; returns its notes and the PATH that finds it."""
    notes = tmp_path / "systemctl.txt"
    program = tmp_path / "bin" / "systemctl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$(date -u +%s) $*" >>{notes}\n')
    program.chmod(0o755)
    return notes, f"{program.parent}:{os.environ['PATH']}"
