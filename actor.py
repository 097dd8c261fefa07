"""Actors and evaluators play environments with the learner's parameters. See `python actor.py --help`."""

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch loads: one thread a process

import torch

from apexrl.acting.loop import ActorLoop
from apexrl.config import ActorCommand, WorkerCommand
from apexrl.flags import parse, value_given
from apexrl.lifecycle import Stop, run_role
from apexrl.running.workers import run_workers


def main(stop: Stop) -> None:
    """Acts or evaluates, as the command line says."""
    command = parse(WorkerCommand if value_given("--worker-index", sys.argv) else ActorCommand)
    torch.set_num_threads(1)
    if command.evaluation.checkpoint or command.evaluate:
        from apexrl.acting import evaluation  # noqa: PLC0415 - OpenCV is not needed to act

        (evaluation.play_checkpoint if command.evaluation.checkpoint else evaluation.follow)(command, stop)
    elif command.acting.num_workers > 1 and not isinstance(command, WorkerCommand):
        run_workers(command, stop)
    else:
        ActorLoop(command).run(stop)


if __name__ == "__main__":
    run_role("actor", main)
