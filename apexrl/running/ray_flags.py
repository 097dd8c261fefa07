"""The command line of a run on a Ray cluster: a few flags of its own, all others are those of run.sh."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from apexrl.config.fields import check_ranges
from apexrl.config.sections import Range
from apexrl.config.words import value_given
from apexrl.errors import ConfigError

PATH_FLAGS = ("--run-dir", "--resume", "--fork", "--journal-dir", "--record-dir", "--keys", "--mix-journal")
WORDS = ("", "auto", "off")  # values of path flags that are no paths


@dataclasses.dataclass(frozen=True)
class RayConfig:
    """The flags of a run for Ray. All other flags are those of run.sh; `--num-workers auto` follows the nodes."""

    ray_address: str = ""
    """The cluster: auto for the one of this machine, or HOST:PORT; by default RAY_ADDRESS."""
    ray_namespace: str = ""
    """Name of the run among those of the cluster; by default the name of its directory."""
    ray_wait_seconds: float = 300.0
    """Seconds to wait for CPUs and GPUs that the cluster does not have yet."""
    ray_patience_seconds: Annotated[float, Range(15)] = 45.0  # a group is silent while its processes end
    """Seconds of silence after which the driver, the registry or a group counts as gone. Ray itself gives a lost head
    up after 60."""


def divided(arguments: Sequence[str]) -> tuple[RayConfig, list[str], int]:
    """Returns Ray's flags, those of the run with whole paths, and the number of actor processes; 0: as many as fit.

    Raises: ConfigError when a flag makes no sense on a cluster.
    """
    ray_flags: list[str] = []
    run_flags: list[str] = []
    workers, words = "auto", iter(arguments)
    for word in words:
        name, has_value, value = word.partition("=")
        if not name.startswith("--ray-") and name not in (*PATH_FLAGS, "--num-workers"):
            run_flags.append(word)
            continue
        value = value if has_value else next(words, "")
        if name.startswith("--ray-"):
            ray_flags += [name, value]
        elif name in PATH_FLAGS:
            place, share, part = value.rpartition("=") if name == "--mix-journal" else (value, "", "")
            run_flags += [name, value if place in WORDS else f"{Path(place).resolve()}{share}{part}"]
        else:
            workers = value
            run_flags += [name, value] if value != "auto" else []
    if "--help" in run_flags:
        ray_flags = ["--help"]
    config = tyro.cli(RayConfig, args=ray_flags, prog="python -m apexrl.running.ray_cluster")
    check_ranges(config)
    if workers != "auto" and (not workers.isdecimal() or workers == "0"):
        raise ConfigError(f"--num-workers {workers}: give a number from 1 on, or auto")
    for flag in ("--guest", "--from-journal", "--reproducible"):
        if value_given(flag, run_flags) or flag in run_flags:
            raise ConfigError(f"{flag} needs no cluster: give it to run.sh")
    for flag in ("--stop-at-return", "--callback"):
        if value_given(flag, run_flags):
            raise ConfigError(f"{flag} is not known on a cluster: give --total-frames or --max-seconds")
    return config, run_flags, 0 if workers == "auto" else int(workers)
