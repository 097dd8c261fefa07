import math
import subprocess
import sys
import typing
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import msgspec
import numpy as np
import pytest
import torch

from apexrl.acting import evaluation
from apexrl.acting.evaluation import GivingWay, _playable, newest_when_due
from apexrl.acting.games import GamesTold, play_games
from apexrl.config.commands import ActorCommand
from apexrl.config.flags import parse
from apexrl.config.sections import EvaluationConfig
from apexrl.errors import ApexError, PeerError
from apexrl.lifecycle import FEW_CORES, NICENESS, Stop
from apexrl.net.metrics_channel import Evaluation, checksum
from apexrl.networks.headers import ParametersHeader
from apexrl.networks.parameters import decode_parameters, encode_parameters
from apexrl.types import StreamSpec
from tests.acting.test_games import Agent, Game
from tests.lockstep import make_updater, parameters_of
from tests.system.processes import ROOT


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


def evaluate(evaluator, parameters, is_filmed=False):
    return evaluator.evaluate(parameters, b"encoded", lambda metrics: None, Stop(), is_filmed)


def test_neighbouring_seeds_and_updates_play_other_games():
    gymnasium.register("Seeded-v0", Seeded)
    played = {}
    for seed in (0, 1, 2, 9, 10, 2**31, 2**63 - 1):
        flags = ["--env", "Seeded-v0", "--seed", str(seed)]
        evaluator = evaluation.Evaluator(parse(ActorCommand, flags))
        watching = evaluation.Evaluator(parse(ActorCommand, [*flags, "--checkpoint", "best.safetensors"]))
        parameters = parameters_of(make_updater(evaluator.spec), evaluator.spec)
        for version in (0, 1, 2, 1000):
            header = msgspec.structs.replace(parameters.header, params_version=version)
            for repetition in range(2):
                Seeded.seeds.clear()
                assert evaluate(evaluator, parameters._replace(header=header))
                played[seed, version, repetition] = set(Seeded.seeds[:10])
                if version:  # an equal one may be the best, and as many other games say so
                    played[seed, version, repetition, "again"] = set(Seeded.seeds[10:])
                Seeded.seeds.clear()
                assert evaluate(watching, parameters._replace(header=header))
                played[seed, version, repetition, "watched"] = set(Seeded.seeds)
        evaluator.close()
        watching.close()
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

    def evaluated(version, *returns):
        Told.returns[:] = returns
        header = msgspec.structs.replace(parameters.header, params_version=version)
        outcome = evaluate(evaluator, parameters._replace(header=header))
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


class Later:
    """An ending that is set after so many looks."""

    def __init__(self, looks):
        self.looks = looks

    def is_set(self):
        self.looks -= 1
        return self.looks < 0

    def heed_signals(self):
        pass


def test_a_candidate_whose_last_games_are_cut_off_is_told_and_does_not_become_the_best():
    gymnasium.register("Cut-v0", Told)
    evaluator = evaluation.Evaluator(parse(ActorCommand, ["--env", "Cut-v0", "--episodes", "2"]))
    parameters = parameters_of(make_updater(evaluator.spec), evaluator.spec)

    def evaluated(version, stop, hurry, *returns):
        Told.returns[:] = returns
        header = msgspec.structs.replace(parameters.header, params_version=version)
        sent = parameters._replace(header=header), b"encoded"
        outcome = evaluator.evaluate(*sent, lambda metrics: None, stop, is_filmed=False, hurry=hurry)
        return outcome and (outcome.returns, outcome.parameters)

    never = Later(math.inf)
    assert evaluated(5, never, never, 1.0, 2.0, 3.0, 4.0) == ((1, 2, 3, 4), b"encoded")
    assert evaluated(6, never, Later(0), 9.0, 8.0) == ((9, 8), b""), "the run's last parameters are there"
    assert evaluated(7, Later(1), Later(0), 9.0, 8.0) is None, "the process ends"
    assert evaluated(8, never, never, 3.0, 2.0, 5.0, 5.0) == ((3, 2, 5, 5), b"encoded"), "the best has 2.5"
    assert evaluated(9, never, never, 2.0, 1.0) == ((2, 1), b"encoded"), "the best has 3.75"
    assert evaluated(2, never, never, 1.0, 1.0, 0.0, 0.0) == ((1, 1, 0, 0), b"encoded"), "its learner has gone back"
    evaluator.close()


def test_the_first_games_are_told_where_the_others_cannot_be_played():
    gymnasium.register("OthersFail-v0", Told)
    evaluator = evaluation.Evaluator(parse(ActorCommand, ["--env", "OthersFail-v0", "--episodes", "2"]))
    parameters, play = parameters_of(make_updater(evaluator.spec), evaluator.spec), evaluator._play

    def fails(agent, key, *others):
        if len(key) == 2 and key[1] == 1 and key[0] == 5:
            raise ApexError("the simulator is gone")
        return play(agent, key, *others)

    evaluator._play = fails
    Told.returns[:] = 1.0, 2.0
    header = msgspec.structs.replace(parameters.header, params_version=5)
    outcome = evaluate(evaluator, parameters._replace(header=header))
    evaluator.close()
    assert (outcome.returns, outcome.parameters) == ((1, 2), b"")


def test_the_first_games_of_a_runs_last_network_are_told_before_the_others():
    """The learner may not wait for as many more."""
    gymnasium.register("Last-v0", Told)
    evaluator, told = evaluation.Evaluator(parse(ActorCommand, ["--env", "Last-v0", "--episodes", "2"])), []
    parameters = parameters_of(make_updater(evaluator.spec), evaluator.spec)
    for version in (5, 6):
        Told.returns[:] = 1.0, 2.0, 3.0, 4.0
        header = msgspec.structs.replace(parameters.header, params_version=version, is_last=version == 6)
        sent = parameters._replace(header=header), b"encoded", lambda metrics: None, Stop()
        evaluator._best = None
        outcome = evaluator.evaluate(*sent, is_filmed=False, tell=told.append)
        assert (outcome.returns, outcome.parameters) == ((1, 2, 3, 4), b"encoded")
    evaluator.close()
    assert [(first.params_version, first.returns, first.parameters) for first in told] == [(6, (1, 2), b"")]


def test_the_first_evaluation_is_filmed_and_every_so_manieth_and_the_last(tmp_path):
    flags = ["--env", "Catch-v0", "--episodes", "1", "--film-every", "3", "--record-dir", str(tmp_path)]
    evaluator = evaluation.Evaluator(parse(ActorCommand, flags))
    parameters = parameters_of(make_updater(evaluator.spec), evaluator.spec)
    filmed = []
    for version in range(6):
        header = msgspec.structs.replace(parameters.header, params_version=version, is_last=version == 5)
        is_filmed = evaluator.is_film_due(header)
        outcome = evaluate(evaluator, parameters._replace(header=header), is_filmed)
        assert bool(outcome.video) == bool(outcome.picture) == is_filmed
        filmed += [version] * is_filmed
    evaluator.close()
    assert filmed == [0, 3, 5]
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"game-{version:08d}.webm" for version in filmed]


@pytest.fixture
def catch(tmp_path):
    """An evaluator of Catch, parameters for it, and their evaluation."""
    evaluator = evaluation.Evaluator(parse(ActorCommand, ["--env", "Catch-v0", "--record-dir", str(tmp_path)]))
    parameters = parameters_of(make_updater(evaluator.spec), evaluator.spec)
    yield evaluator, parameters, evaluate(evaluator, parameters)
    evaluator.close()


def test_a_film_behind_the_figures_changes_none_of_them_and_shows_the_first_game(catch):
    evaluator, parameters, apart = catch
    film = evaluator.film(parameters, Stop())
    at_once, again = evaluate(evaluator, parameters, is_filmed=True), evaluate(evaluator, parameters)
    assert apart.returns == at_once.returns[:10] == again.returns[:10], "ten more where it may be the best"
    assert not (apart.video or apart.picture)
    assert film["picture"] == at_once.picture and film["video"].endswith("/game-00000000.webm")
    assert at_once.video.endswith("/game-00000000-2.webm")


def test_a_film_ends_with_newer_parameters_and_is_kept_until_then(catch, monkeypatch):
    monkeypatch.setattr(evaluation, "LOOK_SECONDS", 0.0)
    evaluator, parameters, _ = catch
    ends = GivingWay(Stop(), Subscriber(None, None, published(7)), published(1), due=0.0)
    film = evaluator.film(parameters, ends)
    assert ends.newest == published(7) and film["picture"] and Path(film["video"]).is_file()


def test_a_film_that_cannot_be_drawn_or_fails_harms_nothing(catch, monkeypatch):
    def fail(*arguments):
        raise ApexError("no game came to its end")

    evaluator, parameters, _ = catch
    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "play_games", fail)
        assert evaluator.film(parameters, Stop()) == {"picture": b"", "video": ""}
    gymnasium.register("Plain-v0", Seeded)
    plain = evaluation.Evaluator(parse(ActorCommand, ["--env", "Plain-v0"]))
    mine = parameters_of(make_updater(plain.spec), plain.spec)
    assert evaluate(plain, mine) and plain.film(mine, Stop()) == {}
    plain.close()


def test_a_process_makes_way_where_cores_are_few():
    program = f"""
import os
from pathlib import Path
from apexrl.lifecycle import make_way
group = Path("/proc/self/autogroup")
make_way({FEW_CORES + 1})
before = os.nice(0)
make_way({FEW_CORES})
expected = min(19, before + {NICENESS})
print(os.nice(0) == expected, not os.access(group, os.W_OK) or int(group.read_text().split()[-1]) == expected)
"""
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, start_new_session=True, capture_output=True, text=True, timeout=110,
        check=True,
    )  # fmt: skip
    assert result.stdout.split() == ["True", "True"]


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


def test_the_newest_parameters_are_played_when_they_are_due_and_the_last_ones_at_once(monkeypatch):
    first, second, last = published(1), published(2), published(3, is_last=True)
    assert newest_when_due(Subscriber(first, second), 0.0, 100.0, Stop()) == first
    assert newest_when_due(Subscriber(first, None, second, last, first), math.inf, 100.0, Stop()) == last
    assert newest_when_due(Subscriber(first, b"malformed"), math.inf, 100.0, Stop()) == b"malformed"
    subscriber = Subscriber(first, None, second)
    clock = SimpleNamespace(monotonic=lambda: -len(subscriber.values))  # a look takes a second
    monkeypatch.setattr(evaluation, "time", clock)
    assert newest_when_due(subscriber, 0.0, 100.0, Stop()) == second


def test_an_evaluation_of_update_0_gives_way_to_newer_parameters_that_are_due(monkeypatch):
    monkeypatch.setattr(evaluation, "LOOK_SECONDS", 0.0)
    first, second, last = published(0), published(1), published(2, is_last=True)

    silent = GamesTold(1, 0, lambda metrics: None)

    def played(due, *values):
        giving_way = GivingWay(Stop(), Subscriber(*values), first, due)
        games = play_games(Agent(), [Game(9)], EvaluationConfig(episodes=1), 0, None, silent, giving_way)
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
        if len(told) == 4:
            stop.set()

    def evaluate(parameters, encoded, report, stop, is_filmed, hurry, tell):
        played.append((parameters.header.params_version, is_filmed))
        return Evaluation(3, 0.0, (1.0,), (1,), 1.0, parameters=encoded)

    def film(parameters, stop):
        played.append("a film")
        return {"video": "/a.webm"}

    closed = {"close": lambda: None}
    subscriber = Subscriber(*[published(2)] * 2, *[last] * 9)
    subscriber.close = lambda: None
    evaluator = SimpleNamespace(
        evaluate=evaluate,
        film=film,
        is_film_due=lambda header: True,
        spec=decode_parameters(last).header.spec,
        **closed,
    )
    metrics = SimpleNamespace(evaluation=tell, report=lambda scalars: None, **closed)
    for name, double in (("Evaluator", evaluator), ("ParameterSubscriber", subscriber), ("MetricsClient", metrics)):
        monkeypatch.setattr(evaluation, name, lambda *_, made=double: made)
    monkeypatch.setattr(evaluation, "make_way", lambda cores: None)
    evaluation.follow(parse(ActorCommand, ["--evaluation-period-seconds", "0", "--patience-seconds", "1"]), stop)
    assert played == [(2, False), "a film", (3, True)], "the end of a run waits for its film"
    assert [evaluated.video for evaluated in told] == ["", "/a.webm", "", ""]
    assert told[2] == told[3] and told[3].parameters == last


def test_the_last_parameters_of_a_learner_that_came_back_are_played_again_where_they_differ():
    """Its moments may have moved on, and an evaluation by others counts for nothing there."""
    last = published(3, is_last=True)
    header = decode_parameters(last).header
    evaluator, command = SimpleNamespace(spec=header.spec), parse(ActorCommand, [])

    def is_played(encoded, played):
        told = Evaluation(3, 0.0, (1.0,), (1,), 1.0, checksum=checksum(last))
        return _playable(encoded, evaluator, command, Subscriber(), played, told) is not None

    other = encode_parameters(header, {"mean": torch.ones(2)})
    assert is_played(last, None) and not is_played(last, header) and is_played(other, header)
    usual = decode_parameters(published(2)).header
    assert not is_played(encode_parameters(usual, {"mean": torch.ones(2)}), usual), "they are not the last"
