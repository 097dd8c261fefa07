"""The tools of these tests, and packages that are pinned in several places."""

import re

from tests.deploy.commands import ran
from tests.deploy.needed import require_tool
from tests.system.processes import ROOT

FILES = (
    *("requirements.txt", "requirements-dev.txt", "requirements-all.txt", "deploy/requirements.txt"),
    *("deploy/packer/requirements.in", "deploy/packer/requirements-common.txt", "deploy/packer/requirements-gpu.txt"),
)


def test_shellcheck_finds_nothing():
    require_tool("shellcheck", "shellcheck")
    scripts = (".ci/run", "run.sh", "tests/deploy/install.sh", "deploy/examples/slurm.sbatch")
    scripts += tuple(map(str, ROOT.glob("deploy/packer/*.sh")))
    result = ran(["shellcheck", *scripts], cwd=ROOT)
    assert result.returncode == 0, result.stdout


def pins_of(path):
    """Versions by package; lines that include other files or continue a hash are left out."""
    return dict(re.findall(r"^([A-Za-z0-9_.-]+)(?:\[[^]]*\])?==([^\s\\]+)", path.read_text(), re.MULTILINE))


def test_a_package_has_one_version_everywhere():
    versions: dict[str, dict[str, str]] = {}
    for name in FILES:
        for package, version in pins_of(ROOT / name).items():
            versions.setdefault(package.lower(), {})[name] = version
    assert len(versions["boto3"]) >= 3 and len(versions["pyzmq"]) >= 3 and len(versions["torch"]) == 2, versions
    assert not {package: found for package, found in versions.items() if len(set(found.values())) > 1}
