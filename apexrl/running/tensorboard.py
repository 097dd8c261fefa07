"""TensorBoard as a role of the run: `python -m apexrl.running.tensorboard DIRECTORY HOST PORT`. Ends with the run."""

import logging
import sys

from tensorboard import program

from apexrl.lifecycle import Stop, run_role


def main(stop: Stop) -> None:
    """Serves the event files below a directory until told to stop."""
    directory, host, port = sys.argv[1:]
    quieten()
    server = program.TensorBoard()
    # The fast loader is a process of its own that would outlive us, and one small run does not need it.
    server.configure(logdir=directory, host=host, port=int(port), load_fast="false", reload_interval=5.0)
    server.launch()
    quieten()  # the launch resets a level
    stop.wait()


def quieten() -> None:
    """Lets the log hold problems only, not every reload and every request."""
    for name in ("tensorboard", "werkzeug"):
        logging.getLogger(name).setLevel(logging.WARNING)


if __name__ == "__main__":
    run_role("tensorboard", main)
