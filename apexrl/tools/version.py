"""`apexrl --version`: the versions of the package and of what it computes with, and the device that it would take."""

import platform
import sys

from apexrl import __version__
from apexrl.config.help import HELP
from apexrl.lines import say

try:
    import torch
except ImportError:  # a client of the replay service needs none
    torch = None  # type: ignore[assignment]


def main() -> int:
    """Prints a line; returns the exit status."""
    if HELP.intersection(sys.argv):
        say(f"usage: {sys.argv[0]} \n\nPrints the versions of apexrl, Python and torch, and the device.")
        return 0
    found = "no torch"
    if torch is not None:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "the CPU"
        found = f"torch {torch.__version__} on {device}"
    say(f"apexrl {__version__}, Python {platform.python_version()}, {found}")
    return 0
