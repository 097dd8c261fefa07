"""Makes a virtual environment for the peers: `python -m benchmarks.peers.environment DIR`.

Reverb needs the one TensorFlow that it was built with, and that needs a numpy older than ours. So Reverb has its own
environment of about 1.3 GB. Its TensorFlow is the one without CUDA, because nothing here runs on a GPU.
"""

import argparse
import subprocess
import sys
from pathlib import Path

PACKAGES = (
    "dm-reverb==0.14.0",
    "tensorflow-cpu==2.15.1",
    "numpy==1.26.4",
    "protobuf==4.25.9",
    "setuptools==65.5.0",
    "pyzmq==27.3.0",
    "psutil==7.2.2",
)
CHECK = "import reverb, tensorflow, zmq, psutil"
INSTALL_SECONDS = 15 * 60


def make(directory: Path) -> Path | None:
    """Returns the interpreter of a complete environment in `directory`; None, with the reason printed, if none."""
    python = (directory / "bin" / "python").absolute()
    if python.exists() and _reason_against([str(python), "-c", CHECK]) is None:
        return python
    steps = (
        [sys.executable, "-m", "venv", "--clear", str(directory)],
        [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PACKAGES],
        [str(python), "-c", CHECK],
    )
    for step in steps:
        reason = _reason_against(step)
        if reason is not None:
            print(f"no environment for the peers: {' '.join(step[:4])} ...: {reason}", file=sys.stderr)
            return None
    return python


def _reason_against(command: list[str]) -> str | None:
    """Runs a command; returns the reason of its failure, None when it succeeds."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if done.returncode == 0 else done.stderr.strip()[-2000:] or f"status {done.returncode}"


def main() -> None:
    """Prints the path of the interpreter, or fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="DIR")
    python = make(parser.parse_args().directory)
    if python is None:
        sys.exit(1)
    print(python)


if __name__ == "__main__":
    main()
