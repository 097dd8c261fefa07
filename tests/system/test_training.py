"""Small environments are solved through the real processes, within a stated number of agent steps."""

import csv
import signal
import subprocess
import sys

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from apexrl.runs import CURVE_FILE
from tests.environments.corridor_exact import actor_critic_right
from tests.system.processes import ROOT, launch, read_json, wait_for

CORRIDOR = ("--env", "Corridor-v0", "--no-evaluator")
LASER = ("--mix", "queue=1/4", "uniform=3/4")
EVERY_5_SECONDS = ("--evaluation-period-seconds", "5")


def learn(tmp_path, ports, *flags, enough=np.inf, enough_in_training=np.inf):
    """Trains to the end, or until an evaluation, or three reports of training games, have such a mean.

    Returns the summary.
    """
    directory, reports = tmp_path / "run", {}  # by update: one report alone may be of a few lucky games

    def is_done():
        reports.update(training_mean(directory))
        newest = list(reports.values())[-3:]
        is_enough = best_mean(directory) >= enough or (len(newest) == 3 and min(newest) >= enough_in_training)
        return is_enough or run.popen.poll() is not None

    with launch(tmp_path, ports, *flags) as run:
        wait_for(is_done, 280, "the training")
        if run.popen.poll() is None:
            run.signal(signal.SIGINT)
        assert run.popen.wait(300) == 0, run.text()
    return read_json(tmp_path / "run" / "summary.json")


def best_mean(directory):
    """The best evaluation so far."""
    path = directory / CURVE_FILE
    rows = csv.DictReader(path.read_text().splitlines()) if path.exists() else ()
    return max((float(row["mean"]) for row in rows), default=-np.inf)


def training_mean(directory):
    """The mean return of the training games that ended in the last seconds, by the newest update."""
    status = read_json(directory / "status.json")
    return {status["counters"]["updates"]: status["metrics"].get("actor/return_mean", -np.inf)} if status else {}


@pytest.mark.long("trainings")
@pytest.mark.timeout(3200)
def test_cartpole_is_balanced_within_120000_agent_steps(tmp_path, free_ports):
    flags = ("--env", "CartPole-v1", "--total-frames", "120000", "--episodes", "10", *EVERY_5_SECONDS)
    summary = learn(tmp_path, free_ports(4), *flags, enough=450)
    assert summary["transitions_inserted"] < 140_000
    assert summary["evaluation_best_return"] >= 450


@pytest.mark.timeout(3200)
@pytest.mark.parametrize(
    ("flags", "most_steps"),
    [
        ((), 60_000),
        (("--agent", "impala", "--batch-size", "4", "--learning-rate", "2e-3:0"), 80_000),
        (
            (
                "--agent",
                "impala",
                "--mix",
                "queue=1/4",
                "uniform=3/4",
                "--batch-size",
                "8",
                "--learning-rate",
                "1e-3:0",
            ),
            60_000,
        ),
        pytest.param(("--agent", "impact"), 60_000, marks=pytest.mark.long("trainings")),
        pytest.param(("--agent", "pqn"), 60_000, marks=pytest.mark.long("trainings")),
    ],
    ids=["apex-dqn", "impala", "laser", "impact", "pqn"],
)
def test_catch_is_solved_from_pixels(tmp_path, free_ports, flags, most_steps):
    """Actor and learner take turns, so that a seed decides what is learned, and no machine is too slow for it."""
    ends = ("--total-frames", most_steps, "--episodes", "40", "--evaluation-period-updates", "250")
    summary = learn(tmp_path, free_ports(4), "--env", "Catch-v0", "--reproducible", *flags, *ends, enough=0.9)
    assert summary["evaluation_best_return"] >= 0.9


@pytest.mark.long("trainings")
@pytest.mark.timeout(3200)
def test_a_ball_that_was_seen_once_is_caught_within_80000_agent_steps(tmp_path, free_ports):
    """Without memory the mean return is -0.14 at best."""
    flags = ("--agent", "r2d2", "--env", "MemoryCatch-v0", "--total-frames", "80000", "--episodes", "50")
    summary = learn(tmp_path, free_ports(4), *flags, "--reproducible", "--evaluation-period-updates", "50", enough=0.9)
    assert summary["evaluation_best_return"] >= 0.9


@pytest.mark.long("trainings")
@pytest.mark.timeout(3200)
@pytest.mark.parametrize(
    ("flags", "most_steps"),
    [
        (("--agent", "apex-dpg", "--min-size-to-sample", "1000"), 40_000),
        (("--seed", "2"), 40_000),
        (
            ("--agent", "impact", "--samples-per-insert", "10", "--minibatches", "16", "--learning-rate", "1e-3:0",
             "--gamma", "0.9"),
            80_000,
        ),
    ],
    ids=["apex-dpg", "sac", "impact"],
)  # fmt: skip
def test_a_pendulum_is_swung_up(tmp_path, free_ports, flags, most_steps):
    """By a policy over vectors of actions: the RL Zoo's TD3 has -158, and what chooses at random -1,200."""
    flags = ("--env", "Pendulum-v1", "--total-frames", most_steps, *flags)
    summary = learn(tmp_path, free_ports(4), *flags, "--reproducible", "--episodes", "20", enough=-200)
    assert summary["evaluation_best_return"] >= -200


def logged(directory):
    """Returns the experience of a run as arrays: all steps and games, whatever the speed of the machine."""
    out = directory / "log.npz"
    tool = [sys.executable, "-m", "apexrl", "inspect", "export", directory / "journal", "--out", out]
    subprocess.run([*map(str, tool)], cwd=ROOT, check=True, timeout=600, capture_output=True)
    return np.load(out)


@pytest.mark.long("trainings")
@pytest.mark.timeout(3200)
def test_an_lstm_leaves_the_corridor_within_400000_agent_steps(tmp_path, free_ports):
    """Without memory the mean return is -11.66 at best, with it -3. The log tells it, whatever the speed."""
    flags = (*CORRIDOR, "--preset", "small", "--total-frames", "400000", "--capacity", "500000")
    lstm = ("--lstm", "--lstm-size", "64", "--gamma", "0.9", "--batch-size", "4", "--learning-rate", "1e-3:0")
    learn(tmp_path, free_ports(4), *flags, *lstm, enough_in_training=-3.5)
    with logged(tmp_path / "run") as log:
        returns = log["episodes"][:, 1]
    assert returns[:200].mean() < -10 and returns[-500:].mean() > -4


@pytest.mark.long("trainings")
@pytest.mark.timeout(3200)
@pytest.mark.parametrize(
    "flags",
    [
        ("--preset", "small", "--total-frames", "200000", "--learning-rate", "5e-4:0", "--num-workers", "1"),
        ("--capacity", "500000", "--num-workers", "4"),
    ],
    ids=["small-numbers-one-worker", "own-numbers-four-workers"],
)
def test_the_corridors_random_policy_is_found(tmp_path, free_ports, flags):
    """The algorithm is the usual one of this environment. The log tells how each step was taken, whatever the speed."""
    summary = learn(tmp_path, free_ports(4), *CORRIDOR, *flags)
    directory = tmp_path / "run"
    with logged(directory) as log:
        probabilities = np.exp(log["extra_behavior_log_probs"].astype(np.float64))
        right = probabilities[log["number"] >= log["number"].max() // 2][..., 1].mean()
    assert right == pytest.approx(actor_critic_right(gamma=0.99, unroll_steps=20), abs=0.03)
    assert read_json(directory / "config.json")["command"]["agent"] == "impala"
    assert 0.5 < summary["probability_right"] < 0.7  # of the last hundred updates
    events = EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    shown = [event.value for event in events.Scalars("learner/probability_right")]
    assert shown[-1] == pytest.approx(summary["probability_right"], abs=0.05)


@pytest.mark.long("trainings")
@pytest.mark.timeout(3200)
def test_laser_finds_the_corridors_random_policy_within_200000_agent_steps(tmp_path, free_ports):
    """It plays and learns in turns: replay beside a policy that moved far while the learner was slow can go wrong."""
    values_first = ("--preset", "small", "--total-frames", "200000", "--learning-rate", "2e-4:0", "--value-cost", "5")
    laser = ("--mix", "queue=1/8", "uniform=7/8", "--reproducible", *values_first)
    summary = learn(tmp_path, free_ports(4), *CORRIDOR, *laser)
    exact = actor_critic_right(gamma=0.99, unroll_steps=20)
    assert summary["probability_right"] == pytest.approx(exact, abs=0.03)  # of the last hundred updates
