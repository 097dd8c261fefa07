import numpy as np
import pytest

from apexrl.config import EvaluationConfig
from apexrl.evaluation import play_games
from apexrl.lifecycle import Stop
from apexrl.types import TimeSteps


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
    """Takes the action that is the number of the environment, and keeps what it was shown."""

    def __init__(self):
        self.seen = []

    def initial_state(self, num_envs):
        return num_envs

    def act(self, frames, starts, epsilons, state, rng):
        assert len(frames) == len(starts) == len(epsilons) == state
        self.seen.append((frames[:, 0].tolist(), starts.tolist()))
        return np.arange(len(frames), dtype=np.int32), {}


class Recorder:
    def __init__(self):
        self.num_pictures = 0

    def add(self, picture):
        self.num_pictures += 1


@pytest.fixture
def recorder():
    return Recorder()


def test_every_environment_plays_its_share_of_whole_games_and_then_rests(recorder):
    envs = [Game(3), Game(2), Game(40)]
    games = play_games(Agent(), envs, EvaluationConfig(episodes=5), 7, recorder, Stop())
    assert games.steps == [3, 3, 2, 2, 40]
    assert games.returns == [0, 0, 2, 2, 80]
    assert [env.num_steps for env in envs] == [3 + 1 + 3, 2 + 1 + 2, 40]
    assert recorder.num_pictures == 3  # of the first game
    assert [env.seeds for env in envs] == [[7], [8], [9]]


def test_the_agent_is_shown_the_newest_frames_and_where_games_begin(recorder):
    agent = Agent()
    play_games(agent, [Game(2), Game(3)], EvaluationConfig(episodes=3), 0, recorder, Stop())
    assert [starts for _, starts in agent.seen] == [
        [True, True], [False, False], [False, False], [True, False], [False, False],
    ]  # fmt: skip
    assert [frames for frames, _ in agent.seen] == [[0, 0], [1, 1], [2, 2], [0, 3], [1, 3]]


def test_a_stop_ends_the_games_without_an_outcome(recorder):
    stop = Stop()
    assert play_games(Agent(), [Game(10**6, stop)], EvaluationConfig(episodes=1), 0, recorder, stop) is None
