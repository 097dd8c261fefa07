"""Arguments of single copies: a number of their own, and a render mode that their observations need."""

import contextlib
import json
from typing import ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box

from apexrl.acting.evaluation import Evaluator
from apexrl.acting.player import Player
from apexrl.agents.apex_dqn_config import FAMILY
from apexrl.config.commands import ActorCommand, WorkerCommand
from apexrl.config.sections import ActingConfig, EnvConfig, EvaluationConfig
from apexrl.environments.vector import make_environment, make_game
from apexrl.errors import ConfigError

PLACES = {"ports": ["47000+{copy}"], "folder": "out/{copy}"}
NUMBERED = EnvConfig("Numbered-v0", json.dumps({"number": "{copy}", "places": PLACES}))
RENDERED = EnvConfig("Catch-v0", '{"render_mode": "rgb_array"}', ("gymnasium.wrappers:AddRenderObservation",))
MADE = []


class Numbered(gymnasium.Env):
    """Shows the number that its arguments give it."""

    observation_space, action_space = Box(0, 100, (1,), np.float32), gymnasium.spaces.Discrete(2)

    def __init__(self, number, places):
        assert places == {"ports": [47000 + number], "folder": f"out/{number}"}
        self._number = number
        MADE.append(number)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.float32([self._number]), {}


class Deep(Numbered):
    """Renders depths, which are no pictures."""

    metadata: ClassVar = {"render_modes": ["depth_array", "rgb_array"]}

    def __init__(self, number, places, render_mode):
        assert render_mode == "depth_array"
        self._number, self.render_mode = number, render_mode


for maker in (Numbered, Deep):
    gymnasium.register(f"{maker.__name__}-v0", maker, disable_env_checker=True)


@pytest.fixture(autouse=True)
def nothing_made():
    MADE.clear()


def test_each_copy_gets_its_number_and_all_are_the_same_environment():
    with contextlib.closing(make_environment(NUMBERED, 3, first_copy=20)) as envs:
        assert envs.reset(seed=0).tolist() == [[20], [21], [22]]
        assert json.loads(envs.spec.variant) == {"env_kwargs": json.loads(NUMBERED.env_kwargs)}


def test_no_two_copies_of_a_run_on_one_host_have_the_same_number():
    acting = ActingConfig(environments_per_worker=5, environment_groups=2)
    shared = {"env": NUMBERED, "acting": acting, "algorithm": FAMILY.algorithm}
    evaluations = EvaluationConfig(episodes=100), EvaluationConfig(episodes=100, checkpoint="best.safetensors")
    parts = [Evaluator(ActorCommand(**shared, evaluation=evaluation)) for evaluation in evaluations]
    assert MADE == list(range(20))
    parts += [Player(WorkerCommand(**shared, worker_index=worker)) for worker in range(2)]
    assert MADE == list(range(30))
    for part in parts:
        part.close()


def test_a_game_of_ones_own_has_the_number_that_is_asked_for():
    for arguments in ((), (None, 31)):
        with contextlib.closing(make_game(NUMBERED, *arguments)) as game:
            assert game.unwrapped.spec.kwargs["number"] == MADE[-1], "where a wrapper finds it"
    assert MADE == [10, 31]


def test_agents_learn_from_rendered_pictures_which_are_filmed_too():
    with contextlib.closing(make_environment(RENDERED, 2, evaluate=True, render=True)) as envs:
        frames = envs.reset(seed=0)
        assert frames.shape == (2, 160, 112, 3) and np.array_equal(envs.render(), frames[0])
    with contextlib.closing(make_game(RENDERED, "rgb_array")) as game:
        assert game.reset(seed=0)[0].shape == (160, 112, 3)
    with pytest.raises(ConfigError, match="render_mode 'human': --env-kwargs ask for 'rgb_array'"):
        make_game(RENDERED, "human")


def test_an_environment_that_renders_something_else_is_not_filmed(caplog):
    config = EnvConfig("Deep-v0", '{"render_mode": "depth_array", "number": 7, "places": null}')
    with contextlib.closing(make_environment(config, 1, evaluate=True, render=True)) as envs:
        assert envs.reset(seed=0).tolist() == [[7]] and envs.render() is None
    assert "no pictures; --env-kwargs ask for the render_mode depth_array" in caplog.text
