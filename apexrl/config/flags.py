"""Command lines from the configuration's dataclasses, and back.

An algorithm's sections take the place of the commands' general ones, so its numbers are flags like all others.
"""

import dataclasses
import difflib
import shutil
import sys
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING
from typing import Any, Generic, NamedTuple, TypeVar

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from apexrl.agents.contract import Transitions, Want
from apexrl.agents.families import FAMILIES, family_of, records
from apexrl.config.commands import ActorCommand, Command, LearnerCommand, OfflineCommand, ReplayCommand, RunCommand
from apexrl.config.fields import check_ranges, values_of, with_values
from apexrl.config.help import HELP, show_help
from apexrl.config.schedules import changing_number
from apexrl.config.sections import DEFAULT_AGENT, Changing, PresetName, ReplayConfig, whole_number
from apexrl.config.tables import DISTINCT, TableSpec, logs_of, part_of, tables_of
from apexrl.config.words import Basis, flag_of, flags_in, gathered, program, words_of
from apexrl.errors import ConfigError
from apexrl.hosts import check_hosts
from apexrl.lines import is_utf8
from apexrl.types import StreamSpec

C = TypeVar("C", bound=Command)
FAMILY_SECTIONS = ("algorithm", "network", "update")
REPEATABLE = ("--wrapper", "--callback")
_SWAPPED = str.maketrans("-_", "_-")
OF_RUNS = ("resume", "fork", "from_journal", "guest")  # flags that begin with another run
STYLE = (tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes)
KINDS: Mapping[str, type[Command]] = {
    "train": RunCommand, "replay": ReplayCommand, "learner": LearnerCommand, "learner --from-journal": OfflineCommand,
    "actor": ActorCommand,
}  # fmt: skip
REGISTRY = ConstructorRegistry()
PARSING: Mapping[str, Any] = {"config": STYLE, "registry": REGISTRY}


def default_command(command: type[C], agent: str = DEFAULT_AGENT) -> C:
    """Returns a command with the defaults of an algorithm.

    Raises: ConfigError when there is no such algorithm.
    """
    family, fields = family_of(agent), command.__dataclass_fields__
    sections: dict[str, Any] = {
        name: getattr(family, name) for name in FAMILY_SECTIONS if name in fields and fields[name].default is MISSING
    }
    return command(agent=agent, **sections)


def with_preset(command: C, preset: str) -> C:
    """Returns the command on top of a preset, which it names then: its algorithm's defaults for a missing PresetName.

    Raises: ConfigError when there is none of that name.
    """
    presets = family_of(command.agent).presets
    if preset not in (known := dict.fromkeys([*typing.get_args(PresetName), *presets])):
        others = [agent for agent, family in FAMILIES.items() if preset in family.presets]
        hint = f"; {preset} is one of --agent {' or '.join(others)}" if others else ""
        raise ConfigError(f"--preset {preset}: --agent {command.agent} has {', '.join(known)}{hint}")
    return dataclasses.replace(with_sections(command, presets.get(preset, {})), preset=preset)


def with_sections(command: C, sections: Mapping[Any, Mapping[str, Any]]) -> C:
    """Returns the command with other values in the sections that it has; it ignores the others.

    Raises: TypeError when a section has no field of a name.
    """
    own = [values for name, values in sections.items() if dataclasses.is_dataclass(getattr(command, name, None))]
    return with_values(command, {name: value for values in own for name, value in values.items()})


def parse(command: type[C], arguments: Sequence[str] | None = None) -> C:
    """Returns the command that the arguments describe, on top of its preset; ends the program when they are wrong.

    The preset auto is that for a GPU where there is an NVIDIA one, else that for two cores. The algorithm of a role is
    the default unless --agent names one, whatever its environment is: the other roles do not know that.

    Raises: ConfigError when a number is outside its range, two contradict each other, or there is no such preset.
    """
    given = sys.argv[1:] if arguments is None else arguments
    basis = Basis.of(given)
    usual = "gpu" if shutil.which("nvidia-smi") else "two-cores"
    preset = usual if basis.preset in ("", "auto") else basis.preset
    agent = basis.algorithm if issubclass(command, RunCommand) else basis.agent or DEFAULT_AGENT
    default = with_preset(default_command(command, agent), preset)
    parsed = dataclasses.replace(Asked.of(default, given).onto(default), preset=preset)
    check_together(parsed)
    return parsed


class Asked(NamedTuple, Generic[C]):
    """A command line that was parsed once, on top of some defaults."""

    command: C
    given: frozenset[str]  # the names of the fields that it gives, whatever their values
    wants_help: bool
    words: Sequence[str]  # as they were given

    @classmethod
    def of(cls, default: C, arguments: Sequence[str]) -> "Asked[C]":
        """Parses arguments; a wish for help waits for `onto`. Ends the program when they are malformed.

        Raises: ConfigError when a number is outside its range, a text is empty that needs something, or a flag is one
          of another command.
        """
        words = [word for word in arguments if word not in HELP]
        for flag in REPEATABLE:
            words = gathered(words, flag)
        check_names(default, words)
        command = tyro.cli(type(default), args=words, default=default, prog=program(), **PARSING)
        check_ranges(command)
        if issubclass(type(default), RunCommand) and (odd := [word for word in words if not is_utf8(word)]):
            raise ConfigError(f"{odd[0]!r} is not UTF-8, as the files of a run are: give it another name")
        given = frozenset(name_of(flag) for flag, _ in flags_in(words))
        values, usual = values_of(command), values_of(default)
        if empty := sorted(name for name in given & values.keys() if values[name] == "" != usual[name]):
            raise ConfigError(f"{flag_of(empty[0])} is empty: leave it out for {usual[empty[0]]!r}, or give a text")
        return cls(command, given, bool(HELP.intersection(arguments)), arguments)

    def onto(self, default: C) -> C:
        """Returns other defaults of the same algorithm with the values that were given.

        It ends the program with the help, which shows the defaults, where that was asked for.
        """
        if self.wants_help:
            show_help(default, program(), **PARSING)
        return with_values(default, {name: v for name, v in values_of(self.command).items() if name in self.given})

    def flags(self, names: Iterable[str]) -> list[str]:
        """Returns the flags of the fields that were given, out of some names."""
        return [flag_of(name) for name in names if name in self.given]


def names_agent(agent: str, default: Command, arguments: Sequence[str]) -> bool:
    """Returns whether arguments have a flag that an algorithm knows, and the one of `default` does not."""
    given = {name_of(flag) for flag, _ in flags_in(arguments)} - values_of(default).keys()
    return not given.isdisjoint(values_of(default_command(type(default), agent)))


def check_names(default: Command, arguments: Sequence[str]) -> None:
    """Raises ConfigError when a flag belongs to other commands or algorithms, or to none."""
    own = values_of(default).keys()
    for flag, values in flags_in(arguments):
        name = name_of(flag)
        if name in OF_RUNS and getattr(default, name, None) == "" and not any(values):
            raise ConfigError(f"{flag} is empty: give the directory of a run")
        if name in own or flag == "--":
            continue
        if theirs := [of for of, kind in KINDS.items() if name in values_of(default_command(kind, default.agent))]:
            raise ConfigError(f"{flag} means nothing here: it is a flag of {', '.join(theirs)}")
        if others := [agent for agent in FAMILIES if name in values_of(default_command(type(default), agent))]:
            raise ConfigError(f"{flag} is a flag of --agent {' or '.join(others)}, this is --agent {default.agent}")
        flags = [flag_of(of) for of in own]
        near = [of for of in flags if flag.startswith(of)] or difflib.get_close_matches(flag, flags, 1, cutoff=0.75)
        meant = f", did you mean {near[0]}? All of them:" if near else ":"
        raise ConfigError(f"there is no flag {flag}{meant} {program()} --help")


@REGISTRY.primitive_rule
def _whole_number_rule(kind: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[int] | None:
    if kind.type is not int:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT",
        instance_from_str=lambda words: whole_number(words[0]),
        is_instance=lambda value: isinstance(value, int) and not isinstance(value, bool),
        str_from_instance=lambda value: [str(value)],
    )


@REGISTRY.primitive_rule
def _changing_rule(kind: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Changing] | None:
    if kind.type != Changing:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="FLOAT|START:END:FRAMES",
        instance_from_str=lambda words: changing_number(words[0]),
        is_instance=lambda value: isinstance(value, int | float | str),
        str_from_instance=lambda value: [str(value)],
    )


def name_of(flag: str) -> str:
    """Returns the field of a flag; no flag has an underscore."""
    return flag.removeprefix("--").removeprefix("no-").translate(_SWAPPED)


def explicit_replay(command: ReplayCommand | RunCommand | OfflineCommand) -> ReplayConfig:
    """Returns the replay's numbers with tables: those of the algorithm where none were asked for.

    Without actors nobody waits for anybody.
    """
    replay = command.replay
    if not isinstance(command, ReplayCommand) and command.from_journal:
        replay = dataclasses.replace(replay, samples_per_insert=0.0, min_size_to_sample=1)
    own = family_of(command.agent).tables(command.update)
    tables = replay.tables or map(str, records(own, TableSpec, "Family.tables"))
    return dataclasses.replace(replay, tables=tuple(tables))


def of_own_shard(command: ReplayCommand) -> ReplayCommand:
    """Returns the command of one of several replay servers alone: its ports, seed and tables, its part of the numbers.

    Raises: ConfigError when there are fewer servers.
    """
    num_shards, shard = command.wires.shards, command.shard
    if shard >= num_shards:
        raise ConfigError(f"--shard {shard}: with --shards {num_shards} give one from 0 to {num_shards - 1}")
    # One seed would draw the same positions of every shard.
    seed, wires = command.seed + shard, command.wires.of_shard(shard)
    return dataclasses.replace(command, seed=seed, wires=wires, replay=part_of(explicit_replay(command), num_shards))


def check_together(command: Command, stream: StreamSpec | None = None) -> None:
    """Raises ConfigError when values contradict each other; only a command on top of its preset can tell.

    Args:
      stream: the spec of the algorithm's unrolls; the tables have to fit it, too.
    """
    if isinstance(command, LearnerCommand) and command.learner_host_rank >= command.learner_hosts:
        raise ConfigError(
            f"--learner-host-rank {command.learner_host_rank}: with --learner-hosts {command.learner_hosts} give one "
            f"from 0 to {command.learner_hosts - 1}"
        )
    if isinstance(command, ActorCommand | LearnerCommand | ReplayCommand | RunCommand):
        check_hosts(command)
        check_ranges(command.wires.of_shard(command.wires.shards - 1))
    if not isinstance(command, ReplayCommand | RunCommand | OfflineCommand):
        return
    replay = explicit_replay(command)
    if replay.min_size_to_sample > replay.capacity:
        raise ConfigError(f"--min-size-to-sample {replay.min_size_to_sample} is more than --capacity {replay.capacity}")
    if isinstance(command, ReplayCommand):
        logs_of(replay)
        return
    tables = tables_of(replay, 1)
    flag = family_of(command.agent).raw_rewards_flag(command.update)
    if flag and isinstance(command, RunCommand) and command.env.clip_rewards != "no":
        raise ConfigError(f"{flag} needs rewards that nobody has clipped: give --clip-rewards no, too")
    if flag and command.learning.scale_rewards:
        raise ConfigError(f"{flag} needs the environment's own rewards: give --no-scale-rewards, too")
    held = -(-replay.capacity // command.algorithm.unroll_starts)
    for want in wants_of(command):
        kinds = kinds_for(want, stream)
        if want.table not in tables or tables[want.table].kind not in kinds:
            raise ConfigError(
                f"--tables {' '.join(replay.tables)}: --agent {command.agent} needs a table named {want.table}, "
                f"of the kind {' or '.join(kinds)}"
            )
        if want.is_replaced and tables[want.table].capacity:
            walking = f"{want.table} walks through whole episodes, however old"
            raise ConfigError(f"--tables: {walking}: leave out its capacity, or give another --replay-state")
        most = min(tables[want.table].capacity or held, held)
        if tables[want.table].kind in DISTINCT and want.batch_size > most:
            raise ConfigError(
                f"--tables {' '.join(replay.tables)}: {want.table} holds {most} unrolls, and --agent {command.agent} "
                f"draws {want.batch_size} different ones at once: give a larger capacity or a smaller --batch-size"
            )


def actor_command(command: RunCommand) -> ActorCommand:
    """Returns the actors' part of a run."""
    return ActorCommand(
        **_shared(command), env=command.env, wires=command.wires, algorithm=command.algorithm, acting=command.acting,
        evaluation=command.evaluation, device=command.actor_device, network=command.network.network,
    )  # fmt: skip


def learner_command(command: RunCommand) -> LearnerCommand:
    """Returns the learner's part of a run, an `OfflineCommand` where that has no actors."""
    learner = LearnerCommand(
        **_shared(command), wires=command.wires, algorithm=command.algorithm, update=command.update,
        network=command.network, learning=command.learning, run_dir=command.run_dir,
    )  # fmt: skip
    if command.has_actors:
        return learner
    return OfflineCommand(
        **vars(learner), replay=command.replay, from_journal=command.from_journal, guest=bool(command.guest)
    )


def replay_command(command: RunCommand) -> ReplayCommand:
    """Returns the replay's part of a run, with the tables of its algorithm."""
    default = with_preset(default_command(ReplayCommand, command.agent), command.preset)  # the tables are explicit
    return ReplayCommand(
        **_shared(command), wires=command.wires, replay=explicit_replay(command), update=default.update
    )


def _shared(command: Command) -> dict[str, Any]:
    return {field.name: getattr(command, field.name) for field in dataclasses.fields(Command)}


def wants_of(command: RunCommand | LearnerCommand) -> tuple[Want, ...]:
    """Returns the wants of a command's learner: the batches that it asks the replay server for."""
    return records(family_of(command.agent).wants(command.algorithm, command.update), Want, "Family.wants")


def kinds_for(want: Want, stream: StreamSpec | None) -> tuple[str, ...]:
    """Returns the kinds of table that serve a learner's want.

    Raises: ConfigError when no table of such a stream does.
    """
    if isinstance(want.view, Transitions):
        if stream is not None and stream.has_unroll_priorities:
            raise ConfigError(f"--tables: {want.table} cannot hand out transitions: only unrolls have priorities")
        return ("priority",)
    is_weighted = not want.is_replaced  # what a walk puts in the place of an unroll has not its importance weight
    if is_weighted and (stream is None or stream.has_unroll_priorities):
        return (*DISTINCT, "fifo", "priority")
    return (*DISTINCT, "fifo")


def to_flags(command: Command) -> list[str]:
    """Returns arguments from which `parse` makes this command, whose preset is not auto; defaults are left out."""
    default = with_preset(default_command(type(command), command.agent), command.preset)
    usual = values_of(default)
    changed = {name: value for name, value in values_of(command).items() if value != usual[name]}
    named = {"agent": command.agent, "preset": command.preset} | changed
    return [word for name, value in named.items() for word in words_of(flag_of(name), value)]
