"""The rules of CONTRIBUTING.md that a tool can check."""

import ast
import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.processes import ROOT

MAX_LINES = 400
MAX_SCRIPT_LINES = 60


def python_files(*directories: str) -> Iterator[Path]:
    """Yields ours; not what a user's environment in deploy/.venv holds."""
    for directory in directories:
        for path in (ROOT / directory).rglob("*.py"):
            if not any(part.startswith(".") for part in path.relative_to(ROOT).parts):
                yield path


@pytest.mark.parametrize("command", [["ruff", "format", "--check", "."], ["ruff", "check", "."], ["mypy"]])
def test_tools_find_nothing(command):
    result = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=1100, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_field_has_one_docstring():
    for path in python_files("apexrl"):
        for kind in ast.walk(ast.parse(path.read_text())):
            texts = [isinstance(part, ast.Expr) for part in kind.body] if isinstance(kind, ast.ClassDef) else []
            assert (True, True) not in itertools.pairwise(texts), (path, kind.name)


def test_files_stay_readable():
    for path in python_files("apexrl", "tests", "benchmarks", "deploy"):
        assert len(path.read_text().splitlines()) <= MAX_LINES, path
    for script in ("actor.py", "learner.py", "replay.py"):
        assert len((ROOT / script).read_text().splitlines()) <= MAX_SCRIPT_LINES, script


def test_nothing_is_unpickled():
    unsafe = re.compile(r"pickle\.load|recv_pyobj|weights_only=False|(?<!safetensors\.)torch\.load\(")
    for path in [*python_files("apexrl", "deploy"), *ROOT.glob("*.py")]:
        assert not unsafe.search(path.read_text()), path
