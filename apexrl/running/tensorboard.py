"""TensorBoard as a role of the run: `python -m apexrl.running.tensorboard DIRECTORY HOST PORT`. Ends with the run.

Its memory grows for as long as it serves: docs/reliability.md. So the role ends at a bound, and its supervisor begins
it anew, which reads the event files again.
"""

import logging
import sys
import tempfile
import time
from pathlib import Path

from tensorboard import program

from apexrl.errors import PeerError
from apexrl.lifecycle import Stop, resident_bytes, run_role

# It keeps a random sample of the numbers under each tag.
SAMPLES = 1_000
MOST_SAMPLES = 5_000  # of a tag in all runs together
LEAST_SAMPLES = 100
MOST_BYTES = 400 * 10**6  # of resident memory; more where it has as much at the first look, of many runs
MOST_GROWTH = 3  # times the memory of the first look
LOOK_SECONDS = 60.0
LINK_SECONDS = 5.0
DEPTHS = (".", "*", "*/*", "*/*/*")  # of runs below a directory: one, those of a sweep, earlier results of either
EVENTS = "tensorboard/events.out.tfevents.*"  # of a run


def main(stop: Stop) -> None:
    """Serves the event files below a directory until told to stop.

    Raises: PeerError when its memory has grown too much: a new start has less.
    """
    directory, host, port = sys.argv[1:]
    quieten()
    with tempfile.TemporaryDirectory(prefix="apexrl-board-") as shown:
        serve(Path(directory), Path(shown), host, int(port), stop)


def serve(directory: Path, shown: Path, host: str, port: int, stop: Stop) -> None:
    """Serves the runs below a directory under their names, by links in another directory, until told to stop."""
    link_runs(directory, shown)
    server = program.TensorBoard()
    # The fast loader is a process of its own that would outlive us, and one small run does not need it.
    server.configure(
        logdir=str(shown), host=host, port=port, load_fast="false", reload_interval=5.0,
        samples_per_plugin={"scalars": samples_of(directory)},
    )  # fmt: skip
    server.launch()
    quieten()  # the launch resets a level
    most_bytes, due = 0.0, time.monotonic() + LOOK_SECONDS
    while not stop.wait(min(LINK_SECONDS, LOOK_SECONDS)):
        link_runs(directory, shown)
        if time.monotonic() < due:
            continue
        due = time.monotonic() + LOOK_SECONDS
        num_bytes = resident_bytes()
        most_bytes = most_bytes or max(MOST_BYTES, MOST_GROWTH * num_bytes)
        if num_bytes > most_bytes:
            raise PeerError(f"TensorBoard has grown to {num_bytes / 1e6:.0f} MB: it begins anew")


def link_runs(directory: Path, shown: Path) -> None:
    """Links each run's event files under the run's name, and takes away links to what is gone."""
    for link in shown.rglob("*"):
        if link.is_symlink() and not link.exists():
            link.unlink()
    directory = directory.resolve()
    for events in (path for depth in DEPTHS for path in directory.glob(f"{depth}/{EVENTS}")):
        run = events.parent.parent
        link = shown / (run.relative_to(directory) if run != directory else run.name) / events.name
        if not link.is_symlink():
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(events)


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
