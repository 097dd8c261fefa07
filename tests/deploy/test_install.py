"""The installation of the tools for these tests."""

from tests.deploy.commands import ran
from tests.deploy.needed import PACKAGES, require_tool
from tests.system.processes import ROOT


def test_shellcheck_finds_nothing():
    require_tool("shellcheck", "shellcheck")
    scripts = (".ci/run", "run.sh", "tests/deploy/install.sh", "deploy/examples/slurm.sbatch")
    scripts += tuple(map(str, ROOT.glob("deploy/packer/*.sh")))
    result = ran(["shellcheck", *scripts], cwd=ROOT)
    assert result.returncode == 0, result.stdout


def test_a_missing_package_of_the_requirements_would_be_noticed():
    lines = (ROOT / "requirements-dev.txt").read_text().rpartition("\n\n")[2].splitlines()
    assert {line.partition("==")[0] for line in lines if "==" in line} == set(PACKAGES.values())
