"""TensorBoard as a role of the run: `python -m apexrl.running.tensorboard DIRECTORY HOST PORT`. Ends with the run.

Its memory grows for as long as it serves: docs/reliability.md. So the role ends at a bound, and its supervisor begins
it anew, which reads the event files again.
"""

import logging
import sys
from pathlib import Path

import psutil
from tensorboard import program

from apexrl.errors import PeerError
from apexrl.lifecycle import Stop, run_role

# It keeps a random sample of the numbers under each tag.
SAMPLES = 1_000
MOST_SAMPLES = 5_000  # of a tag in all runs together
LEAST_SAMPLES = 100
MOST_BYTES = 400 * 10**6  # of resident memory; more where it has as much at the first look, of many runs
MOST_GROWTH = 3  # times the memory of the first look
LOOK_SECONDS = 60.0


def main(stop: Stop) -> None:
    """Serves the event files below a directory until told to stop.

    Raises: PeerError when its memory has grown too much: a new start has less.
    """
    directory, host, port = sys.argv[1:]
    quieten()
    server = program.TensorBoard()
    # The fast loader is a process of its own that would outlive us, and one small run does not need it.
    server.configure(
        logdir=directory, host=host, port=int(port), load_fast="false", reload_interval=5.0,
        samples_per_plugin={"scalars": samples_of(Path(directory))},
    )  # fmt: skip
    server.launch()
    quieten()  # the launch resets a level
    most_bytes = 0.0
    while not stop.wait(LOOK_SECONDS):
        num_bytes = psutil.Process().memory_info().rss
        most_bytes = most_bytes or max(MOST_BYTES, MOST_GROWTH * num_bytes)
        if num_bytes > most_bytes:
            raise PeerError(f"TensorBoard has grown to {num_bytes / 1e6:.0f} MB: it begins anew")


def samples_of(directory: Path) -> int:
    """Returns how many numbers to keep of each tag of a run: fewer where there are many runs below the directory."""
    num_runs = len({path.parent for path in directory.rglob("events.out.tfevents.*")}) + 1  # and one that begins
    return min(max(MOST_SAMPLES // num_runs, LEAST_SAMPLES), SAMPLES)


def quieten() -> None:
    """Lets the log hold problems only, not every reload and every request."""
    for name in ("tensorboard", "werkzeug"):
        logging.getLogger(name).setLevel(logging.WARNING)


if __name__ == "__main__":
    run_role("tensorboard", main)
