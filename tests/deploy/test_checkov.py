"""checkov on the configurations: nothing fails, and each skipped check says why, beside the resource."""

import json
import re
import shutil

import pytest

from tests.deploy.commands import ran
from tests.deploy.terraform import TERRAFORM
from tests.system.processes import ROOT

pytestmark = pytest.mark.long("changes of a cluster")

OWN = ROOT / ".venv" / "checkov" / "bin" / "checkov"  # its requirements are at odds with ours


def find_checkov() -> str:
    """Returns the program, or skips the test."""
    found = str(OWN) if OWN.exists() else shutil.which("checkov")
    if found is None:
        pytest.skip("checkov is missing: bash tests/deploy/install.sh")
    return found


def test_checkov_finds_nothing(deploy):
    command = [find_checkov(), "--directory", deploy / "terraform", "--framework", "terraform", "--skip-download"]
    result = ran([*command, "--output", "json", "--quiet"], seconds=110)
    assert result.stdout.startswith("{"), result.stdout + result.stderr
    report = json.loads(result.stdout)
    assert report["summary"]["parsing_errors"] == 0 and report["summary"]["passed"] > 100
    faults = report["results"]["failed_checks"]
    assert not [(fault["check_id"], fault["resource"], fault["check_name"]) for fault in faults]


def test_each_skip_gives_its_reason():
    for path in TERRAFORM.rglob("*.tf"):
        for line in re.findall(r"#checkov:skip=.*", path.read_text()):
            reason = re.fullmatch(r"#checkov:skip=CKV2?_AWS_\d+:(.{30,})", line)
            assert reason, f"{path}: {line}"
