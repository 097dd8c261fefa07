"""The image and the compose file: a linter of Dockerfiles, and the commands that the services run."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from apexrl.config.commands import ActorCommand, LearnerCommand, ReplayCommand
from apexrl.config.flags import parse
from tests.deploy.commands import ran
from tests.system.processes import ROOT

DOCKER = ROOT / "deploy" / "docker"
COMMANDS = {"replay": ReplayCommand, "learner": LearnerCommand, "actor": ActorCommand}


def test_the_linter_finds_nothing():
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("hadolint is not installed")
    done = ran([hadolint, DOCKER / "Dockerfile"])
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("given", [{}, {"AGENT": "impact", "ENVIRONMENT": "BreakoutNoFrameskip-v4"}])
def test_the_commands_of_the_services_are_ours(given):
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    found = {}
    for name, service in services.items():
        role, *words = service["command"] or [""]
        if role and name != "keys":
            words = [re.sub(r"\$\{(\w+):-([^}]*)\}", lambda at: given.get(at[1], at[2]), word) for word in words]
            found[name] = parse(COMMANDS[role], words)
    assert set(found) == {"replay", "learner", "actors", "evaluator"}
    assert {command.agent for command in found.values()} == {given.get("AGENT", "apex-dqn")}
    for name, command in found.items():
        hosts = command.wires.replay_host, command.wires.learner_host
        assert set(hosts) - {"127.0.0.1"} <= set(services), name
    assert found["evaluator"].evaluate and not found["actors"].evaluate
    assert found["replay"].wires.bind_host == found["learner"].wires.bind_host == "0.0.0.0"
    assert {command.wires.keys for command in found.values()} == {"keys"}
    # A container is gone after its end: what has to stay lies in the volume.
    assert found["replay"].replay.journal_dir.startswith("runs/") and found["learner"].run_dir.startswith("runs/")


def test_the_first_start_makes_the_keys_that_the_roles_wait_for(tmp_path):
    """Later starts keep them."""
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    ready = {"keys": {"condition": "service_completed_successfully"}}
    assert all(service["depends_on"] == (ready if name != "keys" else {}) for name, service in services.items())
    assert all("keys:/home/apexrl/keys" in service["volumes"] for service in services.values())
    shell, option, text = services["keys"]["entrypoint"]
    text = text.replace("apexrl ", f"{sys.executable} -m apexrl ")
    seen = []
    for _ in range(2):
        subprocess.run([shell, option, text], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)
        seen.append({path.name: path.read_bytes() for path in (tmp_path / "keys").iterdir()})
    assert seen[0] == seen[1] and {"replay.public", "learner.secret", "actor.secret"} <= seen[0].keys()


def test_containers_end_with_a_checkpoint_and_open_nothing_to_other_machines():
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    assert {service["stop_grace_period"] for service in services.values()} == {"60s"}
    assert all(port.startswith("127.0.0.1:") for service in services.values() for port in service.get("ports", []))
    for path in (ROOT / "docs" / "hosts.md", DOCKER / "Dockerfile"):
        [line] = [line for line in path.read_text().splitlines() if "docker run --rm" in line]
        assert "--stop-timeout 60" in line and "-p 127.0.0.1:6006:6006" in line


def test_every_command_of_the_documentation_that_opens_a_port_to_other_hosts_has_keys():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "deploy" / "examples").iterdir()]
    found = []
    for path in pages:
        text = path.read_text().replace("\\\n", " ")
        found += [line for line in text.splitlines() if ".py" in line and "--bind-host 0.0.0.0" in line]
    assert len(found) >= 3 and all("--keys" in line or "${flags[@]}" in line for line in found), found
    [flags] = [line for line in (ROOT / "deploy/examples/slurm.sbatch").read_text().splitlines() if "flags=(" in line]
    assert flags.endswith('--keys "$keys")')


@pytest.mark.long("clusters of machines")
def test_the_image_is_built():
    if not shutil.which("docker") or subprocess.run(["docker", "info"], capture_output=True, check=False).returncode:
        pytest.skip("docker is not installed, or its daemon does not run")
    build = ["docker", "build", "--file", DOCKER / "Dockerfile", "--tag", "apexrl-test", ROOT]
    subprocess.run(build, check=True, timeout=1200)
    run = ["docker", "run", "--rm", "apexrl-test", "--help"]
    said = ran(run, seconds=120)
    assert said.returncode == 0 and "train" in said.stdout
