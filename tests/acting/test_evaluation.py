import json
import math
import subprocess
import sys
import time
import typing
from types import SimpleNamespace

import gymnasium
import msgspec
import numpy as np
import pytest

from apexrl.acting import evaluation
from apexrl.acting.evaluation import GivingWay, Progress, newest_when_due, play_games
from apexrl.config.commands import ActorCommand
from apexrl.config.flags import parse
from apexrl.config.sections import EnvConfig, EvaluationConfig
from apexrl.environments import renewal
from apexrl.environments.vector import make_environment
from apexrl.errors import ApexError, PeerError
from apexrl.lifecycle import FEW_CORES, NICENESS, Stop
from apexrl.net.metrics_channel import Evaluation
from apexrl.networks.headers import ParametersHeader
from apexrl.networks.parameters import decode_parameters, encode_parameters
from apexrl.types import StreamSpec, TimeSteps
from tests.environments import failing_envs
from tests.lockstep import make_updater, parameters_of
from tests.system.processes import ROOT


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


class Seeded(gymnasium.Env):
    """Ends at once, and keeps the seeds of its games."""

    observation_space = gymnasium.spaces.Box(0, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    seeds: typing.ClassVar[list[int]] = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.seeds.append(seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), 1.0, True, False, {}


@pytest.fixture
def recorder():
    return Recorder()


@pytest.fixture
def silent():
    return Progress(1, 0, lambda metrics: None)


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
    progress = Progress(num_games, 0, lambda metrics: None)
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


def test_an_evaluation_without_a_game_says_so(recorder, monkeypatch):
    monkeypatch.setattr(renewal, "STILL_SECONDS", 0.0)
    with pytest.raises(ApexError, match="no game of an evaluation came to its end: its environments failed 15 times"):
        play_failing(3, recorder, steps={str(i): 3 for i in range(99)})


def test_neighbouring_seeds_and_updates_play_other_games():
    gymnasium.register("Seeded-v0", Seeded)
    played = {}
    for seed in (0, 1, 2, 9, 10, 2**31, 2**63 - 1):
        evaluator = evaluation.Evaluator(parse(ActorCommand, ["--env", "Seeded-v0", "--seed", str(seed)]))
        parameters = parameters_of(make_updater(evaluator.spec), evaluator.spec)
        for version in (0, 1, 2, 1000):
            header = msgspec.structs.replace(parameters.header, params_version=version)
            for repetition in range(2):
                Seeded.seeds.clear()
                assert evaluator.evaluate(parameters._replace(header=header), lambda metrics: None, Stop())
                played[seed, version, repetition] = set(Seeded.seeds[:10])
                if version:  # an equal one may be the best, and as many other games say so
                    played[seed, version, repetition, "again"] = set(Seeded.seeds[10:])
        evaluator.close()
    first = {key: seeds for key, seeds in played.items() if not key[2]}
    assert all(len(seeds) == 10 and seeds == played[*key[:2], 1, *key[3:]] for key, seeds in first.items())
    assert len(set().union(*first.values())) == 10 * len(first)


class Told(Seeded):
    """Each game has the next of some returns."""

    returns: typing.ClassVar[list[float]] = []

    def step(self, action):
        return np.zeros(2, np.float32), self.returns.pop(0), True, False, {}


def test_a_candidate_for_the_best_is_played_again_and_all_its_games_count():
    gymnasium.register("Told-v0", Told)
    evaluator = evaluation.Evaluator(parse(ActorCommand, ["--env", "Told-v0", "--episodes", "2"]))
    parameters = parameters_of(make_updater(evaluator.spec), evaluator.spec)

    def evaluated(version, *returns, stop=None):
        Told.returns[:] = returns
        header = msgspec.structs.replace(parameters.header, params_version=version)
        outcome = evaluator.evaluate(parameters._replace(header=header), lambda metrics: None, stop or Stop())
        assert not Told.returns
        return outcome and outcome.returns

    assert evaluated(0, 1.0, 3.0) == (1, 3), "it replaces nothing"
    assert evaluated(5, 1.0, 2.0) == (1, 2), "it is worse"
    assert evaluated(6, 9.0, 9.0, 1.0, 1.0) == (9, 9, 1, 1), "luck"
    assert evaluated(7, 4.0, 4.0) == (4, 4), "the best has 5"
    assert evaluated(8, 5.0, 5.0, 7.0, 7.0) == (5, 5, 7, 7), "an equal one may be the best"
    evaluator.close()
    evaluator = evaluation.Evaluator(parse(ActorCommand, ["--env", "Told-v0", "--episodes", "2"]))
    assert evaluated(9, 0.0, 0.0, 1.0, 1.0) == (0, 0, 1, 1), "an evaluator that starts again knows no best"
    evaluator.close()
    evaluator = evaluation.Evaluator(parse(ActorCommand, ["--env", "Told-v0", "--episodes", "2", "--checkpoint", "a"]))
    assert evaluated(9, 3.0, 1.0) == (3, 1), "a checkpoint is played once"
    evaluator.close()


def test_the_first_evaluation_is_filmed_and_every_so_manieth_and_the_last(tmp_path):
    flags = ["--env", "Catch-v0", "--episodes", "1", "--film-every", "3", "--record-dir", str(tmp_path)]
    evaluator = evaluation.Evaluator(parse(ActorCommand, flags))
    parameters = parameters_of(make_updater(evaluator.spec), evaluator.spec)
    filmed = []
    for version in range(6):
        header = msgspec.structs.replace(parameters.header, params_version=version, is_last=version == 5)
        outcome = evaluator.evaluate(parameters._replace(header=header), lambda metrics: None, Stop())
        assert bool(outcome.video) == bool(outcome.picture)
        filmed += [version] * bool(outcome.video)
    evaluator.close()
    assert filmed == [0, 3, 5]
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"game-{version:08d}.webm" for version in filmed]


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
    progress = Progress(3, 70, told.append, period_seconds=0.0)
    play_games(Agent(), [Game(2), Game(3), Game(6)], EvaluationConfig(episodes=3), 0, recorder, progress, Stop())
    finished = [metrics["evaluation/games_finished"] for metrics in told]
    assert finished == [0, 1, 2, 2, 2, 3]  # after each step
    assert [metrics.get("evaluation/return_so_far") for metrics in told] == [None, 0, 1.5, 1.5, 1.5, 5]


def test_the_last_games_are_told_within_a_period_too(recorder):
    told = []
    progress = Progress(2, 1, told.append, period_seconds=1e6)
    play_games(Agent(), [Game(2), Game(3)], EvaluationConfig(episodes=2), 0, recorder, progress, Stop())
    assert told == [
        {"evaluation/games_finished": 0},
        {"evaluation/games_finished": 2, "evaluation/return_so_far": 1.5},
    ]


def test_an_algorithm_says_how_it_explores_in_evaluations(recorder, silent):
    class Noting(Agent):
        def act(self, seen, exploration, state, rng):
            noted.extend(exploration)
            return super().act(seen, exploration, state, rng)

    noted = []
    play_games(Noting(), [Game(2)], EvaluationConfig(episodes=1), 0, recorder, silent, Stop())
    assert noted == [0.25, 0.25]


def test_a_process_makes_way_where_cores_are_few():
    program = f"""
import os
from pathlib import Path
from apexrl.lifecycle import make_way
group = Path("/proc/self/autogroup")
make_way({FEW_CORES + 1})
before = os.nice(0)
make_way({FEW_CORES})
print(os.nice(0) - before, group.read_text().split()[-1] if os.access(group, os.W_OK) else {NICENESS})
"""
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, start_new_session=True, capture_output=True, text=True, timeout=110,
        check=True,
    )  # fmt: skip
    assert result.stdout.split() == [str(NICENESS)] * 2


class Subscriber:
    """Gives what was published, one value a call."""

    endpoint = "nowhere"

    def __init__(self, *values):
        self.values = list(values)

    def fetch_encoded(self, timeout_milliseconds=0):
        return self.values.pop(0) if self.values else None


def published(version, is_last=False):
    spec = StreamSpec("Any-v0", (2,), "float32", 1, 2, 1)
    return encode_parameters(ParametersHeader(version, spec, "apex-dqn", "{}", is_last=is_last), {})


def test_the_newest_parameters_are_played_when_they_are_due_and_the_last_ones_at_once():
    first, second, last = published(1), published(2), published(3, is_last=True)
    assert newest_when_due(Subscriber(first, second), 0.0, 100.0, Stop()) == first
    assert newest_when_due(Subscriber(first, None, second, last, first), math.inf, 100.0, Stop()) == last
    assert newest_when_due(Subscriber(first, b"malformed"), math.inf, 100.0, Stop()) == b"malformed"
    soon = time.monotonic() + 0.2
    assert newest_when_due(Subscriber(first, None, second), soon, 100.0, Stop()) == second


def test_an_evaluation_of_update_0_gives_way_to_newer_parameters_that_are_due(monkeypatch, recorder, silent):
    monkeypatch.setattr(evaluation, "LOOK_SECONDS", 0.0)
    first, second, last = published(0), published(1), published(2, is_last=True)

    def played(due, *values):
        giving_way = GivingWay(Stop(), Subscriber(*values), first, due)
        games = play_games(Agent(), [Game(9)], EvaluationConfig(episodes=1), 0, recorder, silent, giving_way)
        return games is not None, giving_way.newest

    assert played(0.0, None, first, first) == (True, None), "nothing is newer"
    assert played(math.inf, None, second, first) == (True, second), "it is not due, and is kept"
    assert played(0.0, None, second) == (False, second)
    assert played(math.inf, second, last) == (False, last), "a run's last ones are due at once"
    assert newest_when_due(Subscriber(), 0.0, 100.0, Stop(), second) == second


def test_parameters_are_waited_for_with_patience_and_not_after_a_stop():
    with pytest.raises(PeerError, match="no parameters from nowhere"):
        newest_when_due(Subscriber(), 0.0, 0.001, Stop())
    stop = Stop()
    stop.set()
    assert newest_when_due(Subscriber(published(1)), 0.0, 100.0, stop) is None


def test_a_learner_that_was_away_hears_its_last_evaluation_again(monkeypatch):
    """A learner that starts again publishes the same last parameters; they are played once, and told once more."""
    stop, told, played = Stop(), [], []
    last = published(3, is_last=True)

    def tell(evaluated):
        told.append(evaluated)
        if len(told) == 3:
            stop.set()

    def evaluate(parameters, report, stop):
        played.append(parameters.header.params_version)
        return Evaluation(3, 0.0, (1.0,), (1,), 1.0)

    closed = {"close": lambda: None}
    subscriber = Subscriber(*[published(2)] * 2, *[last] * 9)
    subscriber.close = lambda: None
    evaluator = SimpleNamespace(evaluate=evaluate, spec=decode_parameters(last).header.spec, **closed)
    metrics = SimpleNamespace(evaluation=tell, report=lambda scalars: None, **closed)
    for name, double in (("Evaluator", evaluator), ("ParameterSubscriber", subscriber), ("MetricsClient", metrics)):
        monkeypatch.setattr(evaluation, name, lambda *_, made=double: made)
    monkeypatch.setattr(evaluation, "make_way", lambda cores: None)
    evaluation.follow(parse(ActorCommand, ["--evaluation-period-seconds", "0", "--patience-seconds", "1"]), stop)
    assert played == [2, 3] and told[1] == told[2] and told[2].parameters == last
