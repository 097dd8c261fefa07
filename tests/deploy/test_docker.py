"""The image and the compose file: a linter of Dockerfiles, and the commands that the services run."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from apexrl.config.commands import ActorCommand, LearnerCommand, ReplayCommand
from apexrl.config.flags import parse
from tests.system.processes import ROOT

DOCKER = ROOT / "deploy" / "docker"
COMMANDS = {"replay": ReplayCommand, "learner": LearnerCommand, "actor": ActorCommand}


def test_the_linter_finds_nothing():
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("hadolint is not installed")
    done = subprocess.run([hadolint, DOCKER / "Dockerfile"], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout


def test_the_commands_of_the_services_are_ours(monkeypatch):
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    found = {}
    for name, service in services.items():
        role, *words = service["command"] or [""]
        if role:
            words = [word.split(":-")[-1].rstrip("}") if word.startswith("${") else word for word in words]
            found[name] = parse(COMMANDS[role], words)
    assert set(found) == {"replay", "learner", "actors", "evaluator"}
    for name, command in found.items():
        hosts = command.wires.replay_host, command.wires.learner_host
        assert set(hosts) - {"127.0.0.1"} <= set(services), name
    assert found["evaluator"].evaluate and not found["actors"].evaluate
    assert found["replay"].wires.bind_host == found["learner"].wires.bind_host == "0.0.0.0"
    # A container is gone after its end: what has to stay lies in the volume.
    assert found["replay"].replay.journal_dir.startswith("runs/") and found["learner"].run_dir.startswith("runs/")


def test_the_image_is_built():
    if not shutil.which("docker") or subprocess.run(["docker", "info"], capture_output=True, check=False).returncode:
        pytest.skip("docker is not installed, or its daemon does not run")
    build = ["docker", "build", "--file", DOCKER / "Dockerfile", "--tag", "apexrl-test", ROOT]
    subprocess.run(build, check=True, timeout=1200)
    run = ["docker", "run", "--rm", "apexrl-test", "--help"]
    said = subprocess.run(run, capture_output=True, text=True, check=False, timeout=120)
    assert said.returncode == 0 and "train" in said.stdout
