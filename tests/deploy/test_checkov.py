"""checkov on the configurations: nothing fails, and what is skipped says why, beside the resource."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.deploy.terraform import TERRAFORM
from tests.system.processes import ROOT

OWN = ROOT / ".venv" / "checkov" / "bin" / "checkov"  # its requirements are at odds with ours
CURE = "python -m venv .venv/checkov && .venv/checkov/bin/pip install -r tests/deploy/requirements-checkov.txt"


def find_checkov() -> str:
    """Returns the program, or skips the test."""
    found = str(OWN) if OWN.exists() else shutil.which("checkov")
    if found is None:
        pytest.skip(f"checkov is missing: {CURE}")
    return found


def check(directory: Path) -> dict:
    """Returns checkov's report."""
    command = [find_checkov(), "--directory", str(directory), "--framework", "terraform", "--skip-download"]
    result = subprocess.run(
        [*command, "--output", "json", "--quiet"], capture_output=True, text=True, timeout=110, check=False
    )
    assert result.stdout.startswith("{"), result.stdout + result.stderr
    return json.loads(result.stdout)


def test_checkov_finds_nothing():
    report = check(TERRAFORM)
    assert report["summary"]["parsing_errors"] == 0
    failed = [
        (fault["check_id"], fault["resource"], fault["check_name"]) for fault in report["results"]["failed_checks"]
    ]
    assert not failed
    assert report["summary"]["passed"] > 100


def test_checkov_would_find_something(tmp_path):
    (tmp_path / "open.tf").write_text(
        'resource "aws_vpc_security_group_ingress_rule" "ssh" {\n'
        '  security_group_id = "sg-1"\n  cidr_ipv4 = "0.0.0.0/0"\n'
        '  ip_protocol = "tcp"\n  from_port = 22\n  to_port = 22\n}\n'
    )
    assert "CKV_AWS_24" in {fault["check_id"] for fault in check(tmp_path)["results"]["failed_checks"]}


def test_each_skip_gives_its_reason():
    for path in TERRAFORM.rglob("*.tf"):
        for line in re.findall(r"#checkov:skip=.*", path.read_text()):
            reason = re.fullmatch(r"#checkov:skip=CKV2?_AWS_\d+:(.{30,})", line)
            assert reason, f"{path}: {line}"
