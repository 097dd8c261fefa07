"""A reproducible run: one process acts, stores and learns in turns. `bash run.sh --reproducible` starts it."""

import os
import random
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import torch

from apexrl.config.commands import RunCommand
from apexrl.config.flags import parse
from apexrl.files import locked
from apexrl.lifecycle import Stop, run_role
from apexrl.lockstep.loop import LockstepLoop
from apexrl.networks.device import prepare_for_updates


def main(stop: Stop) -> None:
    """Runs everything with the command line's configuration."""
    command = parse(RunCommand)
    prepare_for_updates(command.learning.learner_threads)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined] # nobody reads it
    random.seed(command.seed)  # for environments that do not keep to the seed of their reset
    np.random.seed(command.seed % 2**32)
    with locked(Path(command.run_dir) / "learner.lock", "a learner that runs"):
        LockstepLoop(command, stop).run()


if __name__ == "__main__":
    run_role("lockstep", main)
