import dataclasses
import datetime
import threading
import time
import typing

import msgspec
import pytest

from apexrl.agents.contract import Section
from apexrl.agents.families import FAMILIES, family_of
from apexrl.config.commands import (
    ActorCommand,
    LearnerCommand,
    OfflineCommand,
    ReplayCommand,
    RunCommand,
    WorkerCommand,
)
from apexrl.config.fields import check_ranges, range_of, values_of
from apexrl.config.flags import (
    check_together,
    default_command,
    explicit_replay,
    learner_command,
    parse,
    to_flags,
    with_preset,
    with_sections,
)
from apexrl.config.sections import Changing, Range
from apexrl.errors import ConfigError
from apexrl.learning.goal import Courses
from apexrl.net.actor_sessions import MAX_STREAMS_PER_ACTOR
from apexrl.net.metrics_channel import MAX_GAMES
from apexrl.net.wire import MAX_BATCHES_AHEAD
from apexrl.networks.headers import Counters
from apexrl.types import StreamSpec
from tests.own_agent import OwnAlgorithm

COMMANDS = [ActorCommand, ReplayCommand, LearnerCommand, OfflineCommand, RunCommand]
OWN = "tests.own_agent:own"
AGENTS = ["apex-dqn", OWN]
OTHER = {bool: lambda v: not v, int: lambda v: v + 3, float: lambda v: v / 2 or 0.25, str: lambda v: v + "x"}
CHOICES = {
    "clip_rewards": "no",
    "wrapper": ("module:one", "module:two"),
    "resize": (84, 96),
    "optimizer": "adam",
    "learning_rate": "3e-4:0:5M:cosine",
    "channels": (7, 8, 9),
    "tables": ("a=uniform:0.5:3", "b=fifo", "c=priority"),
    "table": "c",
    "queue": "b",
    "stop_at_return": 3.0,
    "callback": ("module:one",),
    "inputs": ("map=9x9x3", "wish=2"),
    "munchausen": 0.0,  # it excludes --value-rescaling
}


def changed(config):
    """Every field at another value than its default."""
    changes = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            changes[field.name] = changed(value)
        elif field.name not in ("agent", "preset"):
            changes[field.name] = CHOICES[field.name] if field.name in CHOICES else OTHER[type(value)](value)
    return dataclasses.replace(config, **changes)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("preset", ["paper", "gpu", "two-cores", "small"])
@pytest.mark.parametrize("agent", AGENTS)
def test_every_flag_survives_the_command_line(command, preset, agent):
    papers = dataclasses.replace(default_command(command, agent), preset=preset)  # with another preset's numbers
    usual = with_preset(papers, preset)
    for config in (changed(papers), papers, usual):
        assert parse(command, to_flags(config)) == config
    assert to_flags(usual) == ["--agent", agent, "--preset", preset]


def test_a_wrapper_may_be_given_again_and_again():
    flags = ["--wrapper", "a:b", "--seed", "3", "--wrapper=c:d", "--wrapper", "e:f", "g:h"]
    command = parse(ActorCommand, flags)
    assert (command.env.wrapper, command.seed) == (("a:b", "c:d", "e:f", "g:h"), 3)
    assert parse(ActorCommand, to_flags(command)) == command
    assert parse(ActorCommand, []).env.wrapper == ()


def test_a_worker_is_told_its_number():
    worker = WorkerCommand(**vars(parse(ActorCommand, ["--seed", "3"])), worker_index=0, parameter_endpoint="here")
    assert parse(WorkerCommand, to_flags(worker)) == worker
    with pytest.raises(ConfigError, match="--worker-index -1"):
        parse(WorkerCommand, ["--preset", "small"])


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("agent", "preset"), [(name, preset) for name in FAMILIES for preset in ("paper", *FAMILIES[name].presets)]
)
def test_every_preset_fits_every_command(command, agent, preset):
    sections = FAMILIES[agent].presets.get(preset, {})
    assert sections.keys() <= set(typing.get_args(Section))
    usual = default_command(command, agent)
    made = with_preset(usual, preset)
    for field in dataclasses.fields(command):
        value, before = getattr(made, field.name), getattr(usual, field.name)
        assert field.name == "preset" or value == before or field.name in sections
    check_together(made)


def test_a_preset_names_no_field_that_is_not_there():
    with pytest.raises(TypeError, match="batch"):
        with_sections(default_command(LearnerCommand), {"update": {"batch": 3}})
    assert with_sections(default_command(ReplayCommand), {"network": {"width": 3}}) == default_command(ReplayCommand)


def test_a_preset_of_one_algorithm_does_not_touch_another_with_fields_of_the_same_names():
    ours, own = (parse(LearnerCommand, ["--agent", agent, "--preset", "small"]).update for agent in AGENTS)
    assert (ours.batch_size, ours.learning_rate) == (128, 1e-3)
    assert (own.batch_size, own.learning_rate) == (2, 0.00025)


def test_what_is_given_wins_over_the_preset():
    command = parse(LearnerCommand, ["--batch-size", "32", "--preset", "small"])
    assert (command.update.batch_size, command.update.optimizer, command.network.hidden_size) == (32, "adam", 128)
    paper = parse(LearnerCommand, ["--preset", "paper"])
    assert (paper.update.batch_size, paper.update.learning_rate, paper.network.channels) == (512, 6.25e-5, (32, 64, 64))


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("form", [["--agent", OWN], [f"--agent={OWN}"]])
def test_an_algorithm_of_ones_own_has_flags_like_ours(command, form, capsys):
    parsed = parse(command, ["--agent", "apex-dqn", *form, "--preset", "small"])
    assert parsed == with_preset(default_command(command, OWN), "small")
    with pytest.raises(SystemExit):
        parse(command, [*form, "--help"])
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert ("--trace-length FLOAT Share of a trace that is left a step later. (default: 0.9)" in shown) == hasattr(
        parsed, "algorithm"
    )
    assert ("--width INT Units of the one layer." in shown) == dataclasses.is_dataclass(
        getattr(parsed, "network", None)
    )
    assert ("--queue STR The table that unrolls come from." in shown) == hasattr(parsed, "update")
    assert "--n-steps" not in shown and "--hidden-size" not in shown


@pytest.mark.parametrize(
    ("flags", "agent"),
    [
        ([], "apex-dqn"),
        (["--env", "Catch-v0"], "apex-dqn"),
        (["--env", "Corridor-v0"], "impala"),
        (["--env=Corridor-v0"], "impala"),
        (["--env", "Corridor-v0", "--agent", "apex-dqn"], "apex-dqn"),
        ([f"--agent={OWN}", "--env=Corridor-v0"], OWN),
    ],
)
@pytest.mark.parametrize("command", [ActorCommand, RunCommand])
def test_the_corridor_has_another_usual_algorithm(command, flags, agent, capsys):
    """In a run: of roles by hand only the actors know the environment."""
    if command is ActorCommand and agent == "impala":
        agent = "apex-dqn"
    parsed = parse(command, [*flags, "--preset", "small"])
    assert parsed == dataclasses.replace(with_preset(default_command(command, agent), "small"), env=parsed.env)
    with pytest.raises(SystemExit):
        parse(command, [*flags, "--help"])
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert f"Corridor-v0 has impala, BreakoutNoFrameskip-v4 impact. (default: {agent})" in shown


def test_numbers_of_ones_own_have_ranges():
    assert parse(ActorCommand, ["--agent", OWN, "--overlap-steps", "0"]).algorithm == OwnAlgorithm(
        unroll_starts=20, overlap_steps=0
    )
    with pytest.raises(ConfigError, match=r"--trace-length 2\.0 makes no sense: it has to be at most 1"):
        parse(ActorCommand, ["--agent", OWN, "--trace-length", "2"])


@pytest.mark.parametrize(
    ("agent", "complaint"),
    [
        ("apex", "--agent apex: there is no such algorithm; known are apex-dqn"),
        ("tests.own_agent:other", "--agent tests.own_agent:other: there is no such algorithm"),
        ("nowhere:own", "--agent nowhere:own: nowhere cannot be imported: ModuleNotFoundError"),
    ],
)
def test_an_unknown_algorithm_is_refused_in_one_line(agent, complaint):
    for command in COMMANDS:
        with pytest.raises(ConfigError, match=complaint) as refused:
            parse(command, ["--agent", agent])
        assert "\n" not in str(refused.value)


def test_a_preset_that_an_algorithm_lacks_is_its_defaults(monkeypatch):
    monkeypatch.setitem(FAMILIES, "plain", family_of(OWN)._replace(presets={}))
    command = parse(LearnerCommand, ["--agent", "plain", "--preset", "small"])
    assert command == dataclasses.replace(default_command(LearnerCommand, "plain"), preset="small")


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--learning-rate", "nan"], "--learning-rate nan makes no sense: it has to be a finite number"),
        (["--gamma", "inf"], "--gamma inf makes no sense: it has to be a finite number"),
        (["--target-period-updates", "0"], "more than 0"),
        (["--samples-per-insert", "-1"], "at least 0"),
        (["--gamma", "1.1"], "--gamma 1.1 makes no sense: it has to be at most 1"),
        (["--epsilon-base", "0"], "more than 0"),
        (["--epsilon-base", "2"], "at most 1"),
        (["--channels", "16", "0", "16"], "--channels 0"),
        (["--total-frames", "1e16"], r"--total-frames 10000000000000000 makes no sense: it has to be at most 1e\+15"),
        (["--seed", "1" + "0" * 90], "--seed 10+ makes no sense: it has to be at most"),
        (["--total-updates", "1e17"], "--total-updates 100000000000000000 makes no sense"),
        (["--episodes", "10001"], "--episodes 10001 makes no sense: it has to be at most 10000"),
        (["--environments-per-worker", "4097"], "--environments-per-worker 4097 makes no sense"),
        (["--max-episode-frames", "3G"], "--max-episode-frames 3000000000 makes no sense"),
        (["--patience-seconds", "1e10"], r"--patience-seconds 10000000000\.0 makes no sense"),
        (["--capacity", "10"], "--min-size-to-sample 50000 is more than --capacity 10"),
        (["--journal-flush-seconds", "-1"], "at least 0"),
        (["--journal-snapshot-seconds", "0"], "more than 0"),
        (["--tables", "x=stack"], "--tables x=stack"),
        (
            ["--tables", "x=priority"],
            "--tables x=priority: --agent apex-dqn needs a table named transitions, of the kind",
        ),
        (["--tables", "transitions=uniform", "x=priority"], "of the kind priority"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(flags, complaint):
    with pytest.raises(ConfigError, match=complaint):
        parse(RunCommand, [*flags, "--preset", "paper"])


def test_zero_is_a_number_where_its_field_says_so():
    zeros = ["--gamma", "0", "--seed", "0", "--samples-per-insert", "0", "--epsilon-exponent", "0", "--noop-max", "0"]
    assert parse(RunCommand, [*zeros, "--max-restarts", "0", "--preset", "small"]).algorithm.gamma == 0


def test_the_bounds_of_a_range_belong_to_it():
    assert not Range(0, 1).wanted(0) and not Range(0, 1).wanted(1) and not Range(most=1).wanted(0.5)
    assert [Range(0, 1).wanted(x) for x in (-1, 2, float("nan"))] == ["at least 0", "at most 1", "a finite number"]
    assert Range().wanted(0) == Range(most=1).wanted(0) == "more than 0"
    assert not Range().wanted(10**15) and Range().wanted(10**15 + 1) == "at most 1e+15"


def at_the_end(config):
    """Every number at the upper end of its range, those that change over as many frames."""
    hints, changes = typing.get_type_hints(type(config), include_extras=True), {}
    for field in dataclasses.fields(config):
        value, most = getattr(config, field.name), range_of(hints[field.name]).most
        if dataclasses.is_dataclass(value):
            changes[field.name] = at_the_end(value)
        elif getattr(hints[field.name], "__origin__", hints[field.name]) == Changing:
            changes[field.name] = f"{most}:1e-6:1e15"
        elif isinstance(value, int | float) and not isinstance(value, bool):
            changes[field.name] = type(value)(most)
    return dataclasses.replace(config, **changes)


@pytest.mark.parametrize("agent", FAMILIES)
def test_the_greatest_numbers_of_flags_fit_the_files_of_a_run(agent):
    command = at_the_end(default_command(RunCommand, agent))
    check_ranges(command)
    learner = dataclasses.replace(learner_command(command), ends_at=time.time() + command.max_seconds)
    courses, goes_on = Courses(learner), Courses(dataclasses.replace(learner, ends_at=1.0))
    goes_on.begin(10**12, courses.progress)
    for progress in (courses.progress, goes_on.progress):
        counters = Counters(progress=progress)
        assert msgspec.json.decode(msgspec.json.encode(counters), type=Counters) == counters
    for name, value in values_of(command).items():
        if name.endswith("_seconds"):
            assert threading.Lock().acquire(timeout=value) and datetime.timedelta(seconds=value), name


def test_the_upper_ends_of_flags_are_those_of_messages_and_servers():
    ends = {
        "episodes": MAX_GAMES,
        "environments_per_worker": MAX_STREAMS_PER_ACTOR,
        "prefetch_batches": MAX_BATCHES_AHEAD,
    }
    greatest = values_of(at_the_end(default_command(RunCommand)))
    assert {name: greatest[name] for name in ends} == ends


def test_a_capacity_is_compared_with_the_minimum_of_the_preset():
    command = parse(ReplayCommand, ["--preset", "small", "--capacity", "5000"])
    assert (command.replay.capacity, command.replay.min_size_to_sample) == (5000, 2000)


def test_the_preset_auto_is_resolved():
    command = parse(ActorCommand, ["--num-workers", "2"])
    assert command.preset in ("gpu", "two-cores")
    assert parse(ActorCommand, to_flags(command)) == command


@pytest.mark.parametrize("agent", FAMILIES)
def test_flag_names_are_unique_over_all_parts(agent):
    names = leaves(default_command(RunCommand, agent), "")
    assert len(names) == len(set(names))


def leaves(value, name):
    if not dataclasses.is_dataclass(value):
        return [name]
    return [leaf for field in dataclasses.fields(value) for leaf in leaves(getattr(value, field.name), field.name)]


@pytest.mark.parametrize(
    ("command", "flag", "commands"),
    [
        (ActorCommand, "--learning-rate=3", "train, replay, learner, learner --from-journal"),
        (LearnerCommand, "--capacity", "train, replay, learner --from-journal"),
        (ReplayCommand, "--no-tensorboard", "train"),
        (RunCommand, "--evaluate", "actor"),
    ],
)
def test_a_flag_of_another_command_is_refused_in_one_line(command, flag, commands):
    with pytest.raises(ConfigError) as refused:
        parse(command, ["--seed", "3", *([flag] if "=" in flag else [flag, "5"])])
    assert str(refused.value) == f"{flag.partition('=')[0]} means nothing here: it is a flag of {commands}"


@pytest.mark.parametrize(
    ("command", "flags", "complaint"),
    [
        (RunCommand, ["--enviroment", "Pong-v4"], "there is no flag --enviroment, did you mean --env? All of them: "),
        (RunCommand, ["--learning-rat=3"], "there is no flag --learning-rat, did you mean --learning-rate? All of "),
        (RunCommand, ["--num_workers", "3"], "there is no flag --num_workers, did you mean --num-workers? All of "),
        (ActorCommand, ["--xyz"], "there is no flag --xyz: "),
        (RunCommand, ["--mix", "queue=1"], "--mix is a flag of --agent impala or impact or pqn, this is --agent "),
        (LearnerCommand, ["--agent", "impala", "--n-steps", "3"], "--n-steps is a flag of --agent apex-dqn or "),
        *((RunCommand, flags, f"{flags[0].strip('=')} is empty: give the directory of a run")
          for flags in (["--resume", ""], ["--fork="], ["--guest", ""], ["--from-journal", ""])),
        (ReplayCommand, ["--journal-dir", ""], "--journal-dir is empty: leave it out for 'auto', or give a text"),
        (LearnerCommand, ["--run-dir="], "--run-dir is empty: leave it out for 'runs/by-hand', or give a text"),
        (RunCommand, ["--env", ""], "--env is empty: leave it out for "),
        (ReplayCommand, ["--actor-port", "65536"], "--actor-port 65536 makes no sense: it has to be at most 65535"),
        (RunCommand, ["--shards", "8", "--batch-port", "65530"], "--batch-port 65544 makes no sense: it has to be at "),
        (RunCommand, ["--seed", str(2**63)], "--seed 9223372036854775808 makes no sense: it has to be at most "),
        (ActorCommand, ["--compression-level", "23"], "--compression-level 23 makes no sense: it has to be at most 22"),
        (LearnerCommand, ["--learner-host-rank", "1"], "--learner-host-rank 1: with --learner-hosts 1 give one from 0"),
    ],
)  # fmt: skip
def test_a_flag_that_cannot_be_heeded_is_refused_in_one_line(command, flags, complaint):
    with pytest.raises(ConfigError) as refused:
        parse(command, flags)
    assert str(refused.value).startswith(complaint) and "\n" not in str(refused.value)


def test_a_table_that_walks_has_no_capacity():
    flags = ["--agent", "impala", "--lstm", "--mix", "queue=1/4", "uniform=3/4"]
    parse(RunCommand, flags)
    with pytest.raises(ConfigError, match="uniform walks through whole episodes"):
        parse(RunCommand, [*flags, "--tables", "queue=fifo", "uniform=uniform:0:1:64"])


def test_no_tables_are_those_of_the_algorithm():
    assert explicit_replay(parse(ReplayCommand, [])).tables == ("transitions=priority",)
    assert explicit_replay(parse(ReplayCommand, ["--agent", OWN])).tables == ("queue=fifo",)
    assert explicit_replay(parse(ReplayCommand, ["--agent", OWN, "--queue", "q"])).tables == ("q=fifo",)
    mixed = parse(ReplayCommand, ["--agent", "impala", "--mix", "queue=1/8", "uniform@500=7/8"])
    assert explicit_replay(mixed).tables == ("queue=fifo", "uniform@500=uniform:0::500")
    assert explicit_replay(parse(RunCommand, ["--agent", OWN, "--queue", "q"])).tables == ("q=fifo",)
    given = parse(ReplayCommand, ["--agent", OWN, "--tables", "a=fifo"])
    assert explicit_replay(given) == given.replay


def test_without_actors_nobody_waits():
    command = parse(OfflineCommand, ["--from-journal", "x", "--preset", "small", "--capacity", "100"])
    replay = explicit_replay(command)
    assert (replay.samples_per_insert, replay.min_size_to_sample, replay.capacity) == (0.0, 1, 100)
    assert replay.tables == ("transitions=priority",)


def test_tables_fit_what_the_learner_takes_from_them():
    for kind in ("fifo", "uniform", "elite:::500"):
        parse(RunCommand, ["--agent", OWN, "--tables", f"queue={kind}", "more=priority"])
    environment = StreamSpec("Known-v0", (2,), "float32", 3, 4, 1)
    whole = environment.streamed(8, 2, has_unroll_priorities=True)
    own = parse(RunCommand, ["--agent", OWN, "--tables", "queue=priority"])
    check_together(own, whole)
    with pytest.raises(ConfigError, match=r"--tables queue=priority: .* of the kind uniform or elite or fifo"):
        check_together(own, environment)
    check_together(parse(RunCommand, []), environment)
    with pytest.raises(ConfigError, match="transitions cannot hand out transitions"):
        check_together(parse(RunCommand, []), whole)


def test_several_tables_and_a_journal_come_from_the_command_line():
    flags = ["--preset", "small", "--tables", "a=priority", "b=fifo:1:1", "--journal-dir", "x", "--keys", "k"]
    command = parse(ReplayCommand, [*flags, "--journal-flush-seconds", "0"])
    assert command.replay.tables == ("a=priority", "b=fifo:1:1")
    assert (command.replay.journal_dir, command.replay.journal_flush_seconds) == ("x", 0.0)
    assert command.wires.keys == "k"
