"""The learner updates the network from sampled batches and publishes it. See `python learner.py --help`."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # a spinning thread would take the core from the actors

import torch

from apexrl.config import LearnerCommand, OfflineCommand
from apexrl.files import locked
from apexrl.flags import parse, value_given
from apexrl.learning.loop import LearnerLoop
from apexrl.lifecycle import Stop, keep_freed_memory, process_name, run_role


def main(stop: Stop) -> None:
    """Learns with the command line's configuration."""
    command = parse(OfflineCommand if value_given("--from-journal", sys.argv) else LearnerCommand)
    keep_freed_memory()
    torch.set_num_threads(command.learning.learner_threads)
    with locked(Path(command.run_dir) / "learner.lock", "a learner that runs"):
        LearnerLoop(command, process_name(0)).run(stop)


if __name__ == "__main__":
    run_role("learner", main)
