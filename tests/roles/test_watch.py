"""The network with which a run is watched."""

import sys

import pytest
import torch

from apexrl.acting import evaluation
from apexrl.config.commands import RunCommand
from apexrl.config.flags import parse
from apexrl.learning.record.run_record import CURVE_COLUMNS
from apexrl.lifecycle import Stop
from apexrl.networks.checkpoint import save_checkpoint
from apexrl.networks.headers import BEST, LATEST, CheckpointHeader, Counters, latest_path
from apexrl.roles import watch
from apexrl.running.run_directory import save_config
from apexrl.runs import CURVE_FILE


@pytest.mark.parametrize(
    ("flags", "name", "told"),
    [
        ([], BEST, "update 7, mean 3.50 over 20 games with exploration 0.05"),
        (["--which", "latest"], LATEST, "update 9, not evaluated"),
    ],
)
def test_games_are_watched_as_the_run_evaluates_them(monkeypatch, tmp_path, spec, capsys, flags, name, told):
    command = parse(RunCommand, ["--env", "Catch-v0", "--evaluation-epsilon", "0.05", "--run-dir", str(tmp_path)])
    save_config(command)
    checkpoint = latest_path(tmp_path).with_name(name)
    checkpoint.parent.mkdir()
    for file, updates in ((BEST, 7), (LATEST, 9)):
        header = CheckpointHeader(spec, "apex-dqn", "{}", Counters(updates=updates))
        save_checkpoint(checkpoint.with_name(file), header, {"x": torch.zeros(2)})
    (tmp_path / CURVE_FILE).write_text(f"{CURVE_COLUMNS}\n9,90,6,10,5,5,5,5,0.05\n10,99,7,20,3.5,3,2,5,0.05\n")
    watched = []
    monkeypatch.setattr(evaluation, "play_checkpoint", lambda command, stop: watched.append(command))
    monkeypatch.setattr(sys, "argv", ["watch", str(tmp_path), "--episodes", "3", *flags])
    watch.main(Stop())
    [command] = watched
    assert (command.evaluation.episodes, command.algorithm.evaluation_epsilon) == (3, 0.05)
    assert command.evaluation.checkpoint == str(checkpoint)
    assert capsys.readouterr().out == f"plays {checkpoint}: {told}\n"
