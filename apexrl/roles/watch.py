"""Plays the best network of a run, or its latest, and films it: `apexrl watch [RUN]`."""

import dataclasses
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import tyro

from apexrl.config.fields import check_ranges
from apexrl.config.flags import REGISTRY
from apexrl.config.sections import Range
from apexrl.config.words import program
from apexrl.lifecycle import Stop, run_role
from apexrl.lines import say
from apexrl.own_modules import Trust
from apexrl.runs import CHECKPOINTS, RUNS, Which, found_checkpoint, network_words, newest_run


@dataclasses.dataclass(frozen=True)
class WatchCommand:
    """Plays the best network of a run, or its latest: prints the returns of its games and films the first one."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="[RUN]")] = ""
    """Directory of a run, or a checkpoint; by default the newest run in ./runs that has a checkpoint."""
    episodes: int = 1
    """Games to play."""
    record_dir: str = ""
    """Directory of the video; by default watched/ of the run."""
    seed: Annotated[int, Range(0, 2**63 - 1)] = 0
    """Seed of the games."""
    trust: bool = False
    """Import the modules of environment, wrappers, algorithm and network that the run names: their code runs here."""
    which: Which = "best"
    """Network of a run: the one with the best evaluation, or the latest."""


def main(stop: Stop) -> None:
    """Plays what the command line says."""
    asked = tyro.cli(WatchCommand, prog=program(), registry=REGISTRY)
    check_ranges(asked)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    run = Path(asked.run) if asked.run else newest_run(RUNS, CHECKPOINTS)
    directory, checkpoint = found_checkpoint(run, asked.which)
    from apexrl.acting.evaluation import play_checkpoint
    from apexrl.networks.headers import load_header
    from apexrl.running.run_directory import played

    trust = Trust(is_blind=asked.trust, cure=trusting(asked.run, directory))
    header = load_header(checkpoint)
    command = played(directory, header, trust)
    record_dir = asked.record_dir or str(directory / "watched")
    evaluation = dataclasses.replace(
        command.evaluation, episodes=asked.episodes, checkpoint=str(checkpoint), record_dir=record_dir
    )
    say(f"plays {checkpoint}: {network_words(directory, header.counters.updates)}", flush=True)
    play_checkpoint(dataclasses.replace(command, evaluation=evaluation, seed=asked.seed), stop)


def trusting(named: str, run: Path) -> str:
    """Returns this program's command line with --trust, and with the run where it names none."""
    return f"{program()} {shlex.join([*sys.argv[1:], *([] if named else [str(run)]), '--trust'])}"


def run() -> None:
    """Runs the role, and exits."""
    run_role("watch", main)
