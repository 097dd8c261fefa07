"""The network with which a run is watched."""

import sys

import torch

from apexrl.acting import evaluation
from apexrl.config.commands import RunCommand
from apexrl.config.flags import parse
from apexrl.lifecycle import Stop
from apexrl.networks.checkpoint import save_checkpoint
from apexrl.networks.headers import BEST, CheckpointHeader, Counters, latest_path
from apexrl.roles import watch
from apexrl.running.run_directory import save_config


def test_games_are_watched_as_the_run_evaluates_them(monkeypatch, tmp_path, spec):
    command = parse(RunCommand, ["--env", "Catch-v0", "--evaluation-epsilon", "0.05", "--run-dir", str(tmp_path)])
    save_config(command)
    checkpoint = latest_path(tmp_path).with_name(BEST)
    checkpoint.parent.mkdir()
    header = CheckpointHeader(spec, "apex-dqn", "{}", Counters(updates=7))
    save_checkpoint(checkpoint, header, {"x": torch.zeros(2)})
    watched = []
    monkeypatch.setattr(evaluation, "play_checkpoint", lambda command, stop: watched.append(command))
    monkeypatch.setattr(sys, "argv", ["watch", str(tmp_path), "--episodes", "3"])
    watch.main(Stop())
    [command] = watched
    assert (command.evaluation.episodes, command.algorithm.evaluation_epsilon) == (3, 0.05)
    assert command.evaluation.checkpoint == str(checkpoint)
