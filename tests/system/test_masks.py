"""Masks of actions through real processes: nobody takes a forbidden one, and what is learned is to be had otherwise."""

import json

import numpy as np
import onnxruntime
import pytest

import apexrl
from apexrl.lifecycle import PERMANENT_STATUS
from apexrl.roles.export import export
from tests.system.processes import launch, read_json, refuse
from tests.system.test_training import learn

ENV = "tests.environments.masked_envs:Doors-v0"
SHORT = ("--preset", "small", "--total-updates", "40", "--min-size-to-sample", "200", "--episodes", "3")
LONG = pytest.mark.long("trainings")


@pytest.fixture
def notes(tmp_path):
    """The file in which the environment notes forbidden actions: there is none in the end."""
    path = tmp_path / "notes"
    yield path
    assert not path.exists(), path.read_text()


def flags_of(notes, **kwargs):
    key = "info:action_mask" if kwargs.get("in_info") else "action_mask"
    return "--env", ENV, "--env-kwargs", json.dumps({"notes": str(notes), **kwargs}), "--action-mask", key


def games(env, act, num_games):
    """The mean return of games."""
    total = 0.0
    for seed in range(num_games):
        (observation, _), is_over = env.reset(seed=seed), False
        while not is_over:
            observation, reward, is_over, _, _ = env.step(act(observation))
            total += reward
    return total / num_games


@pytest.mark.parametrize("is_in_info", [False, True], ids=["dictionary", "info"])
def test_actors_evaluations_load_and_export_keep_to_the_mask(tmp_path, free_ports, notes, is_in_info):
    flags, directory = flags_of(notes, in_info=is_in_info), tmp_path / "run"
    with launch(tmp_path, free_ports(4), *SHORT, *flags, "--frame-stack", "2", "--quantiles", "5") as run:
        assert run.popen.wait(300) == 0, run.text()
    assert read_json(directory / "summary.json")["roles_restarted"] == 0
    assert "failed in step" not in "".join(path.read_text() for path in (directory / "logs").iterdir())
    agent = apexrl.load(directory, trust=True)
    env = agent.make_environment()
    assert games(env, lambda observation: agent.act(observation, exploration=0.9), 5) > 0
    export(directory / "checkpoints" / "latest.safetensors", tmp_path / "network.onnx")
    session, name = onnxruntime.InferenceSession(tmp_path / "network.onnx"), "observation" if is_in_info else "prices"

    def greedy(observation):
        frame = np.concatenate([observation[name], observation["action_mask"]]).astype(np.float32)
        stack = np.stack([np.zeros_like(frame), frame])[None]
        return int(session.run(None, {"observation": stack})[0].argmax())

    assert games(env, greedy, 5) > 0
    if is_in_info:
        return
    other = ("--env", ENV, "--action-mask", "info:action_mask", "--trust")
    status, text = refuse("--fork", directory, "--run-dir", tmp_path / "fork", *other)
    assert status == PERMANENT_STATUS and "cannot change" in text and "--action-mask" in text, text


@pytest.mark.parametrize(
    "agent",
    [
        pytest.param(("--agent", "apex-dqn", "--munchausen", "0.9"), marks=LONG),
        ("--agent", "pqn"),
        ("--agent", "r2d2", "--batch-size", "4"),
        ("--agent", "impala", "--lstm"),
        pytest.param(("--agent", "impala", "--mix", "queue=1/4", "uniform=3/4", "--batch-size", "8"), marks=LONG),
        pytest.param(("--agent", "impact", "--batch-size", "8"), marks=LONG),
    ],
    ids=["munchausen", "pqn", "r2d2", "impala", "laser", "impact"],
)
def test_each_family_keeps_to_the_mask(tmp_path, free_ports, notes, agent):
    flags = ("--reproducible", *SHORT, *flags_of(notes), *agent, "--normalize-observations")
    with launch(tmp_path, free_ports(4), *flags) as run:
        assert run.popen.wait(300) == 0, run.text()
    summary = read_json(tmp_path / "run" / "summary.json")
    assert summary["updates"] == 40 and summary["evaluation_best_return"] > 0


@pytest.mark.timeout(3200)
@pytest.mark.parametrize(
    "agent",
    [
        ("--agent", "apex-dqn"),
        pytest.param(("--agent", "impala", "--batch-size", "4", "--learning-rate", "1e-3"), marks=LONG),
    ],
    ids=["apex-dqn", "impala"],
)
def test_the_best_open_door_is_learned(tmp_path, free_ports, notes, agent):
    """Chance earns 4.0 in a game, and the best that is allowed 6.4."""
    ends = ("--total-frames", 20_000, "--episodes", 40, "--evaluation-period-updates", 100, "--gamma", "0.5")
    summary = learn(tmp_path, free_ports(4), *flags_of(notes), "--reproducible", *agent, *ends, enough=6.0)
    assert summary["evaluation_best_return"] >= 6.0
