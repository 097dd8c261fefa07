"""Looks for the tools that the tests of deploy/ need, or skips a test with the cure. install.sh installs them all."""

import functools
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.deploy.tools import TERRAFORM, TERRAFORM_CURE

OLDEST_TERRAFORM = (1, 11)


def require_tool(name: str, package: str) -> None:
    """Skips a test unless a program is there."""
    if shutil.which(name) is None:
        pytest.skip(f"{name} is missing: bash tests/deploy/install.sh, or apt-get install {package}")


def find_terraform() -> str:
    """Returns the program, that of .venv before another; skips the test where it is missing or too old."""
    program, reason = look_for_terraform()
    if reason:
        pytest.skip(f"{reason}: {TERRAFORM_CURE}")
    return program


def with_terraform() -> dict[str, str]:
    """Returns the PATH on which commands find the program; skips the test where it is missing or too old."""
    return {"PATH": f"{Path(find_terraform()).parent}{os.pathsep}{os.environ['PATH']}"}


@functools.cache
def look_for_terraform() -> tuple[str, str]:
    """Returns the program, and why it cannot be used, empty if it can."""
    found = str(TERRAFORM) if TERRAFORM.exists() else shutil.which("terraform")
    if found is None:
        return "", "terraform 1.11 or newer is missing"
    quietly = os.environ | {"CHECKPOINT_DISABLE": "1"}
    answer = subprocess.run([found, "version", "-json"], env=quietly, capture_output=True, timeout=60, check=True)
    version = json.loads(answer.stdout)["terraform_version"]
    is_old = tuple(map(int, version.split(".")[:2])) < OLDEST_TERRAFORM
    return found, f"{found} is {version}, 1.11 or newer is needed" if is_old else ""
