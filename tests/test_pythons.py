"""The package works with every Python of its classifiers that this machine has."""

import subprocess
import sys
import tomllib

import pytest

from tests.pythons import VERSIONS, interpreter_of
from tests.system.processes import ROOT


@pytest.mark.long("other Pythons")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("version", VERSIONS)
def test_the_package_works_with(version):
    command = [sys.executable, "-m", "tests.pythons", version]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3500, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    print(done.stdout)
    if "left out" in done.stdout:
        pytest.skip(done.stdout.strip())


def test_the_pythons_of_the_classifiers_are_tried():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [line.rpartition(" ")[2] for line in project["classifiers"] if "Python :: 3." in line]
    assert set(named) <= set(VERSIONS) and project["requires-python"] == f">={VERSIONS[0]}"
    own = "{}.{}".format(*sys.version_info)
    assert interpreter_of("3.99") is None and (own not in VERSIONS or interpreter_of(own) is not None)
