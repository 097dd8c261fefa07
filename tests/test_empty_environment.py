"""The base package in an environment of its own, made as a user makes it: its size, and a server with its client."""

import os
import re
import subprocess
import venv
from pathlib import Path

import pytest

from tests.ends_of_ranges import source_copy
from tests.system.processes import ROOT
from tests.test_extras import EXTRAS, MODULES

MAX_MEGABYTES = 150
PIP = ("pip", "setuptools", "_distutils_hack", "pkg_resources")  # of the empty environment


def run(*words, cwd, status=0):
    """Runs a program of the environment, away from the checkout and its packages; returns both outputs."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    words = list(map(str, words))
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout, done.stderr


def size_of(site: Path) -> float:
    """Returns the megabytes on the disk of all packages but pip's."""
    files = [path for path in site.rglob("*") if path.is_file() and not path.is_symlink()]
    mine = [path for path in files if not path.relative_to(site).parts[0].startswith(PIP)]
    return sum(path.stat().st_blocks for path in mine) * 512 / 2**20


@pytest.mark.long("an empty environment")
@pytest.mark.timeout(1800)
def test_the_base_package_is_small_and_serves(tmp_path, free_ports):
    venv.create(tmp_path / "venv", with_pip=True)
    programs = tmp_path / "venv/bin"
    run(programs / "python", "-m", "pip", "install", "--quiet", source_copy(tmp_path), cwd=tmp_path)
    (site,) = (tmp_path / "venv").glob("lib/python3*/site-packages")
    size = size_of(site)
    print(f"{size:.0f} MB")
    assert size < MAX_MEGABYTES
    modules = sorted(module for of in MODULES.values() for module in of)
    find = "import importlib.util, sys; print([m for m in sys.argv[1:] if importlib.util.find_spec(m)])"
    assert run(programs / "python", "-c", find, *modules, cwd=tmp_path)[0] == "[]\n"

    first, *_ = run(programs / "python", ROOT / "examples/async_learner.py", cwd=tmp_path)[0].splitlines()
    assert first.startswith("reward ")
    (flags,) = re.findall(r"python replay\.py (.*)", (ROOT / "examples/hard_examples.py").read_text())
    ports = free_ports(2)
    words = [programs / "apexrl", "replay", *flags.split(), "--actor-port", ports[0], "--batch-port", ports[1]]
    server = subprocess.Popen(list(map(str, words)), cwd=tmp_path, stderr=subprocess.DEVNULL)
    try:
        told, _ = run(programs / "python", ROOT / "examples/hard_examples.py", *ports, cwd=tmp_path)
        assert "hard: 4800 tickets seen" in told
    finally:
        server.terminate()
    assert server.wait(60) == 0

    _, told = run(programs / "apexrl", "train", cwd=tmp_path, status=2)
    assert re.fullmatch(rf"\w+ is not installed: say `{programs}/python\S* -m pip install 'apexrl\[train\]'`\n", told)
    installed, _ = run(programs / "python", "-m", "pip", "install", "--dry-run", "apexrl[plot]", cwd=tmp_path)
    assert EXTRAS["plot"] == ["matplotlib"] and "Would install" in installed and "matplotlib" in installed
