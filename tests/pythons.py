"""Tries the package with each Python that it is for: `python -m tests.pythons [3.11] [3.12] [3.13] [3.14]`.

For each it makes a fresh environment with the versions of requirements.txt, as wheels only, and runs `apexrl version`
and some seconds of Catch there, away from the checkout. A Python that this machine has not, or for which a package has
no wheel, is named and left out. An environment with torch for CPUs takes 1.3 GB, and one with CUDA's packages 5.7:
PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu spares them.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.ends_of_ranges import ROOT, source_copy

VERSIONS = ("3.11", "3.12", "3.13", "3.14")
TRAIN = ("train", "--env", "Catch-v0", "--max-seconds", "10", "--no-tensorboard", "--run-dir", "run")
NO_WHEEL = re.compile(r"No matching distribution found for (\S+)")


class TrialError(Exception):
    """A command of an environment ended with another status than 0; holds what it said."""


def call(*command: object, cwd: Path) -> str:
    """Returns what a command prints, in an environment without our packages and our checkout."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    words = list(map(str, command))
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise TrialError(f"{' '.join(words)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout


def interpreter_of(version: str) -> Path | None:
    """Returns a Python of this version: the one on the path, or the newest of pyenv's."""
    kept = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for path in filter(None, (shutil.which(f"python{version}"), *reversed(kept))):
        told = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
        if told.startswith(f"Python {version}."):  # a shim of pyenv may name one that is not there
            return Path(path)
    return None


def try_python(version: str) -> str:
    """Returns how a version fared, in words.

    Raises: TrialError when the package does not work with it.
    """
    started, interpreter = time.monotonic(), interpreter_of(version)
    if interpreter is None:
        return "left out: no such Python here"
    with tempfile.TemporaryDirectory(prefix=f"apexrl-python{version}-") as temporary:
        directory = Path(temporary)
        call(interpreter, "-m", "venv", "venv", cwd=directory)
        programs = directory / "venv" / "bin"
        pip = (programs / "python", "-m", "pip", "install", "--quiet")
        try:
            call(*pip, "--only-binary", ":all:", "-r", ROOT / "requirements.txt", cwd=directory)
        except TrialError as error:
            if found := NO_WHEEL.search(str(error)):
                return f"left out: no wheel of {found[1]}"
            raise
        call(*pip, "--no-deps", source_copy(directory), cwd=directory)
        told = call(programs / "apexrl", "version", cwd=directory)
        call(programs / "apexrl", *TRAIN, cwd=directory)
        return f"works, in {time.monotonic() - started:.0f} s: {told.strip()}"


if __name__ == "__main__":
    for name in sys.argv[1:] or VERSIONS:
        print(f"Python {name} {try_python(name)}", flush=True)
