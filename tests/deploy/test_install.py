"""What gets the tools for these tests."""

import shutil
import subprocess

import pytest

from tests.system.processes import ROOT


@pytest.mark.parametrize("script", [".ci/run", "run.sh", "tests/deploy/install.sh"])
def test_shellcheck_finds_nothing(script):
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is missing: apt-get install shellcheck")
    result = subprocess.run(["shellcheck", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stdout
