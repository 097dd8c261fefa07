"""The parts of an image build that need no build: its base images, its driver, its role, its connection."""

import json
import re

import pytest

from tests.deploy.commands import ran
from tests.deploy.image_build import BASES, DRIVER, PROFILE
from tests.deploy.terraform import resources
from tests.system.processes import ROOT

PACKER = ROOT / "deploy/packer"


def programs(directory, **lines: str) -> str:
    """Makes programs of the shell; returns the PATH that finds them first."""
    for name, line in lines.items():
        (directory / name).write_text(f"#!/bin/sh\n{line}\n")
        (directory / name).chmod(0o755)
    return f"{directory}:/usr/bin:/bin"


@pytest.mark.parametrize(
    "driver, status, message",
    [
        ("570.172.08", 1, "NVIDIA's driver is 570.172.08, torch needs 580 or newer: take a newer base image"),
        ("", 1, "the base image has no NVIDIA driver"),
        (DRIVER, 7, ""),
        ("1000.1", 7, ""),
    ],
)
def test_a_base_image_with_an_old_driver_ends_the_build(tmp_path, driver, status, message):
    """Before anything is installed: systemctl comes next, and ends this test."""
    path = programs(tmp_path, modinfo=f"echo {driver}; [ -n '{driver}' ]", systemctl="exit 7")
    variables = {"APEXRL_VERSION": "v1", "APEXRL_IMAGE": "gpu", "APEXRL_RELEASE": "x", "PATH": path}
    command = ["bash", PACKER / "install.sh"]
    result = ran(command, env=variables)
    assert result.returncode == status and message in result.stderr, result.stderr


def test_builds_and_releases_begin_with_the_same_base_images():
    """Packer 1.6 cannot read the first of these files."""
    names = [
        set(re.findall(r'"(/aws/service/.*/ami-id)"', path.read_text()))
        for path in (PACKER / "bases.pkr.hcl", ROOT / "deploy/terraform/cluster/release.tf")
    ]
    assert names[0] == names[1] and len(names[0]) == len(BASES)


def test_the_profile_of_a_build_is_the_one_that_bootstrap_makes(applied_bootstrap):
    """And it may do all that Session Manager's agent does, and nothing else."""
    found = resources(applied_bootstrap.state())
    assert found["aws_iam_instance_profile.image_build"]["name"] == PROFILE
    [statement] = json.loads(found["aws_iam_role_policy.image_build"]["policy"])["Statement"]
    assert all(action.startswith(("ssm:Update", "ssmmessages:")) for action in statement["Action"])


def test_an_unconnected_agent_of_session_manager_is_restarted(tmp_path):
    """And left alone once it is connected, as a restart would end the build's session."""
    unit = "snap.amazon-ssm-agent.amazon-ssm-agent.service"
    restart = f'echo "$2" >>{tmp_path}/restarted; [ "$(wc -l <{tmp_path}/restarted)" -lt 3 ] || touch {tmp_path}/there'
    asked = tmp_path / "asked"
    path = programs(
        tmp_path,
        ss=f"echo $* >>{asked}; if [ -e {tmp_path}/there ]; then echo 'users:((\"ssm-agent-worke\",pid=1))'; fi",
        systemctl=f'if [ "$1" = restart ]; then {restart}; else echo "{unit} enabled"; fi',
    )
    variables = {"PATH": path, "SESSION_AGENT_SECONDS": "0"}
    for proxy, port in (({}, 443), ({"https_proxy": "http://proxy.example.com:3128"}, 3128)):
        script = ROOT / "deploy/files/session_agent.sh"
        result = ran([script], env=variables | proxy)
        assert result.returncode == 0 and "is connected" in result.stdout, result.stderr
        assert (tmp_path / "restarted").read_text().split() == [unit] * 3
        assert asked.read_text().splitlines()[-1].endswith(f"( dport = :{port} )")
