"""Actions of an agent of one's own, on their way into the log: as the environments take them, or refused."""

import dataclasses

import numpy as np
import pytest

from apexrl.acting.games import GamesTold, play_games
from apexrl.acting.player import EnvironmentGroup
from apexrl.acting.video import VideoWriter
from apexrl.config.sections import EnvConfig, EvaluationConfig
from apexrl.environments.vector import make_environment
from apexrl.errors import ApexError
from apexrl.lifecycle import Stop
from apexrl.networks.headers import ParametersHeader
from apexrl.unroll import UnrollCodec

VECTORS = EnvConfig("tests.environments.odd_envs:Vector-actions-v0")  # shows its last action; bounds -1..0 and 2..5


class Given:
    """An agent whose actions and priorities are given."""

    evaluation_exploration = 0.0

    def __init__(self, actions, priorities=None):
        self.header, self._actions, self._priorities = None, actions, priorities

    def initial_state(self, num_envs):
        return None

    def act(self, observation, exploration, state, rng):
        return self._actions(len(observation.starts), rng), {}, None

    def priorities(self, unrolls, extras):
        return self._priorities


def rounds_of(config, agent, num_steps=20):
    """The unrolls of two environments, four steps each, with the frames that the environments showed."""
    envs = make_environment(config, 2)
    spec = envs.spec.streamed(4, overlap_steps=1)
    group, agent.header, rounds = EnvironmentGroup(envs, spec, range(2)), ParametersHeader(0, spec, "given", ""), []
    try:
        group.reset(agent, 0)
        for _ in range(num_steps):
            if (step := group.receive()) is not None:
                group.add(step)
            if (complete := group.observe(agent, group.act(agent, np.random.default_rng(len(rounds))))) is not None:
                rounds.append(complete)
    finally:
        group.close()
    return spec, rounds


def test_the_log_holds_the_actions_that_the_environment_took():
    spec, rounds = rounds_of(VECTORS, Given(lambda size, rng: rng.normal(scale=9, size=(size, 2))))
    assert len(rounds) > 3
    for complete in rounds:
        unroll = UnrollCodec(spec).decode(UnrollCodec(spec).encode(complete.unrolls.stream(1)))
        shown = unroll.frames[spec.stacked_frames :]
        assert np.array_equal(unroll.actions, shown)
        low, high = np.array(spec.action_bounds, np.float32).T
        assert (unroll.actions >= low).all() and (unroll.actions <= high).all()


def test_an_environment_that_changes_its_action_does_not_change_the_log():
    config = dataclasses.replace(VECTORS, wrapper=("tests.environments.odd_envs:Overwriting",))
    _, rounds = rounds_of(config, Given(lambda size, rng: np.full((size, 2), 3, np.float32)))
    assert (rounds[0].unrolls.actions == [0.0, 3.0]).all()


@pytest.mark.parametrize("actions", [np.full(2, 1.4), np.full(2, 3), np.zeros((2, 1), int), np.zeros(1, int)])
def test_actions_that_are_none_end_the_actor_at_its_first_step(actions):
    with pytest.raises(ApexError, match="the agent gives"):
        rounds_of(EnvConfig("Catch-v0"), Given(lambda size, rng: actions), 1)


@pytest.mark.parametrize(
    ("priorities", "complaint"),
    [
        (np.ones((3, 2)), r"priorities of the shape \(3, 2\), where \(4, 2\) is needed"),
        (np.ones((1, 2)), "priorities of the shape"),
        (np.float32(1), "priorities of the shape"),
        (np.full((4, 2), 1j), "priorities of an array of complex128, where numbers"),
        (np.full((4, 2), -0.5), "the priority -0.5: at least 0"),
        (np.full((4, 2), np.nan), "values are not finite"),
        (np.full((4, 2), 1e39), "values are not finite"),
    ],
)
def test_priorities_that_are_none_are_refused(priorities, complaint):
    agent = Given(lambda size, rng: np.zeros(size, int), priorities)
    with pytest.raises(ApexError, match=complaint):
        rounds_of(EnvConfig("Catch-v0"), agent)


@pytest.mark.parametrize("actions", [np.full(2, 1.4), np.full(2, 3), np.zeros(1, int)])
def test_an_evaluation_refuses_actions_that_are_none(actions):
    envs = [make_environment(EnvConfig("Catch-v0"), 1) for _ in range(2)]
    progress = GamesTold(2, 0, lambda metrics: None)
    agent = Given(lambda size, rng: actions)
    with pytest.raises(ApexError, match="the agent gives"):
        play_games(agent, envs, EvaluationConfig(episodes=2), 0, VideoWriter(None, 10.0), progress, Stop())
    for env in envs:
        env.close()
