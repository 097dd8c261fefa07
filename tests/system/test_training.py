"""Small environments are solved through the real processes, within a stated number of agent steps."""

import pytest

from tests.system.processes import launch, read_json


def learn(tmp_path, ports, *flags):
    with launch(tmp_path, ports, "--evaluation-period-seconds", "4", *flags) as run:
        assert run.popen.wait(2800) == 0, run.text()
    return read_json(tmp_path / "run" / "summary.json")


@pytest.mark.timeout(3200)
def test_cartpole_is_balanced_within_200000_agent_steps(tmp_path, free_ports):
    summary = learn(tmp_path, free_ports(4), "--env", "CartPole-v1", "--total-frames", "200000", "--episodes", "10")
    assert summary["transitions_inserted"] < 230_000
    assert summary["evaluation_best_return"] >= 450


@pytest.mark.timeout(3200)
def test_catch_is_solved_from_pixels_within_60000_agent_steps(tmp_path, free_ports):
    summary = learn(tmp_path, free_ports(4), "--env", "Catch-v0", "--total-frames", "60000", "--episodes", "40")
    assert summary["transitions_inserted"] < 75_000
    assert summary["evaluation_best_return"] >= 0.9
