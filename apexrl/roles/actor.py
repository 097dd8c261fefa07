"""Actors and evaluators play environments with the learner's parameters: `apexrl actor`, `python actor.py`."""

import os
import sys

from apexrl.config.commands import ActorCommand, WorkerCommand
from apexrl.config.flags import parse
from apexrl.config.words import value_given
from apexrl.control_groups import num_cores
from apexrl.lifecycle import Stop, make_way, run_role


def main(stop: Stop) -> None:
    """Acts or evaluates, as the command line says. The parts load after it is parsed: a mistake is answered at once."""
    command = parse(WorkerCommand if value_given("--worker-index", sys.argv) else ActorCommand)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch loads: one thread a process
    plays_games = bool(command.evaluation.checkpoint or command.evaluate)
    if command.acting.num_workers > 1 and not (plays_games or isinstance(command, WorkerCommand)):
        from apexrl.running.workers import run_workers

        run_workers(command, stop)
        return
    import torch

    torch.set_num_threads(1)
    if plays_games:
        from apexrl.acting import evaluation  # OpenCV is not needed to act

        (evaluation.play_checkpoint if command.evaluation.checkpoint else evaluation.follow)(command, stop)
    else:
        from apexrl.acting.loop import ActorLoop

        make_way(num_cores())
        ActorLoop(command).run(stop)


def run() -> None:
    """Runs the role, and exits."""
    run_role("actor", main)


if __name__ == "__main__":
    run()
