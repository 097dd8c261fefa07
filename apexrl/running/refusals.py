"""Command lines that mean nothing for a run on this machine, refused before anything is planned."""

import shlex
from collections.abc import Mapping
from pathlib import Path

from apexrl.agents.families import family_of
from apexrl.config.commands import RunCommand
from apexrl.config.fields import values_of
from apexrl.config.flags import Asked, explicit_replay
from apexrl.config.schedules import schedules_of
from apexrl.config.sections import ActingConfig, ReplayConfig
from apexrl.config.tables import table_spec
from apexrl.config.words import flag_of, sister
from apexrl.errors import ConfigError
from apexrl.running.run_directory import saved_environment
from apexrl.runs import CONFIG_FILE
from apexrl.types import StreamSpec

USED_WITHOUT_ACTORS = ("--capacity", "--priority-exponent", "--importance-exponent", "--tables")
PRIORITIES = ("priority_exponent", "importance_exponent")
OF_SERVERS = (  # beside `ActingConfig`: of actors and of a replay server that are the run's own
    "actor_device", "shards", "journal_dir", "journal_flush_seconds", "journal_snapshot_seconds", "max_gb",
)  # fmt: skip
PERIODS = ("evaluation_period_updates", "checkpoint_period_updates")  # of a reproducible run
PERIODS_SECONDS = (  # of others
    "checkpoint_period_seconds", "publish_period_seconds", "final_evaluation_seconds", "evaluation_period_seconds",
)  # fmt: skip


def check_asked(command_line: Asked[RunCommand], saved: RunCommand | None = None) -> None:
    """Raises ConfigError when flags are given that mean nothing for a run on this machine.

    Args:
      saved: the configuration of the run that is resumed or forked.
    """
    asked, flags = command_line.command, command_line.flags
    if asked.evaluation.checkpoint:
        checkpoint = shlex.quote(asked.evaluation.checkpoint)
        raise ConfigError(f"--checkpoint does not train; to watch one, say `{sister('watch')} {checkpoint}`")
    if flags(["replay_host", "learner_host"]):
        raise ConfigError(
            "--replay-host and --learner-host are for roles on several hosts: start actor.py, learner.py and replay.py "
            "there; here --bind-host chooses the address"
        )
    if asked.from_scratch and not (asked.resume or asked.fork):
        raise ConfigError(
            "--from-scratch trains a new network on the experience of a run: give its --resume DIR or --fork DIR, too"
        )
    if asked.at and not asked.fork:
        raise ConfigError("--at says where --fork DIR begins: give that, too")
    begins = [flag for flag, given in _beginnings(asked).items() if given]
    if asked.reproducible:
        _check_reproducible(command_line, begins)
    elif useless := flags(PERIODS):
        raise ConfigError(f"without --reproducible these mean nothing: leave out {' '.join(useless)}")
    if len(begins) > 1:
        raise ConfigError(f"{' and '.join(begins)} begin differently: give one of them")
    if asked.smoke and (begins or not asked.evaluator):
        raise ConfigError(f"--smoke tries everything once: leave out {' '.join([*begins, '--no-evaluator'])}")
    goes_on = saved is not None and saved.agent == asked.agent and not command_line.wants_help
    _check_use(command_line, command_line.onto(saved) if saved is not None and goes_on else asked)


def check_effect(asked: Asked[RunCommand], command: RunCommand, stream: StreamSpec) -> None:
    """Raises ConfigError when a flag is given that has no effect in this run, or a number is impossible in it."""
    idle = {**_without_effect(command, stream), **family_of(command.agent).idle(command, stream)}
    if useless := [name for name in idle if name in asked.given]:
        raise ConfigError(
            f"{flag_of(useless[0])} means nothing without {idle[useless[0]]}: leave it out, or give that, too"
        )


def _without_effect(command: RunCommand, stream: StreamSpec) -> dict[str, str]:
    """Returns the fields that have no effect in a run of whatever algorithm, with what would give them one."""
    tables = [table_spec(text) for text in explicit_replay(command).tables]
    rules = [
        (command.network.network, ("inputs",), "--network"),
        (not command.network.network, ("channels", "torso"), "the algorithm's own layers, which --network replaces"),
        (len(stream.frame_shape) > 1, ("channels", "torso"), "observations that are pictures"),
        (any(table.kind == "priority" for table in tables), PRIORITIES, "a table of the kind priority"),
    ]  # fmt: skip
    return {name: cure for has_effect, names, cure in rules if not has_effect for name in names}


def _check_use(command_line: Asked[RunCommand], asked: RunCommand) -> None:
    """Raises ConfigError when flags are given that mean nothing for this run, which may be one that goes on."""
    _check_watched(asked)
    flags = command_line.flags
    if asked.guest and asked.env != saved_environment(Path(asked.guest) / CONFIG_FILE):
        raise ConfigError(f"--guest learns on the environment of {asked.guest}: leave out --env and its settings")
    if asked.guest and (useless := flags([*values_of(ActingConfig()), *OF_SERVERS])):
        raise ConfigError(f"--guest has neither actors nor a replay server: leave out {' '.join(useless)}")
    frames = [name for name, schedule in schedules_of(asked.update).items() if schedule.frames]
    frames.append("total_frames")
    if asked.guest and (useless := flags(frames)):
        cure = "give --total-updates or --max-seconds, and numbers that change without :FRAMES"
        raise ConfigError(f"--guest begins with all frames that the run still holds: not {' '.join(useless)}; {cure}")
    if asked.from_journal:  # which has brought all of its frames at once
        given = flags(dict.fromkeys([*values_of(ActingConfig()), *values_of(ReplayConfig()), *OF_SERVERS, *frames]))
        if useless := [flag for flag in given if flag not in USED_WITHOUT_ACTORS]:
            raise ConfigError(f"--from-journal has neither actors nor a replay server: leave out {' '.join(useless)}")


def _check_watched(asked: RunCommand) -> None:
    if asked.stop_at_return is not None and (asked.reproducible or not asked.evaluator):
        cure = "leave out --reproducible and --no-evaluator, or give --evaluator"
        raise ConfigError(f"--stop-at-return needs an evaluator beside it: {cure}")
    for name in asked.callback:
        module, _, called = name.rpartition(":")
        if not all(part.isidentifier() for part in (*module.split("."), called)):
            raise ConfigError(f"--callback {name}: give module:name")
        if asked.callback.count(name) > 1:
            raise ConfigError(f"--callback {name} stands there twice: it would be told everything twice")


def _beginnings(asked: RunCommand) -> Mapping[str, str]:
    return {
        "--resume": asked.resume, "--fork": asked.fork, "--from-journal": asked.from_journal, "--guest": asked.guest
    }  # fmt: skip


def _check_reproducible(command_line: Asked[RunCommand], begins: list[str]) -> None:
    asked = command_line.command
    if begins:
        raise ConfigError(f"--reproducible begins a run and continues none: leave out {' '.join(begins)}")
    if {asked.learning.device, asked.actor_device, asked.learning.learner_devices} - {"auto", "cpu", ""}:
        raise ConfigError("--reproducible computes on the CPU: leave out --device, --learner-devices, --actor-device")
    if seconds := command_line.flags(PERIODS_SECONDS):
        periods = " and ".join(map(flag_of, PERIODS))
        raise ConfigError(f"--reproducible counts updates, not seconds: {periods} instead of {' '.join(seconds)}")
    if asked.wires.shards > 1:
        raise ConfigError("--reproducible has one replay: leave out --shards")
    if asked.acting.num_workers > 1:
        raise ConfigError("--reproducible has one process: give --environments-per-worker instead of --num-workers")
    if asked.replay.journal_dir not in ("auto", "off"):
        raise ConfigError("--reproducible keeps its experience in memory only: leave out --journal-dir")
    if useless := command_line.flags(["journal_flush_seconds", "journal_snapshot_seconds", "max_restarts", "keys"]):
        raise ConfigError(f"--reproducible has one process and no journal: leave out {' '.join(useless)}")
