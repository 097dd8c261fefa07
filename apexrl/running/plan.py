"""The plan of a run on this machine: sizes that fit its cores, memory and GPU, checked before anything starts."""

import bisect
import dataclasses
import logging
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from apexrl.agents.contract import Family, check_normalizable
from apexrl.agents.families import family_of, stream_of
from apexrl.config.commands import RunCommand
from apexrl.config.fields import with_values
from apexrl.config.flags import (
    Asked,
    check_together,
    default_command,
    explicit_replay,
    learner_command,
    name_of,
    wants_of,
    with_preset,
)
from apexrl.config.presets import VECTOR_AGENT, flags_for
from apexrl.config.sections import (
    DEFAULT_AGENT,
    AlgorithmConfig,
    UpdateConfig,
)
from apexrl.config.tables import TableConfig, part_of, tables_of
from apexrl.config.words import flag_of, value_given, words_of
from apexrl.errors import ConfigError
from apexrl.hosts import EVERYWHERE, at_port
from apexrl.learning.devices import devices_of
from apexrl.learning.experience.journal_client import check_usable, journal_transitions
from apexrl.learning.experience.mixed_log import WITH_ACTORS, Share
from apexrl.learning.experience.sizes import DEVICE_RESERVE_BYTES, bytes_needed
from apexrl.learning.goal import ways_of
from apexrl.learning.sharing import divided_sizes, share_of
from apexrl.net.actor_sessions import MAX_ACTORS, MAX_SLOTS
from apexrl.net.insert_checks import why_impossible, why_too_large
from apexrl.networks.config import chosen_fields
from apexrl.networks.headers import Identity
from apexrl.replay.journal import identity_of
from apexrl.replay.replay import ring_unrolls
from apexrl.running.environment_look import look_at
from apexrl.running.machine import Machine, fitted, fitting_preset, sizes
from apexrl.running.ports import from_base
from apexrl.running.refusals import check_effect
from apexrl.running.run_directory import config_beside
from apexrl.running.torch_look import Ask, Question, here
from apexrl.runs import new_run
from apexrl.types import EnvironmentSpec, StreamSpec

logger = logging.getLogger("run")

STOCHASTIC = frozenset({"Corridor-v0"})  # the best policy without a memory is random: no greedy one solves these

MEASURES = ("normalize_observations", "scale_rewards")  # of a run, and of all who learn from its log
STREAM_SETTINGS = (  # of the environment
    "env", "env_kwargs", "wrapper", "grayscale", "resize", "frame_stack", "clip_rewards", "life_loss_terminal",
    "repeat_action_probability", "action_mask",
)  # fmt: skip

SMOKE: Mapping[str, Any] = {
    "max_episode_frames": 4_000, "capacity": 20_000, "min_size_to_sample": 2_000, "samples_per_insert": 1.0,
    "episodes": 2, "evaluation_period_seconds": 10.0,
    "max_seconds": 20.0,  # after the first frame, at least
}  # fmt: skip


class Plan(NamedTuple):
    """A run with every number filled in."""

    command: RunCommand
    spec: StreamSpec
    machine: Machine
    known: Sequence[str] = ()  # the flags for its environment in presets.toml, where it began with them


def make_plan(asked: Asked[RunCommand], saved: RunCommand | None, ask: Ask = here) -> Plan:
    """Returns the plan for the arguments: on top of a saved run, or of the preset that fits.

    Args:
      asked: the arguments on top of the papers' defaults. A wish for help shows those of the plan, and ends here.
      saved: the configuration of the run that is continued.
      ask: asks for what only torch can tell.
    Where no --agent is given, the actions of the environment may need another one than `asked` was parsed for.

    Raises: ConfigError when the environment cannot be made, or does not fit this machine.
    """
    command = asked.command
    verb = "forked" if command.fork else "resumed"
    if saved is not None:
        _refuse(_changed(command, saved, ["agent"]), verb)  # another algorithm has other flags
        if command.preset == "auto":  # which a run has chosen by then
            asked = asked._replace(given=asked.given - {"preset"})
        command = asked.onto(saved)
    if asked.command.name and command.run_dir:
        raise ConfigError(f"--name is of a new directory, and this run's is {command.run_dir}: leave --name out")
    device, actor_device = ("cpu", "cpu") if command.reproducible else (command.learning.device, command.actor_device)
    known = _known_flags(asked) if saved is None else []
    presented = Asked.of(command, known).command if known else command
    environment, parts = look_at(presented.env, command.wires.patience_seconds)  # another process loads torch meanwhile
    is_free = saved is None and not command.guest and "agent" not in asked.given
    usual = VECTOR_AGENT if environment.action_bounds else DEFAULT_AGENT
    if is_free and command.agent in (VECTOR_AGENT, DEFAULT_AGENT) and command.agent != usual:
        default = dataclasses.replace(default_command(RunCommand, usual), env=command.env)
        default = with_values(default, {name: getattr(command.learning, name) for name in MEASURES})
        asked, known = from_base(Asked.of(default, asked.words)), []
        command = asked.command
    machine = Machine.here(ask, device, command.learning.memory_gb, actor_device)
    if saved is not None:
        _check_kept(command, saved, environment, verb)
    basis = saved if saved is not None else _defaults(command, machine, environment, known)
    command = asked.onto(basis)
    host = EVERYWHERE.get(command.wires.bind_host, command.wires.bind_host)  # where roles of this machine find servers
    command = with_values(command, {"preset": basis.preset, "replay_host": host, "learner_host": host})
    kept = {"journal_dir": command.replay.journal_dir, "record_dir": command.evaluation.record_dir}
    for name, directory in {**kept, "keys": command.wires.keys}.items():
        if directory not in ("auto", "off", ""):  # a later start may be in another directory
            command = with_values(command, {name: str(Path(directory).resolve())})
    if command.network.network and "inputs" not in asked.given:
        command = with_values(command, {"inputs": parts})
    starts = _fitting_starts(command, environment, "unroll_starts" in asked.given)
    command = with_values(command, {"unroll_starts": starts})
    stream = stream_of(command.agent, command.algorithm, environment)
    command = _with_mix(_with_source(command, stream), stream)
    check_together(command, stream)
    check_normalizable(environment, command.learning)
    check_effect(asked, command, stream)
    command = _with_shards(command, asked.given, saved is None, machine.num_gpus)
    command = fitted(command, machine, stream, is_asked_for="capacity" in asked.given or command.reproducible)
    if saved is not None and command.replay.capacity < basis.replay.capacity:
        logger.warning(
            "%.1f GB of memory are free: of --capacity %d the newest %d transitions stay, and so for later starts",
            machine.memory_bytes / 1e9, basis.replay.capacity, command.replay.capacity,
        )  # fmt: skip
    ask(Question(network=Identity.of(stream, command.agent, command.network)))
    if not command.run_dir:
        command = dataclasses.replace(command, run_dir=new_run(command.env.env, asked.words))
    return Plan(command, stream, machine, known)


def _defaults(asked: RunCommand, machine: Machine, environment: EnvironmentSpec, known: Sequence[str]) -> RunCommand:
    """Returns the algorithm's preset that was asked for or fits, with sizes that follow from this machine."""
    presets = family_of(asked.agent).presets
    preset = asked.preset if asked.preset != "auto" else value_given("--preset", known)
    preset = preset or fitting_preset(machine, environment, presets)
    command = with_preset(dataclasses.replace(default_command(RunCommand, asked.agent), env=asked.env), preset)
    if len(environment.frame_shape) > 1:
        command = with_values(command, {"normalize_observations": False})  # of a preset, which is for vectors
    if not asked.reproducible:  # there the sizes are the same on every machine
        command = with_values(command, sizes(machine, environment))
    if known:
        command = Asked.of(command, known).command
    if asked.from_journal:
        journal = Path(asked.from_journal)
        command = with_values(command, {"capacity": journal_transitions(journal, identity_of(journal).spec)})
    if asked.guest or (asked.from_journal and config_beside(Path(asked.from_journal)) is not None):
        # `first_default` has put these there
        command = with_values(command, {name: getattr(asked.learning, name) for name in MEASURES})
    if asked.guest:
        command = with_values(command, {"capacity": asked.replay.capacity})
        command = dataclasses.replace(command, wires=asked.wires)
    return with_values(command, SMOKE) if asked.smoke else command


def _with_source(command: RunCommand, stream: StreamSpec) -> RunCommand:
    """Returns the command with the whole path of the journal, or of the run, whose experience it learns from.

    Raises: ConfigError when a journal is of another stream.
    """
    if command.from_journal:
        journal = Path(command.from_journal).resolve()
        check_usable(journal, identity_of(journal).spec, stream)
        return dataclasses.replace(command, from_journal=str(journal))
    return dataclasses.replace(command, guest=str(Path(command.guest).resolve())) if command.guest else command


def _with_mix(command: RunCommand, stream: StreamSpec) -> RunCommand:
    """Returns the command with the whole path of the journal that has a share of its batches, if one has.

    Raises: ConfigError when the run has no actors, or another stream.
    """
    if (mixed := Share.of(command.learning)) is None:
        return command
    if command.reproducible or not command.has_actors:
        raise ConfigError(f"--mix-journal {WITH_ACTORS} and --reproducible")
    journal = mixed.directory.resolve()
    check_usable(journal, identity_of(journal).spec, stream)
    return with_values(command, {"mix_journal": f"{journal}={mixed.share}"})


def _fitting_starts(command: RunCommand, environment: EnvironmentSpec, is_asked_for: bool) -> int:
    """Returns the starts of an unroll that is short enough for a message: the command's where it is.

    Raises: ConfigError when no log can hold them, or when their length was asked for.
    """

    def stream(starts: int) -> StreamSpec:
        algorithm = dataclasses.replace(command.algorithm, unroll_starts=starts)
        return stream_of(command.agent, algorithm, environment)

    starts = command.algorithm.unroll_starts
    fault, too_large = why_impossible(stream(starts)), why_too_large(stream(starts))
    if not fault:
        return starts
    frames = f"environment {environment.env!r} has frames {environment.frame_shape} of {environment.frame_dtype}"
    if fault != too_large:
        raise ConfigError(f"{frames}: {fault}")
    most = bisect.bisect_left(range(1, starts), True, key=lambda shorter: bool(why_too_large(stream(shorter))))
    if not most:
        cure = "make them smaller with --grayscale, --resize, or a --wrapper module:name"
        raise ConfigError(f"{frames}: the shortest unroll of them is larger than a message may be: {cure}")
    if is_asked_for:
        raise ConfigError(f"{frames}: {too_large} to {most}")
    logger.info("%s: --unroll-starts is %d, not %d: a message holds no more", frames, most, starts)
    return most


def _check_kept(asked: RunCommand, saved: RunCommand, environment: EnvironmentSpec, verb: str) -> None:
    """Raises ConfigError when the experience or the checkpoint of a run that goes on cannot follow the changed flags.

    The experience follows no other stream, the checkpoint no other network and no other optimizer.
    """
    flags = _changed(asked, saved, ["agent", "preset", "from_journal", "guest"])
    # A fork has a directory of its own, and its journal lies there.
    other = (asked, saved, ["run_dir"]) if verb == "resumed" else (asked.replay, saved.replay, ["journal_dir"])
    flags += _changed(*other) + _changed(asked.env, saved.env, STREAM_SETTINGS)
    flags += _changed(asked.wires, saved.wires, ["shards"])
    if not flags:
        flags += _stream_flags(asked.algorithm, saved.algorithm, environment, family_of(saved.agent))
    _refuse(flags, verb)
    if not asked.from_scratch:
        kept = asked.update.kept
        flags = [flag_of(name) for name, value in saved.update.kept.items() if kept[name] != value]
        flags += _changed(asked.learning, saved.learning, ["normalize_observations", "scale_rewards"])
        flags += _changed(asked.network, saved.network)
        _refuse(flags, verb, "give --from-scratch, too, for a new network that learns from its experience")


def _refuse(flags: list[str], verb: str, cure: str = "begin a new run") -> None:
    if flags:
        raise ConfigError(f"a run that is {verb} cannot change {' '.join(flags)}: leave that out, or {cure}")


def _changed(now: Any, before: Any, names: Iterable[str] | None = None) -> list[str]:
    """Returns the flags of the fields that differ, out of those of some names, or of all."""
    names = [field.name for field in dataclasses.fields(before)] if names is None else names
    return [flag_of(name) for name in names if getattr(now, name) != getattr(before, name)]


def _stream_flags(
    now: AlgorithmConfig, before: AlgorithmConfig, environment: EnvironmentSpec, family: Family
) -> list[str]:
    """Returns the flags that change the content of an environment's unrolls."""
    stream = family.stream(before, environment)
    if family.stream(now, environment) == stream:
        return []
    names = [field.name for field in dataclasses.fields(before)]
    alone = {name: dataclasses.replace(before, **{name: getattr(now, name)}) for name in names}
    flags = [flag_of(name) for name in names if family.stream(alone[name], environment) != stream]
    return flags or _changed(now, before)  # only together


def _known_flags(asked: Asked[RunCommand]) -> list[str]:
    """Returns the flags of `presets.toml` that a run begins with, but for those given.

    Only a run with actors that asked for no preset begins with them.
    """
    command = asked.command
    if command.preset != "auto" or not command.has_actors:
        return []
    has_end = bool(command.max_seconds or command.learning.total_updates)
    flags = ((flag_of(name), value) for name, value in flags_for(command.env.env, command.agent, has_end).items())
    return [word for flag, value in flags if name_of(flag) not in asked.given for word in words_of(flag, value)]


def _with_shards(command: RunCommand, given: Collection[str], is_new: bool, num_gpus: int) -> RunCommand:
    """Returns the command with a shard for each learner and an actor process for each shard, unless told otherwise.

    Raises: ConfigError when learners, shards, batch and actor processes do not fit each other, or no server takes them.
    """
    num_learners, wires, acting = command.learning.num_learners, command.wires, command.acting
    if num_learners > 1 and (command.from_journal or command.reproducible):
        raise ConfigError("--num-learners needs a replay server: leave out --from-journal and --reproducible")
    if is_new and command.has_actors and "shards" not in given and wires.shards == 1:
        wires = dataclasses.replace(wires, shards=num_learners)
    if wires.shards % num_learners:
        raise ConfigError(f"--num-learners {num_learners} does not divide --shards {wires.shards}, as it has to")
    if command.has_actors and acting.num_workers < wires.shards:
        if "num_workers" in given:
            raise ConfigError(
                f"--num-workers {acting.num_workers} leaves some of {wires.shards} shards without actors: give more"
            )
        acting = dataclasses.replace(acting, num_workers=wires.shards)
    own_workers = -(-acting.num_workers // wires.shards)  # of the first shard, which has the most
    if command.has_actors and (own_workers > MAX_ACTORS or own_workers * acting.environments_per_worker > MAX_SLOTS):
        raise ConfigError(
            f"--num-workers {acting.num_workers} of --environments-per-worker {acting.environments_per_worker} are "
            f"more than the {MAX_ACTORS:,} processes and {MAX_SLOTS:,} environments of a replay server: give less, or "
            "more --shards"
        )
    command = dataclasses.replace(command, wires=wires, acting=acting)
    share = share_of(learner_command(command), num_learners)
    check_together(
        dataclasses.replace(command, update=share.update, replay=part_of(explicit_replay(command), wires.shards))
    )
    devices_of(command.learning, num_learners, num_gpus)
    return command


def _described(name: str, table: TableConfig) -> str:
    pace = f"{table.samples_per_insert:g} samples an insert" if table.samples_per_insert else "nobody waits"
    return f"{name}, from {table.min_size_to_sample:,} on, {pace}"


def _sizes(agent: str, update: UpdateConfig) -> str:
    named = {name.removesuffix("_size").replace("_", " "): size for name, size in divided_sizes(agent, update).items()}
    return ", ".join(f"{name} {size}" for name, size in named.items())


def describe(plan: Plan) -> list[tuple[str, str]]:
    """Returns the plan for a person to read, as names and values."""
    command, spec, machine, known = plan
    acting, replay, update, wires = command.acting, command.replay, command.update, command.wires
    store = bytes_needed(spec, ring_unrolls(replay.capacity, spec.unroll_starts), wants_of(command))
    num_devices = len(set(devices_of(command.learning, command.learning.num_learners, machine.num_gpus)))
    fits = store / num_devices + DEVICE_RESERVE_BYTES <= machine.device_memory_bytes
    frames = machine.device if machine.learns_on_gpu and fits else "the host"
    actions = f"{spec.num_actions} actions" if spec.num_actions else f"actions of {len(spec.action_bounds)} numbers"
    shape = f"{spec.stacked_frames} x {spec.frame_shape}" if spec.stacked_frames > 1 else f"{spec.frame_shape}"
    environment = f"{f'{spec.env} {spec.variant}'.strip()}, {actions}, observations {shape}"
    ports = f"learner {wires.parameter_port} {wires.metrics_port}"
    sampling, journal = "without actors, nobody waits", f"{command.from_journal} (of another run: only read)"
    if command.guest:
        sampling, journal = "tables of its own, nobody waits for them", f"none: {command.guest} keeps the experience"
    if command.has_actors:
        environment += f"; {acting.num_workers} x {acting.environments_per_worker} copies"
        shards = (wires.of_shard(shard) for shard in range(wires.shards))
        ports = f"replay {' '.join(f'{shard.actor_port} {shard.batch_port}' for shard in shards)}, {ports}"
        tables = tables_of(explicit_replay(command), spec.unroll_starts, spec.has_unroll_priorities)
        sampling = "; ".join(_described(name, table) for name, table in tables.items())
        journal = f"{command.run_dir}/journal" if replay.journal_dir == "auto" else replay.journal_dir
    network = chosen_fields(command.network)
    max_seconds = 0.0 if command.reproducible or command.smoke else command.max_seconds
    ways = ways_of(dataclasses.replace(learner_command(command), ends_at=max_seconds))
    optimizer = f"{update.optimizer} {ways.pop('learning_rate').describe(command.learning, max_seconds)}"
    changing = [f"{name.replace('_', ' ')} {way.describe(command.learning, max_seconds)}"
                for name, way in ways.items() if not way.is_constant]  # fmt: skip
    rows = [
        ("machine", f"{machine.cores} cores, {machine.memory_bytes / 1e9:.0f} GB free, learning on {machine.device}"),
        ("environment", environment),
        ("agent", command.agent),
        ("preset", command.preset + (f", and presets.toml: {shlex.join(known)}" if known else "")),
        ("replay", f"{replay.capacity:,} transitions, {store / 1e9:.1f} GB on {frames} when full"),
        ("sampling", sampling),
        ("update", ", ".join([_sizes(command.agent, update), optimizer, *changing])),
        ("network", ", ".join(f"{name.replace('_', ' ')} {size}" for name, size in network.items())),
    ]  # fmt: skip
    if wires.shards > 1:
        learners, num_learners = "one learner", command.learning.num_learners
        if num_learners > 1:
            part = _sizes(command.agent, share_of(learner_command(command), num_learners).update)
            learners = f"{num_learners} learners add their gradients up, each with {part}"
        rows.insert(-2, ("shards", f"{wires.shards} replay servers; {learners}"))
    if command.reproducible:
        rows.append(("processes", "one, in which all parts take turns: slower, for experiments that must be repeated"))
    else:
        rows += [("ports", ports), ("journal", journal)]
    if mixed := Share.of(command.learning):
        rows.append(("mixed in", f"{mixed.share} of each batch that replays, from {mixed.directory}: only read"))
    rows.append(("run", command.run_dir))
    if spec.env in STOCHASTIC and family_of(command.agent).is_greedy:
        rows.append(("warning", f"{command.agent} is greedy: it cannot solve {spec.env}, impala can"))
    if command.fork:
        rows.append(("forked from", f"{command.fork}, update {command.at or 'of its newest checkpoint'}"))
    if command.tensorboard:
        rows.append(("TensorBoard", f"http://{at_port(command.tensorboard_host, command.tensorboard_port)}"))
    return rows
