"""Tries both ends of the ranges in pyproject.toml: `python -m tests.ends_of_ranges [lowest] [highest]`.

For each end it makes a fresh environment, installs the package as a wheel with the lowest or the newest versions, and
lets that run some tests and a whole short run, away from the checkout. It takes minutes and gigabytes, so the normal
tests leave it out. Run it after a change of a range. PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu spares
the packages of CUDA.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ENDS = ("lowest", "highest")
TOOLS = ("hypothesis", "pytest", "pytest-timeout")
# A part of each library: numbers of torch, wire and journal, environments, command lines, processes.
TESTS = ("tests/test_config.py", "tests/test_unroll.py", "tests/agents/test_impala.py", "tests/environments",
         "tests/learning/updates/test_side_thread.py", "tests/losses/test_vtrace.py",
         "tests/net/test_replay_channel.py", "tests/networks", "tests/replay/test_journal.py",
         "tests/running/test_plan.py")  # fmt: skip
TRAIN = ("train", "--env", "Catch-v0", "--total-updates", "200", "--no-tensorboard", "--evaluation-period-seconds", "2")


def lowest_of(requirement: str) -> str:
    """Returns a requirement of exactly the lower end of another one's range.

    Raises: ValueError when it has none.
    """
    found = re.match(r"([\w.\[\]-]+)\s*>=\s*([\w.]+)", requirement)
    if found is None:
        raise ValueError(f"{requirement} has no lower end")
    return f"{found[1]}=={found[2]}"


def requirements_at(end: str) -> list[str]:
    """Returns what pip has to install at one end."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + project["optional-dependencies"]["train"]
    return [lowest_of(text) if end == "lowest" else text for text in wanted]


def run(*command: object, cwd: Path) -> None:
    """Runs a command to its end; the program ends with it when it fails."""
    words = list(map(str, command))
    print("+", *words, flush=True)
    # Neither our packages nor our checkout may take the place of those that are tried.
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    status = subprocess.run(words, cwd=cwd, env=environment, check=False).returncode
    if status:
        raise SystemExit(f"status {status} of {' '.join(words)}")


def source_copy(directory: Path) -> Path:
    """Returns a copy of the package's sources: a build leaves files beside them."""
    source = directory / "source"
    shutil.copytree(ROOT / "apexrl", source / "apexrl", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, source / name)
    return source


def try_end(end: str) -> None:
    """Installs one end, and runs the tests and a run with it."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"apexrl-{end}-") as temporary:
        directory = Path(temporary)
        venv.create(directory / "venv", with_pip=True)
        programs = directory / "venv" / "bin"
        run(programs / "python", "-m", "pip", "install", "--quiet", "--upgrade", *requirements_at(end), *TOOLS,
            cwd=directory)  # fmt: skip
        run(programs / "python", "-m", "pip", "install", "--quiet", "--no-deps", source_copy(directory), cwd=directory)
        run(programs / "python", "-m", "pip", "check", cwd=directory)
        for name in ("tests", "docs"):  # some tests read a page
            shutil.copytree(ROOT / name, directory / name)
        (directory / "pytest.ini").write_text("[pytest]\n")  # here a warning of another version is no error
        run(programs / "python", "-m", "pytest", "-q", *TESTS, cwd=directory)
        run(programs / "apexrl", *TRAIN, cwd=directory)
        run(programs / "apexrl", "runs", cwd=directory)
        run(programs / "apexrl", "watch", cwd=directory)
    print(f"{end}: passed in {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    for name in sys.argv[1:] or ENDS:
        if name not in ENDS:
            raise SystemExit(f"{name}: give lowest or highest")
        try_end(name)
