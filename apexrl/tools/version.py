"""`apexrl --version`: the versions of the package and of what it computes with, and the device that it would take."""

import platform

from apexrl import __version__
from apexrl.lines import say

try:
    import torch
except ImportError:  # a client of the replay service needs none
    torch = None  # type: ignore[assignment]


def main() -> int:
    """Prints a line; returns the exit status."""
    found = "no torch"
    if torch is not None:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "the CPU"
        found = f"torch {torch.__version__} on {device}"
    say(f"apexrl {__version__}, Python {platform.python_version()}, {found}")
    return 0
