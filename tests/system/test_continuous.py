"""Vectors of actions through whole runs: each family, its presets, MuJoCo and DeepMind's control suite."""

import pytest

from tests.system.processes import launch, read_json

SHORT = ("--reproducible", "--total-updates", "8", "--min-size-to-sample", "300", "--episodes", "1",
         "--max-episode-frames", "400", "--batch-size", "16", "--hidden-size", "16", "--capacity", "2000")  # fmt: skip

IMPACT = ("--agent", "impact", "--minibatches", "4")


@pytest.mark.parametrize(
    ("env", "flags", "agent"),
    [
        ("HalfCheetah-v5", (), "sac"),
        ("dm_control/cheetah-run-v0", (), "sac"),
        ("Pendulum-v1", ("--critic-norm", "batch"), "sac"),
        ("Pendulum-v1", ("--agent", "apex-dpg", "--preset", "paper"), "apex-dpg"),
        ("Pendulum-v1", ("--agent", "apex-dpg", "--preset", "td3"), "apex-dpg"),
        ("Pendulum-v1", ("--agent", "apex-dpg", "--preset", "d4pg"), "apex-dpg"),
        ("HalfCheetah-v5", (*IMPACT, "--no-evaluator"), "impact"),
    ],
    ids=["cheetah", "suite", "crossq", "paper", "td3", "d4pg", "impact"],
)
def test_a_few_updates_are_made(tmp_path, free_ports, env, flags, agent):
    with launch(tmp_path, free_ports(4), "--env", env, *flags, *SHORT) as run:
        assert run.popen.wait(300) == 0, run.text()
    directory = tmp_path / "run"
    assert read_json(directory / "config.json")["command"]["agent"] == agent
    assert read_json(directory / "summary.json")["updates"] == 8
