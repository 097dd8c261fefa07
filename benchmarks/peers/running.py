"""Runs the peers, each in a process of its own, and prints which of them are not installed."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
CURE = "pip install -r requirements-bench.txt"
START_SECONDS = 120.0  # the longest time for loading, filling and warming up


def end_in_order() -> None:
    """Makes a SIGTERM end this process as Ctrl-C does, so that the processes it started end too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def missing(modules: tuple[str, ...]) -> list[str]:
    """Returns those of the modules that are not installed."""
    return [module for module in modules if importlib.util.find_spec(module) is None]


def skip_aloud(name: str, modules: tuple[str, ...]) -> bool:
    """Returns whether a peer is not installed. If so, it prints that the peer is skipped, and the cure."""
    lacking = missing(modules)
    if lacking:
        print(f"SKIPPED: {name}: {', '.join(lacking)} is not installed here: {CURE}", flush=True)
    return bool(lacking)


def environment(threads: int) -> dict[str, str]:
    """Returns the variables of a process whose libraries use so many threads; 0 means their default."""
    variables = {name: value for name, value in os.environ.items() if name not in THREAD_VARIABLES}
    return variables | (dict.fromkeys(THREAD_VARIABLES, str(threads)) if threads else {})


def run(module: str, threads: int, seconds: float, *arguments: object) -> dict[str, Any]:
    """Runs a script as a module and returns its figures.

    Raises: RuntimeError when the script fails or takes too long.
    """
    flags = ["--threads", threads, "--seconds", seconds, *arguments]
    command = [sys.executable, "-m", module, *map(str, flags)]
    limit = seconds + START_SECONDS
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment(threads), capture_output=True, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{module} took more than {limit:.0f} s") from error
    if done.returncode:
        raise RuntimeError(f"{module} ended with status {done.returncode}: {done.stderr.strip()[-600:]}")
    return json.loads(done.stdout.splitlines()[-1])
