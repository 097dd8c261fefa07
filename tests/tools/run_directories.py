"""Run directories as a learner and a launcher leave them, without a run."""

import dataclasses
from pathlib import Path

from apexrl.config.commands import RunCommand
from apexrl.config.flags import default_command, with_preset, with_sections
from apexrl.config.sections import EnvConfig
from apexrl.files import write_json
from apexrl.learning.record.run_record import CURVE_COLUMNS
from apexrl.learning.record.status_file import STATUS_FILE, Status
from apexrl.networks.headers import Counters
from apexrl.running.run_directory import save_config
from apexrl.runs import CURVE_FILE
from apexrl.types import LogPosition


def write_run(directory: Path, returns, seed=0, env="Catch-v0", frames=1000, agent="apex-dqn", **update) -> Path:
    """Writes a run with an evaluation every `frames` frames and 60 seconds; keywords change its settings."""
    command = with_preset(default_command(RunCommand, agent), "small")
    own = {name: update.pop(name) for name in list(update) if name in command.__dataclass_fields__}
    command = dataclasses.replace(with_sections(command, {"update": update}), **own)
    command = dataclasses.replace(command, seed=seed, run_dir=str(directory), env=EnvConfig(env), max_seconds=seed)
    directory.mkdir(parents=True, exist_ok=True)
    save_config(command)
    rows = [f"{60 * i},{frames * i},{10 * i},10,{value},0,{value - 1},{value + 1}" for i, value in enumerate(returns)]
    (directory / CURVE_FILE).write_text("\n".join([CURVE_COLUMNS, *rows, ""]))
    last = max(len(rows) - 1, 0)
    log = LogPosition(transitions=frames * last)
    counters = Counters(updates=10 * last, logs=(log,), transitions_sampled=4 * frames * last, seconds=60.0 * last)
    metrics = {"evaluation/params_version": 10.0 * last}
    write_json(directory / STATUS_FILE, Status(env, frames * last, counters, metrics, ""))
    return directory
