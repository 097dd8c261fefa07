"""The preparation of a run: whose algorithm's flags the command line has, and what a resumed run goes on with."""

import contextlib
import dataclasses
from pathlib import Path

import pytest
from rich.console import Console

from apexrl.config import EnvConfig, RunCommand, WireConfig
from apexrl.errors import ConfigError
from apexrl.flags import default_command, with_preset
from apexrl.running.launch import prepare, shown_by_board
from apexrl.running.run_directory import lock_run, save_config, saved_command

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


def test_an_unknown_algorithm_changes_nothing(saved):
    with pytest.raises(ConfigError, match="--agent nobody: there is no such algorithm"):
        prepared("--agent=nobody", "--run-dir", f"{saved.run_dir}-2")


def test_the_board_shows_all_runs_of_a_directory_that_holds_nothing_else(tmp_path):
    run, other = tmp_path / "runs" / "a", tmp_path / "runs" / "b"
    run.mkdir(parents=True)
    assert shown_by_board(run) == tmp_path / "runs"
    other.mkdir()
    assert shown_by_board(run) == run
    (other / "config.json").write_text("{}")
    assert shown_by_board(run) == tmp_path / "runs"
    (tmp_path / "runs" / "notes.txt").write_text("")
    assert shown_by_board(run) == run
