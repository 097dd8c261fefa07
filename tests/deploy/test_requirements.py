"""A package that is pinned in several places is pinned to one version."""

import re

from tests.system.processes import ROOT

FILES = (
    *("requirements.txt", "requirements-dev.txt", "requirements-all.txt", "deploy/requirements.txt"),
    *("deploy/packer/requirements.in", "deploy/packer/requirements-common.txt"),
)


def pins_of(path):
    """Versions by package; lines that include other files or continue a hash are left out."""
    return dict(re.findall(r"^([A-Za-z0-9_.-]+)(?:\[[^]]*\])?==([^\s\\]+)", path.read_text(), re.MULTILINE))


def test_a_package_has_one_version_everywhere():
    versions: dict[str, dict[str, str]] = {}
    for name in FILES:
        for package, version in pins_of(ROOT / name).items():
            versions.setdefault(package.lower(), {})[name] = version
    assert len(versions["boto3"]) >= 3 and len(versions["pyzmq"]) >= 3, versions
    assert not {package: found for package, found in versions.items() if len(set(found.values())) > 1}
