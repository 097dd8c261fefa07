"""A look at the device of a run, without a context on it: `python -m apexrl.running.device_look NAME` takes that look.

A context takes half a gigabyte of a GPU for as long as its process runs.
"""

import subprocess
import sys

import torch

from apexrl.errors import ConfigError
from apexrl.lifecycle import child_environment
from apexrl.networks.device import choose_device

LOOK_SECONDS = 120.0  # a cold disk, and a GPU that wakes up
MODULE = "apexrl.running.device_look"


def look_at(name: str) -> tuple[torch.device, int]:
    """Returns the device that `choose_device` would choose, and its free memory in bytes, 0 of a CPU.

    Raises: ConfigError when the named device cannot be used.
    """
    if name == "cpu" or not torch.cuda.is_available():
        return choose_device(name), 0
    command, environment = [sys.executable, "-P", "-m", MODULE, name], child_environment()
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=LOOK_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"device {name!r} says nothing in {LOOK_SECONDS:.0f} s: look at nvidia-smi") from error
    if done.returncode:
        raise ConfigError((done.stderr.strip().splitlines() or [f"device {name!r} cannot be used"])[-1])
    chosen, free = done.stdout.split()[-2:]
    return torch.device(chosen), int(free)


def main(name: str) -> str:
    """Prints the chosen device and its free memory; returns the reason where it cannot be used."""
    try:
        device = choose_device(name)
    except ConfigError as error:
        return str(error)
    print(device, torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0)
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
