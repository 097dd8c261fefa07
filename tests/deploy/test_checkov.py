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
OPEN = """resource "aws_vpc_security_group_ingress_rule" "ssh" {
  security_group_id = "sg-1"
  cidr_ipv4         = "0.0.0.0/0"
  ip_protocol       = "tcp"
  from_port         = 22
  to_port           = 22
}
"""


def find_checkov() -> str:
    """Returns the program, or skips the test."""
    found = str(OWN) if OWN.exists() else shutil.which("checkov")
    if found is None:
        pytest.skip("checkov is missing: bash tests/deploy/install.sh")
    return found


@pytest.fixture(scope="module")
def report(deploy, tmp_path_factory) -> dict:
    """checkov's report on the configurations, and on a group beside them that is open to the internet."""
    directory = shutil.copytree(deploy / "terraform", tmp_path_factory.mktemp("checkov") / "terraform")
    (directory / "planted").mkdir()
    (directory / "planted" / "open.tf").write_text(OPEN)
    command = [find_checkov(), "--directory", str(directory), "--framework", "terraform", "--skip-download"]
    result = ran([*command, "--output", "json", "--quiet"], seconds=110)
    assert result.stdout.startswith("{"), result.stdout + result.stderr
    return json.loads(result.stdout)


def failed(report: dict, planted: bool) -> list[tuple[str, str, str]]:
    """Returns the failed checks, of our configurations or of the planted one."""
    return [
        (fault["check_id"], fault["resource"], fault["check_name"])
        for fault in report["results"]["failed_checks"]
        if ("planted/" in fault["file_path"]) == planted
    ]


def test_checkov_finds_nothing(report):
    assert report["summary"]["parsing_errors"] == 0
    assert not failed(report, planted=False)
    assert report["summary"]["passed"] > 100


def test_checkov_would_find_something(report):
    assert "CKV_AWS_24" in {name for name, _, _ in failed(report, planted=True)}


def test_each_skip_gives_its_reason():
    for path in TERRAFORM.rglob("*.tf"):
        for line in re.findall(r"#checkov:skip=.*", path.read_text()):
            reason = re.fullmatch(r"#checkov:skip=CKV2?_AWS_\d+:(.{30,})", line)
            assert reason, f"{path}: {line}"
