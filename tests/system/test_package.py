"""The package away from its checkout: as a wheel that is installed into a directory of its own."""

import os
import subprocess
import sys
import zipfile

import pytest

from tests.ends_of_ranges import source_copy
from tests.system.processes import read_json


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A directory that holds the package like site-packages, and nothing else of the checkout."""
    directory = tmp_path_factory.mktemp("package")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    subprocess.run([*pip, directory, source_copy(directory)], check=True, timeout=300)
    (wheel,) = directory.glob("apexrl-0.2.0-*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(directory / "site-packages")
    return directory / "site-packages"


def apexrl(installed, cwd, *words):
    """Runs a command of the installed package; returns what it prints."""
    # A package of the same name in the working directory is another one.
    (cwd / "apexrl").mkdir(exist_ok=True)
    (cwd / "apexrl" / "__init__.py").write_text("raise RuntimeError('this is another package')")
    code = "import sys; sys.argv[0] = '/bin/apexrl'; from apexrl.__main__ import main; sys.exit(main())"
    command = [sys.executable, "-P", "-c", code, *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_wheel_has_the_command_and_its_types(installed):
    files = {str(path.relative_to(installed)) for path in installed.rglob("*")}
    assert {"apexrl/py.typed", "apexrl/roles/actor.py", "apexrl/__main__.py", "apexrl/config/presets.toml"} <= files
    assert not any(name.startswith(("tests", "deploy", "benchmarks", "actor.py")) for name in files)
    (points,) = installed.glob("apexrl-*.dist-info/entry_points.txt")
    assert "apexrl = apexrl.__main__:main" in points.read_text()


def test_an_installed_package_trains_lists_and_watches(installed, tmp_path, free_ports):
    ports = (f"{flag}={port}" for flag, port in zip(("--actor-port", "--batch-port", "--parameter-port",
             "--metrics-port", "--meeting-port"), free_ports(5), strict=True))  # fmt: skip
    few = ("--env", "Catch-v0", "--num-workers", 2, "--environments-per-worker", 16, "--episodes", 2)
    ends = ("--evaluation-period-seconds", 1, "--total-frames", "8k", "--no-tensorboard")
    told = apexrl(installed, tmp_path, "train", *few, *ends, *ports)
    assert "checkpoint written: runs/Catch-v0-" in told
    (run,) = (tmp_path / "runs").iterdir()
    config = read_json(run / "config.json")
    assert config["revision"] == "version 0.2.0" and config["command"]["learning"]["total_frames"] == 8000
    head, row = apexrl(installed, tmp_path, "runs").splitlines()
    assert head.startswith("run ") and row.startswith(f"runs/{run.name}") and "apex-dqn" in row
    watched = apexrl(installed, tmp_path, "watch", "--episodes", 2)
    assert f"plays runs/{run.name}/checkpoints/" in watched
    assert "Catch-v0, update" in watched and "2 games, mean" in watched and list((run / "watched").glob("game-*"))
    held = apexrl(installed, tmp_path, "inspect", "summary", run / "journal")
    assert "bytes per transition" in held
    assert apexrl(installed, tmp_path, "inspect", run / "journal").startswith("log ")
