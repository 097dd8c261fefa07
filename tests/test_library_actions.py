"""The agent of the library beside a vector of environments: its actions, and what it is told of the last step."""

from types import SimpleNamespace

import numpy as np
import pytest

from apexrl import library
from apexrl.config.commands import ActorCommand
from apexrl.config.flags import parse
from apexrl.config.sections import EnvConfig
from apexrl.environments.vector import make_environment
from apexrl.running.environment_actions import actions_of
from tests.environments import odd_envs


class Given:
    """Takes the same actions each time, and keeps its observations."""

    def __init__(self, action):
        self.action, self.seen = np.array(action), []

    def initial_state(self, num_envs):
        return 0

    def act(self, observation, exploration, state, rng):
        self.seen.append(observation)
        return np.array([self.action] * len(exploration)), {}, state


@pytest.fixture
def make_agent(monkeypatch):
    def make(actor):
        families = SimpleNamespace(make_actor=lambda *arguments: actor)
        monkeypatch.setattr(library, "implementation", lambda family: families)
        command = parse(ActorCommand, ["--env", "tests.environments.odd_envs:Vector-actions-v0"])
        header = SimpleNamespace(spec=make_environment(command.env, 1).spec, agent="apex-dqn")
        return library.Agent(SimpleNamespace(header=header, parameters=lambda: None), command)

    return make


def test_vectors_of_actions_are_those_that_the_environment_was_trained_with(make_agent):
    agent = make_agent(Given([-9.0, 9.0]))
    assert agent.act(np.zeros(2, np.float32)).tolist() == [-1.0, 5.0]
    agent.reset()
    found = agent.act(np.zeros((3, 2), np.float32))
    assert found.dtype == np.float32 and found.tolist() == [[-1.0, 5.0]] * 3


@pytest.mark.parametrize("error", [SystemExit(3), AttributeError("there is no window")])
def test_an_environment_that_cannot_be_closed_gives_its_agent_and_its_actions(make_agent, monkeypatch, caplog, error):
    def close(self):
        raise error

    monkeypatch.setattr(odd_envs.Actions, "close", close)
    agent = make_agent(Given([-9.0, 9.0]))
    assert agent.act(np.zeros(2, np.float32)).tolist() == [-1.0, 5.0]
    config = EnvConfig("tests.environments.odd_envs:Vector-actions-v0")
    caplog.clear()
    assert actions_of(config, agent.spec).bounds == agent.spec.action_bounds
    assert "Vector-actions-v0' cannot be closed: " in caplog.text


def test_starts_and_rewards_are_one_of_each_environment(make_agent):
    actor = Given([0.0, 3.0])
    agent, seen = make_agent(actor), np.zeros((3, 2), np.float32)
    agent.act(seen)
    agent.act(seen, starts=[0, 1, 0], rewards=[1, 2, 3])
    assert actor.seen[1].starts.tolist() == [False, True, False] and actor.seen[1].rewards.tolist() == [1, 2, 3]
    for wrong in ({"starts": [True]}, {"starts": [0, 0.5, 1]}, {"rewards": 1.0}, {"rewards": [1j, 0, 0]}):
        with pytest.raises(ValueError, match=r"where .* needed"):
            agent.act(seen, **wrong)
