"""The package works with the lowest and with the newest versions of its dependencies."""

import os
import subprocess
import sys

import pytest

from tests.ends_of_ranges import ENDS, lowest_of
from tests.system.processes import ROOT


@pytest.mark.long("ends of the dependency ranges")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("end", ENDS)
def test_the_package_works_at_an_end_of_its_ranges(end):
    command = [sys.executable, "-m", "tests.ends_of_ranges", end]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=3500, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def test_the_lowest_version_is_the_lower_end():
    assert lowest_of("torch>=2.5,<3") == "torch==2.5" and lowest_of("ray[default]>=2.60") == "ray[default]==2.60"
    with pytest.raises(ValueError, match="numpy<3 has no lower end"):
        lowest_of("numpy<3")
