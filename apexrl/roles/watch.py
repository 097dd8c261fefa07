"""Plays the best network of a run, and films it: `apexrl watch [RUN]`."""

import dataclasses
import os
from pathlib import Path
from typing import Annotated

import tyro

from apexrl.config import ActorCommand, EnvConfig, EvaluationConfig, Range
from apexrl.errors import ConfigError
from apexrl.flags import REGISTRY, check_ranges, default_command, program
from apexrl.lifecycle import Stop, run_role
from apexrl.runs import CONFIG_FILE, RUNS, newest_run

CHECKPOINTS = ("checkpoints/best.safetensors", "checkpoints/latest.safetensors")  # the first that there is


@dataclasses.dataclass(frozen=True)
class WatchCommand:
    """Plays the best network of a run: prints the returns of its games and films the first one."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="[RUN]")] = ""
    """Directory of a run, or a checkpoint; by default the newest run in ./runs that has a checkpoint."""
    episodes: int = 1
    """Games to play."""
    record_dir: str = ""
    """Directory of the video; by default watched/ of the run."""
    seed: Annotated[int, Range(0)] = 0
    """Seed of the games."""


def main(stop: Stop) -> None:
    """Plays what the command line says."""
    asked = tyro.cli(WatchCommand, prog=program(), registry=REGISTRY)
    check_ranges(asked)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    directory, checkpoint = found(asked.run)
    from apexrl.acting.evaluation import play_checkpoint

    command = played(directory, checkpoint)
    record_dir = asked.record_dir or str(directory / "watched")
    evaluation = EvaluationConfig(
        episodes=asked.episodes, checkpoint=str(checkpoint), record_dir=record_dir,
    )  # fmt: skip
    print(f"plays {checkpoint}", flush=True)
    play_checkpoint(dataclasses.replace(command, evaluation=evaluation, seed=asked.seed), stop)


def found(run: str) -> tuple[Path, Path]:
    """Returns the directory of a run and the checkpoint to play, by either of them, or of the newest run for "".

    Raises: ConfigError when there is none.
    """
    path = Path(run) if run else newest_run(RUNS, CHECKPOINTS)
    if path.is_file():
        directory = path.parent.parent if (path.parent.parent / CONFIG_FILE).is_file() else path.parent
        return directory, path
    for name in CHECKPOINTS:
        if (path / name).is_file():
            return path, path / name
    raise ConfigError(f"{path} has no {' or '.join(CHECKPOINTS)}: give the directory of a run, or a checkpoint")


def played(directory: Path, checkpoint: Path) -> ActorCommand:
    """Returns the command that plays a checkpoint in its run's environment; without a run, in the one that it names.

    Raises: ConfigError or WireError when the run's configuration or the checkpoint cannot be read.
    """
    if (directory / CONFIG_FILE).is_file():
        from apexrl.running.run_directory import read_config

        run, _ = read_config(directory / CONFIG_FILE)
        return ActorCommand(agent=run.agent, preset=run.preset, env=run.env, algorithm=run.algorithm)
    from apexrl.networks.checkpoint import load_header

    header = load_header(checkpoint)
    env = EnvConfig.of_variant(header.spec.env, header.spec.variant, header.spec.stacked_frames)
    return dataclasses.replace(default_command(ActorCommand, header.agent), env=env)


def run() -> None:
    """Runs the role, and exits."""
    run_role("watch", main)


if __name__ == "__main__":
    run()
