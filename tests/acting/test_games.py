"""Games that are played side by side, in environments and by agents of this file."""

import json

import numpy as np
import pytest
from gymnasium.utils import seeding

from apexrl.acting.games import GamesTold, play_games
from apexrl.config.sections import EnvConfig, EvaluationConfig
from apexrl.environments import renewal
from apexrl.environments.vector import make_environment
from apexrl.errors import ApexError
from apexrl.lifecycle import Stop
from apexrl.types import TimeSteps
from tests.environments import failing_envs


class Game:
    """Lasts a number of steps, each time; the reward of a step is its action."""

    def __init__(self, length, stop=None):
        self.length, self.stop = length, stop
        self.steps, self.total, self.num_steps, self.seeds = 0, 0.0, 0, []

    def reset(self, seed):
        self.seeds.append(seed)
        return np.zeros((1, 2), np.float32)

    def send(self, actions):
        (self.action,) = actions

    def receive(self):
        self.num_steps += 1
        starts = self.steps == self.length
        self.steps, self.total = (0, 0.0) if starts else (self.steps + 1, self.total + self.action)
        ends = self.steps == self.length
        if self.stop is not None and self.num_steps == 5:
            self.stop.set()
        flags = np.ones(1, np.float32), np.array([starts])
        returns, steps = np.array([self.total if ends else np.nan]), np.array([self.steps if ends else 0])
        return TimeSteps(np.full((1, 2), self.steps, np.float32), flags[0], *flags, returns, steps)

    def render(self):
        return np.zeros((1, 1, 3), np.uint8)


class Agent:
    """Takes the action that is the number of the environment, and keeps its observations."""

    evaluation_exploration = 0.25

    def __init__(self):
        self.seen = []

    def initial_state(self, num_envs):
        return num_envs

    def act(self, seen, exploration, state, rng):
        assert len(seen.frames) == len(seen.starts) == len(seen.rewards) == len(exploration) == state
        self.seen.append((seen.frames[:, 0].tolist(), seen.starts.tolist()))
        return np.arange(len(seen.frames), dtype=np.int32), {}, state


class Recorder:
    def __init__(self):
        self.num_pictures = 0

    def film(self, render):
        self.num_pictures += render() is not None


@pytest.fixture
def recorder():
    return Recorder()


@pytest.fixture
def silent():
    return GamesTold(1, 0, lambda metrics: None)


def test_every_environment_plays_its_share_of_whole_games_and_then_rests(recorder, silent):
    envs = [Game(3), Game(2), Game(40)]
    games = play_games(Agent(), envs, EvaluationConfig(episodes=5), 7, recorder, silent, Stop())
    assert games.steps == [3, 3, 2, 2, 40]
    assert games.returns == [0, 0, 2, 2, 80]
    assert [env.num_steps for env in envs] == [3 + 1 + 3, 2 + 1 + 2, 40]
    assert recorder.num_pictures == 4  # the first game's, before each step and after the last
    assert [env.seeds for env in envs] == [[7], [8], [9]]


def play_failing(num_games, recorder, **kwargs):
    """Plays games in three environments that fail as they are told."""
    failing_envs.made.clear()
    config = EnvConfig("tests.environments.failing_envs:Breakable-v0", env_kwargs=json.dumps(kwargs))
    failures = renewal.Failures()
    envs = [make_environment(config, 1, failures=failures) for _ in range(3)]
    progress = GamesTold(num_games, 0, lambda metrics: None)
    try:
        return play_games(Still(), envs, EvaluationConfig(episodes=num_games), 7, recorder, progress, Stop())
    finally:
        for env in envs:
            env.close()


class Still(Agent):
    def act(self, *observed):
        actions, *others = super().act(*observed)
        return np.zeros_like(actions), *others


def test_a_game_that_fails_is_played_anew_and_its_return_counts_for_nothing(recorder, monkeypatch):
    monkeypatch.setattr(renewal, "STILL_SECONDS", 0.0)
    games = play_failing(6, recorder, steps={"1": 3, "2": 8, "3": 2})
    assert games.returns == games.steps == [failing_envs.GAME_STEPS] * 6


@pytest.mark.parametrize("makings", [[], [*range(3, 99)]])
def test_an_environment_that_fails_again_and_again_holds_no_evaluation(recorder, monkeypatch, caplog, makings):
    monkeypatch.setattr(renewal, "STILL_SECONDS", 0.0)
    games = play_failing(3, recorder, steps={str(i): 3 for i in range(99) if i not in (0, 2)}, makings=makings)
    assert games.returns == [failing_envs.GAME_STEPS] * 2
    assert "an evaluation has 2 of 3 games" in caplog.text


@pytest.mark.parametrize("num_makings", [1, 2, 3])
def test_an_environment_that_comes_back_after_rests_plays_its_game(recorder, monkeypatch, num_makings):
    """Its rests are no failures."""
    monkeypatch.setattr(renewal, "STILL_SECONDS", 0.0)
    games = play_failing(3, recorder, steps={"1": 3}, makings=[*range(3, 3 + num_makings)])
    assert games.returns == [failing_envs.GAME_STEPS] * 3


def test_an_evaluation_without_a_game_says_so(recorder, monkeypatch):
    monkeypatch.setattr(renewal, "STILL_SECONDS", 0.0)
    with pytest.raises(ApexError, match="no game of an evaluation came to its end: its environments failed 15 times"):
        play_failing(3, recorder, steps={str(i): 3 for i in range(99)})


def test_the_agent_is_shown_the_newest_frames_and_where_games_begin(recorder, silent):
    agent = Agent()
    play_games(agent, [Game(2), Game(3)], EvaluationConfig(episodes=3), 0, recorder, silent, Stop())
    assert [starts for _, starts in agent.seen] == [
        [True, True], [False, False], [False, False], [True, False], [False, False],
    ]  # fmt: skip
    assert [frames for frames, _ in agent.seen] == [[0, 0], [1, 1], [2, 2], [0, 3], [1, 3]]


def test_a_stop_ends_the_games_without_an_outcome(recorder, silent):
    stop = Stop()
    games = play_games(Agent(), [Game(10**6, stop)], EvaluationConfig(episodes=1), 0, recorder, silent, stop)
    assert games is None


def test_finished_games_are_told_while_others_go_on(recorder):
    told = []
    progress = GamesTold(3, 70, told.append, period_seconds=0.0)
    play_games(Agent(), [Game(2), Game(3), Game(6)], EvaluationConfig(episodes=3), 0, recorder, progress, Stop())
    finished = [metrics["evaluation/games_finished"] for metrics in told]
    assert finished == [0, 1, 2, 2, 2, 3]  # after each step
    assert [metrics.get("evaluation/return_so_far") for metrics in told] == [None, 0, 1.5, 1.5, 1.5, 5]


def test_the_last_games_are_told_within_a_period_too(recorder):
    told = []
    progress = GamesTold(2, 1, told.append, period_seconds=1e6)
    play_games(Agent(), [Game(2), Game(3)], EvaluationConfig(episodes=2), 0, recorder, progress, Stop())
    assert told == [
        {"evaluation/games_finished": 0},
        {"evaluation/games_finished": 2, "evaluation/return_so_far": 1.5},
    ]


def test_choices_are_drawn_apart_from_what_an_environment_draws(recorder, silent):
    """A lonely environment has the seed itself, and would draw the very numbers that choose its actions."""

    class Drawing(Agent):
        def act(self, seen, exploration, state, rng):
            drawn.append(rng.random())
            return super().act(seen, exploration, state, rng)

    drawn, env = [], Game(3)
    play_games(Drawing(), [env], EvaluationConfig(episodes=1), 7, recorder, silent, Stop())
    own, _ = seeding.np_random(env.seeds[0])
    assert not {own.random() for _ in range(9)}.intersection(drawn)


def test_an_algorithm_says_how_it_explores_in_evaluations(recorder, silent):
    class Noting(Agent):
        def act(self, seen, exploration, state, rng):
            noted.extend(exploration)
            return super().act(seen, exploration, state, rng)

    noted = []
    play_games(Noting(), [Game(2)], EvaluationConfig(episodes=1), 0, recorder, silent, Stop())
    assert noted == [0.25, 0.25]
