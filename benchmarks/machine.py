"""The machine that a benchmark runs on."""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import psutil

PACKAGES = ("torch", "ale-py", "gymnasium", "numpy", "pyzmq", "stable-baselines3", "envpool")


def machine() -> dict[str, Any]:
    """Returns processor, cores, memory, GPU, versions, and the git revision of the code."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "gpu": _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader") or "none",
        "system": platform.platform(),
        "versions": versions,
        "revision": _output("git", "describe", "--always", "--dirty", "--abbrev=12") or "unknown",
    }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor())


def _output(*command: str) -> str:
    """Returns the output of a command, an empty string when it cannot be run."""
    root = Path(__file__).resolve().parent.parent
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
