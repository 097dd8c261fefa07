"""The preparation of a run: whose algorithm's flags the command line has, and what a resumed run goes on with."""

import contextlib
import dataclasses
import io
import itertools
import os
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from rich.console import Console

from apexrl.config.commands import LearnerCommand, RunCommand
from apexrl.config.fields import with_values
from apexrl.config.flags import default_command, parse, with_preset
from apexrl.config.sections import EnvConfig, WireConfig
from apexrl.errors import ConfigError
from apexrl.files import write_json
from apexrl.learning.record.status_file import LAST_EVALUATION, STATUS_FILE, Status, Statuses
from apexrl.networks.checkpoint import save_checkpoint
from apexrl.networks.headers import CheckpointHeader, Counters, latest_path
from apexrl.running.clock import Clock
from apexrl.running.launch import (
    OTHERS_IDLE_SECONDS,
    awaits_evaluation,
    end_steps,
    roles_of,
    say_next,
    say_unevaluated,
    shown_by_board,
    summarize,
    waits_in_vain,
)
from apexrl.running.prepare import prepare
from apexrl.running.run_directory import lock_run, save_config, saved_command
from apexrl.runs import CHECKPOINTS

OWN = "tests.own_agent:own"


@pytest.fixture
def saved(tmp_path, free_ports):
    """A run of somebody's own algorithm, whose network is another than the preset's."""
    command = with_preset(default_command(RunCommand, OWN), "small")
    ports = dict(zip(("actor_port", "batch_port", "parameter_port", "metrics_port"), free_ports(4), strict=True))
    network = dataclasses.replace(command.network, width=5)
    command = dataclasses.replace(
        command,
        env=EnvConfig("Catch-v0"),
        wires=WireConfig(**ports),
        network=network,
        run_dir=str(tmp_path / "run"),
        tensorboard=False,
    )
    (tmp_path / "run").mkdir()
    save_config(command)
    return command


def prepared(*arguments):
    with contextlib.ExitStack() as held:
        return prepare(list(map(str, arguments)), Console(quiet=True), held).command


def test_a_resumed_run_has_the_flags_of_its_algorithm(saved):
    command = prepared("--resume", saved.run_dir, "--trace-length", "0.5")
    assert (command.agent, command.network, command.algorithm.trace_length) == (OWN, saved.network, 0.5)
    assert saved_command(Path(saved.run_dir)) == (command, [])


def test_two_runs_that_begin_in_one_second_have_directories_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("apexrl.running.plan.new_run", lambda env, words: f"runs/{env}-20261125-134451")
    flags = ["--env", "Catch-v0", "--no-tensorboard"]
    with contextlib.ExitStack() as held:
        plans = [prepare(flags, Console(quiet=True), held) for _ in range(2)]
        assert [plan.command.run_dir for plan in plans] == [f"runs/Catch-v0-20261125-134451{end}" for end in ("", "-2")]
    assert all(saved_command(Path(plan.command.run_dir)) for plan in plans)


def test_help_shows_what_a_resumed_run_would_have(saved, capsys):
    with lock_run(saved.run_dir), pytest.raises(SystemExit) as ended:
        prepared("--resume", saved.run_dir, "--help")
    assert ended.value.code == 0
    assert "Units of the one layer. (default: 5)" in " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_help_shows_the_preset_that_fits_the_environment(tmp_path, capsys):
    with pytest.raises(SystemExit):
        prepared("--env", "Catch-v0", "--run-dir", tmp_path / "run", "--help")
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "(default: small)" in shown and "(default: Catch-v0)" in shown and not (tmp_path / "run").exists()


def test_a_resumed_run_keeps_its_algorithm(saved):
    with pytest.raises(ConfigError, match="cannot change --agent"):
        prepared("--agent", "apex-dqn", "--resume", saved.run_dir)


def test_the_board_shows_all_runs_of_a_directory_that_holds_no_other_directories(tmp_path):
    run, other = tmp_path / "runs" / "a", tmp_path / "runs" / "b"
    run.mkdir(parents=True)
    assert shown_by_board(run) == tmp_path / "runs"
    other.mkdir()
    assert shown_by_board(run) == run
    (other / "config.json").write_text("{}")
    assert shown_by_board(run) == tmp_path / "runs"
    of_sweep = tmp_path / "runs" / "rates" / "fast-seed0"
    of_sweep.mkdir(parents=True)
    for name in ("sweep.json", "sweep.lock", "fast-seed0.log", "comparison.csv"):
        (of_sweep.parent / name).write_text("")
    (tmp_path / "runs" / "by-hand" / "tensorboard").mkdir(parents=True)  # learner.py writes no config.json
    (tmp_path / "runs" / "notes.txt").write_text("")
    assert shown_by_board(run) == tmp_path / "runs" and shown_by_board(of_sweep) == of_sweep.parent
    (tmp_path / "runs" / "pictures" / "2026").mkdir(parents=True)
    assert shown_by_board(run) == run and shown_by_board(of_sweep) == of_sweep.parent


def test_the_board_shows_one_run_beside_what_cannot_be_read(tmp_path, monkeypatch):
    run, others = tmp_path / "disk" / "run", tmp_path / "disk" / "lost+found"
    run.mkdir(parents=True)
    others.mkdir()

    def stat(path, **options):
        if path.parent == others:
            raise PermissionError(13, "Permission denied", str(path))
        return os.stat(path, **options)

    monkeypatch.setattr(Path, "stat", stat)
    assert shown_by_board(run) == run


def test_trackers_may_wait_for_their_servers_at_the_end():
    names = ["replay", "learner", "actors", "evaluator", "tensorboard"]
    limits = dict(itertools.chain(*([(name, idle) for name in step] for step, idle in end_steps([*names, "wandb"]))))
    assert limits["wandb"] > 2 * limits["learner"] and limits.keys() == {*names, "wandb"}
    assert end_steps(names)[-1] == (["replay", "tensorboard"], OTHERS_IDLE_SECONDS)


def test_nothing_is_changed_before_a_run_begins(saved, tmp_path):
    """From `begin` on a signal waits until the run is ready: half of a fork would be neither a run nor nothing."""

    def interrupt():
        raise KeyboardInterrupt

    before = sorted((tmp_path / "run").iterdir())
    (tmp_path / "run" / "status.json").write_text("{}")
    for words in (["--resume", saved.run_dir, "--from-scratch"], ["--fork", saved.run_dir, "--from-scratch"]):
        directory = ["--run-dir", str(tmp_path / "new")] if "--fork" in words else []
        with pytest.raises(KeyboardInterrupt), contextlib.ExitStack() as held:
            prepare([*words, *directory], Console(quiet=True), held, begin=interrupt)
    left = {path.name for path in (tmp_path / "run").iterdir()} - {"run.lock", "status.json"}
    assert left == {path.name for path in before} and not (tmp_path / "new").exists()


def finished(saved, **evaluated):
    """The files of a run that has reached its total; its newest evaluation is of some update."""
    directory, counters = Path(saved.run_dir), Counters(updates=70)
    write_json(directory / "status.json", Status("Catch-v0", 4000, counters, evaluated, ""))
    (directory / "checkpoints").mkdir()
    latest_path(directory).touch()
    return dataclasses.replace(saved, learning=dataclasses.replace(saved.learning, final_evaluation_seconds=60.0))


def printed(print_about, command):
    console = Console(file=io.StringIO(), width=40, markup=False)
    print_about(console, command)
    return console.file.getvalue().splitlines()


def test_the_end_of_a_run_says_what_to_type_next(saved, monkeypatch, tmp_path):
    assert printed(say_next, saved) == [], "there is no checkpoint"
    monkeypatch.setattr("sys.argv", ["bash run.sh"])
    videos = Path(saved.run_dir) / "videos"
    videos.mkdir()
    for age, name in enumerate(["game-[2].webm", "game-1.webm"]):
        (videos / name).touch()
        os.utime(videos / name, (1000 - age, 1000 - age))
    video, *commands = printed(say_next, finished(saved))
    assert video == f"video: {videos}/game-[2].webm"
    watch, resume = f"  bash run.sh watch {saved.run_dir}", f"  bash run.sh resume {saved.run_dir}"
    assert commands == ["next:", f"{watch} --trust", f"{resume} --trust"], "its algorithm is a module of its person's"
    assert printed(say_next, dataclasses.replace(saved, agent="impala"))[1:] == ["next:", watch, resume]
    monkeypatch.setattr("sys.argv", ["apexrl train"])
    spaced = dataclasses.replace(saved, run_dir=f"{tmp_path}/./run", reproducible=True)
    assert printed(say_next, spaced)[-1] == f"  apexrl compare {tmp_path}/./run"


def test_a_game_that_cannot_be_filmed_is_said_once_at_the_end(saved):
    command = finished(saved)
    assert not any("video" in line for line in printed(say_next, command)), "there was no evaluation"
    write_json(Path(saved.run_dir) / "status.json", Status("Catch-v0", 9, Counters(evaluation_episodes=10), {}, ""))
    assert printed(say_next, command)[0] == f"no video was made: {saved.run_dir}/logs/evaluator.log says why"
    assert not any("video" in line for line in printed(say_next, dataclasses.replace(command, evaluator=False)))


@pytest.mark.parametrize(
    ("saved_updates", "journal", "line"),
    [
        (70, "auto", ""),
        (0, "off", "no checkpoint has the 70 updates since then: they are lost"),
        (0, "auto", "no checkpoint has the 70 updates since then: they are lost, their experience is not"),
    ],
)
def test_updates_that_no_checkpoint_holds_are_said_at_the_end(saved, spec, saved_updates, journal, line):
    saved = with_values(saved, {"journal_dir": journal})
    directory = Path(finished(saved).run_dir)
    header = CheckpointHeader(spec, "apex-dqn", "{}", Counters(updates=saved_updates))
    save_checkpoint(latest_path(directory), header, {"x": torch.zeros(2)})
    save_checkpoint(best := directory / CHECKPOINTS[0], header, {"x": torch.zeros(2)})
    console = Console(file=io.StringIO(), width=200)
    summarize(console, directory, saved, Clock(saved), SimpleNamespace(num_restarts=0), checkpointed=0)
    first, network, second, *lines = console.file.getvalue().splitlines()
    assert first == f"checkpoint written: {latest_path(directory)}, update {saved_updates}"
    shown = dict(line.split(maxsplit=1) for line in lines if line.startswith("  "))
    assert shown["agent_steps"] == "0" and "transitions_inserted" not in shown
    assert shown["samples_per_insert"] == "0.0, the warm-up included"
    assert network == f"best network: {best}, update {saved_updates}, not evaluated"
    assert second == (line or f"summary: {directory}/summary.json")


@pytest.mark.parametrize(("evaluated", "said"), [({}, True), ({"evaluation/params_version": 60.0}, True),
                                                 ({"evaluation/params_version": 70.0}, False)])  # fmt: skip
def test_a_last_network_that_was_not_evaluated_is_said(saved, evaluated, said):
    command = finished(saved, **evaluated)
    lines = printed(say_unevaluated, command)
    assert len(lines) == said
    assert all(line.startswith("the last network was not evaluated: --final-eval") for line in lines)
    for changes in ({"evaluator": False}, {"smoke": True}, {"reproducible": True}):
        assert not printed(say_unevaluated, dataclasses.replace(command, **changes))


@pytest.mark.parametrize(("is_given_up", "waits_for", "is_earlier", "in_vain"), [
    (True, LAST_EVALUATION, False, True), (False, LAST_EVALUATION, False, False), (True, "actors", False, False),
    (True, LAST_EVALUATION, True, False),
])  # fmt: skip
def test_only_a_learner_of_this_start_waits_in_vain(tmp_path, is_given_up, waits_for, is_earlier, in_vain):
    path, status = tmp_path / STATUS_FILE, Status("Catch-v0", 4000, Counters(), {}, waits_for)
    write_json(path, msgspec.structs.replace(status, frames=2000))
    if is_earlier:
        write_json(path, status)
    statuses = Statuses(tmp_path)
    if not is_earlier:
        write_json(path, status)
        os.utime(path, (1000.0, 1000.0))  # of a server whose clock is late
    supervisor = SimpleNamespace(children={"evaluator": SimpleNamespace(is_given_up=is_given_up)})
    assert waits_in_vain(supervisor, statuses) == in_vain
    assert not waits_in_vain(SimpleNamespace(children={}), statuses)


@pytest.mark.parametrize(("waits_for", "elapsed", "changes", "goes_on"), [
    ("", 61, {}, True), ("", 91, {}, False), ("actors", 91, {}, False), (LAST_EVALUATION, 91, {}, True),
    (LAST_EVALUATION, 60 + 600 + 31, {}, False),
    (LAST_EVALUATION, 61, {"evaluator": False}, False), (LAST_EVALUATION, 61, {"smoke": True}, False),
    (LAST_EVALUATION, 61, {"reproducible": True}, False),
])  # fmt: skip
def test_a_run_whose_time_is_up_ends_after_its_last_evaluation(saved, waits_for, elapsed, changes, goes_on):
    command = dataclasses.replace(saved, max_seconds=60.0, **changes)
    status = Status("Catch-v0", 4000, Counters(updates=1), {}, waits_for)
    assert awaits_evaluation(command, status, elapsed) == goes_on
    assert not awaits_evaluation(with_values(command, {"final_evaluation_seconds": 0.0}), status, elapsed)
    assert not awaits_evaluation(command, None, elapsed)
    is_late = elapsed >= 60 + command.learning.final_evaluation_seconds
    assert awaits_evaluation(command, None, elapsed, goes_on=True) == (not changes and not is_late)
    assert not awaits_evaluation(command, msgspec.structs.replace(status, counters=Counters()), elapsed)


@pytest.mark.parametrize("has_evaluator", [True, False])
def test_a_learner_waits_for_its_last_evaluation_where_somebody_plays_it(saved, has_evaluator):
    _, learner = roles_of(dataclasses.replace(saved, evaluator=has_evaluator))["learner"]
    assert learner.learning.final_evaluation_seconds == (600.0 if has_evaluator else 0.0)
    assert parse(LearnerCommand, ["--preset", "small"]).learning.final_evaluation_seconds == 0, "by hand"
