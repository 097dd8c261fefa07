import dataclasses
from unittest import mock

import msgspec
import numpy as np
import pytest
import torch

from apexrl.agents.apex_dqn_config import FAMILY
from apexrl.agents.contract import Outcome
from apexrl.config.commands import LearnerCommand
from apexrl.config.schedules import share_of_endless
from apexrl.config.sections import LearningConfig
from apexrl.errors import ApexError
from apexrl.learning import loop as learning_loop
from apexrl.learning.experience.draw import Draw, Gathered
from apexrl.learning.loop import LearnerLoop
from apexrl.learning.record.status_file import LAST_EVALUATION
from apexrl.learning.updates import updater as updaters
from apexrl.learning.updates.soundness import MOST_UNUSABLE_UPDATES
from apexrl.learning.updates.updater import Pending, Result
from apexrl.lifecycle import Stop
from apexrl.net.metrics_channel import Evaluation
from apexrl.networks.device_stream import DeviceStream
from apexrl.networks.headers import Counters
from apexrl.networks.parameters import decode_parameters
from apexrl.types import LogPosition
from tests.lockstep import CPU, TABLE, identity_of
from tests.networks.test_device_stream import SlowDeviceStream


class Replica:
    """Gives batches, and ends the learner after some."""

    def __init__(self, stop, num_batches):
        self.stop, self.left, self.sent, self.waits_for, self.away = stop, num_batches, [], "", ""
        self.counted = {0: LogPosition()}
        self.params_versions: list[int] = []
        self.num_undecodable = 0
        self.selection_metrics: dict[str, float] = {}

    @property
    def transitions(self):
        return self.counted[0].transitions

    def of(self, draw):
        return self

    def made(self, num_updates):
        pass

    def drain_episodes(self):
        return []

    def next_draw(self, timeout_seconds):
        self.left -= 1
        if self.left < 0:
            self.stop.set()
            return None
        return Draw(5, {}, self.left)

    def upcoming_draw(self):
        return Draw(5, {}, self.left - 1)

    def update_priorities(self, generation, table, keys, priorities):
        assert table == TABLE
        self.sent.append((generation, int(keys[0]), float(priorities[0])))


class Updater:
    """Answers through a slow device; some batches have nothing left."""

    def __init__(self, spec, device_stream, replica, unusable=lambda number: False):
        self.num_updates, self.spec, self.device_stream, self.replica, self.unusable = (
            0,
            spec,
            device_stream,
            replica,
            unusable,
        )
        self.most_in_flight = 0
        self.gradient_norm = 1.0
        self.weights = torch.zeros(1)

    def schedule(self, numbers):
        assert numbers["learning_rate"] == FAMILY.update.learning_rate

    def follow_moments(self):
        pass

    def update(self, draw, upcoming, scale):
        assert scale == 1
        assert upcoming.shard == draw.shard - 1
        if draw.shard % 10 == 3:
            return None
        self.num_updates += 1
        self.weights += 1
        self.most_in_flight = max(self.most_in_flight, self.num_updates - len(self.replica.sent))
        priority = np.nan if self.unusable(self.num_updates) else self.num_updates
        values = torch.tensor([priority, 0.5, self.gradient_norm])
        keys = {TABLE: np.array([self.num_updates])}
        scalars = (Result("metrics", name, (), "") for name in ("loss", "gradient_norm"))
        results = (Result("priorities", "priorities", (1,), TABLE), *scalars)
        return Pending(keys, results, values, self.device_stream.event())

    def parameters(self):
        """On a CPU the network's own tensors, which the next update changes in place."""
        return self.device_stream.fetch({"a": self.weights})[0], self.device_stream.event()

    def state_dict(self):
        return {"acting.a": self.weights}


@pytest.fixture
def servers(monkeypatch):
    """The things around a learner, by the name of the class."""
    made = {name: mock.MagicMock() for name in ("ParameterPublisher", "MetricsServer", "LogClient")}
    for name, double in made.items():
        monkeypatch.setattr(f"apexrl.learning.connections.{name}", mock.MagicMock(return_value=double))
    made["MetricsServer"].latest.return_value = {}
    return made


def published(servers):
    """The functions that encode what was published."""
    return [call.args[0] for call in servers["ParameterPublisher"].publish_later.call_args_list]


@pytest.fixture
def make_loop(servers, spec):
    def make(update=FAMILY.update, **learning):
        parts = {"algorithm": FAMILY.algorithm, "update": update, "network": FAMILY.network}
        made = LearnerLoop(LearnerCommand(**parts, learning=LearningConfig(device="cpu", **learning)), "learner")
        made._identity = identity_of(spec)
        return made

    return make


@pytest.fixture
def loop(make_loop):
    return make_loop()


class ScheduledLearner:
    """Is told its learning rate, and reports it with each update."""

    has_side_work = False
    num_steps = 1

    def __init__(self):
        self.rate = None
        self.told, self.updated = [], []

    def schedule(self, numbers):
        self.rate = numbers["learning_rate"]
        self.told.append(self.rate)

    def minibatches(self, batches, known):
        yield batches, known

    def gradients(self, batches, known):
        self.updated.append(self.rate)
        return Outcome({}, {"loss": torch.zeros(())})

    def apply(self):
        return {}

    def is_copy_due(self, num_updates):
        return False

    def acting_tensors(self):
        return {}

    def learning_tensors(self):
        return {"rate": torch.zeros(())}


class GrowingReplica(Replica):
    """The log grows with every second draw."""

    def next_draw(self, timeout_seconds):
        draw = super().next_draw(timeout_seconds)
        self.counted = {0: LogPosition("log", 0, 50 * ((11 - self.left) // 2))}
        keys = np.zeros(1, np.int64)
        return draw and Draw(5, {TABLE: Gathered(keys, None, keys)})


@pytest.mark.parametrize("total_frames", [0, 5000])
def test_the_learner_knows_its_numbers_before_each_update(make_loop, spec, total_frames):
    spec = msgspec.structs.replace(spec, frames_per_step=4)
    update = dataclasses.replace(FAMILY.update, learning_rate="1:0")
    loop, learner, stop = make_loop(update, total_frames=total_frames), ScheduledLearner(), Stop()
    updater = updaters.Updater(learner, DeviceStream(CPU))
    loop.update(updater, GrowingReplica(stop, 10), mock.MagicMock(), spec, stop)
    frames = [200, 200, 400, 400, 600, 600, 800, 800, 1000, 1000]
    assert learner.updated == [1 - (f / total_frames if total_frames else share_of_endless(f)) for f in frames]
    assert learner.told == learner.updated[::2]
    updater.load_state_dict(updater.state_dict(), 7)
    updater.schedule({"learning_rate": learner.rate})
    assert learner.told[-2:] == [learner.rate] * 2, "loading has replaced what follows a schedule"


@pytest.mark.parametrize("seconds", [0.0, 1.0, 1e12])
def test_a_run_is_complete_when_its_time_is_up(loop, spec, seconds):
    loop._command, stop = dataclasses.replace(loop._command, ends_at=seconds), Stop()
    updater = updaters.Updater(ScheduledLearner(), DeviceStream(CPU))
    assert loop.update(updater, GrowingReplica(stop, 10), mock.MagicMock(), spec, stop) == (seconds == 1.0)
    assert updater.num_updates == (0 if seconds == 1.0 else 10)


def test_versions_that_acted_are_compared_with_the_one_that_is_updated(loop, spec):
    record, stop = mock.MagicMock(), Stop()
    updater, replica = updaters.Updater(ScheduledLearner(), DeviceStream(CPU)), GrowingReplica(stop, 10)
    loop.update(updater, replica, record, spec, stop)
    loop.report(updater, replica, record, {}, [], 0.0)
    lags = [call.args[0].get(f"learner/version_lag/{TABLE}/max", 0.0) for call in record.report.call_args_list]
    assert max(lags) == 9.0, "the tenth update is one of version 9, and 0 acted"


def test_the_record_knows_the_frames_at_published_parameters(loop, spec):
    """Also between two reports, which count them."""
    spec, record, stop = msgspec.structs.replace(spec, frames_per_step=4), mock.MagicMock(), Stop()
    learning = LearningConfig(device="cpu", publish_period_seconds=0.0, publish_period_updates=4)
    loop._command = dataclasses.replace(loop._command, learning=learning)
    updater = updaters.Updater(ScheduledLearner(), DeviceStream(CPU))
    loop.update(updater, GrowingReplica(stop, 10), record, spec, stop)
    assert [call.args for call in record.published.call_args_list] == [(4, 400), (8, 800)]


@pytest.mark.parametrize(("least_seconds", "versions"), [(0.0, [25, 50]), (1000.0, [])])
def test_updates_stay_in_flight_and_all_arrive_in_order(make_loop, servers, monkeypatch, spec, least_seconds, versions):
    stop, device_stream = Stop(), SlowDeviceStream(num_questions=50)
    monkeypatch.setattr(learning_loop, "DeviceStream", lambda device: device_stream)
    loop, replica = make_loop(publish_period_seconds=least_seconds), Replica(stop, 60)
    updater = Updater(spec, device_stream, replica)
    loop.update(updater, replica, mock.MagicMock(), spec, stop)
    assert updater.num_updates == 54
    assert replica.sent == [(5, number, float(number)) for number in range(1, 55)]
    assert updater.most_in_flight == 5  # the fifth is on its way while the first is waited for
    assert [decode_parameters(encode()).header.params_version for encode in published(servers)] == versions
    metrics = loop.results.metrics()
    assert (metrics["learner/loss"], metrics["learner/gradient_norm"]) == (0.5, 1.0)


def test_a_version_holds_the_network_of_its_own_update(make_loop, servers, spec):
    stop = Stop()
    replica = Replica(stop, 60)
    updater = Updater(spec, DeviceStream(CPU), replica)
    make_loop(publish_period_seconds=0.0).update(updater, replica, mock.MagicMock(), spec, stop)
    versions = [decode_parameters(encode()) for encode in published(servers)]  # the network has changed since
    assert [(v.header.params_version, v.tensors["a"].item()) for v in versions] == [(25, 25.0), (50, 50.0)]


def test_transitions_without_finite_errors_are_not_sampled_again(loop, spec):
    stop = Stop()
    replica = Replica(stop, 60)
    updater = Updater(spec, DeviceStream(CPU), replica, unusable=lambda number: number % 3 == 0)
    loop.update(updater, replica, mock.MagicMock(), spec, stop)
    assert replica.sent == [(5, number, float(number) if number % 3 else 0.0) for number in range(1, 55)]
    assert loop.results.metrics()["learner/unusable_transitions_total"] == 18


@pytest.mark.parametrize("weights", [0.0, np.nan])
def test_a_network_that_has_diverged_ends_the_learner(loop, spec, weights):
    """It holds NaN, or gives nothing finite however often it is asked."""
    stop = Stop()
    replica = Replica(stop, 600)
    updater = Updater(spec, DeviceStream(CPU), replica, unusable=lambda number: True)
    updater.weights += weights
    with pytest.raises(ApexError, match="lower --learning-rate"):
        loop.update(updater, replica, mock.MagicMock(), spec, stop)
    assert len(replica.sent) == (0 if np.isnan(weights) else MOST_UNUSABLE_UPDATES)


def test_updates_that_change_nothing_although_all_errors_are_finite_end_the_learner(loop, spec):
    stop = Stop()
    replica = Replica(stop, 600)
    updater = Updater(spec, DeviceStream(CPU), replica)
    updater.gradient_norm = np.inf
    with pytest.raises(ApexError, match="lower --learning-rate"):
        loop.update(updater, replica, mock.MagicMock(), spec, stop)
    assert loop.results.metrics()["learner/skipped_updates_total"] == MOST_UNUSABLE_UPDATES + 1


@pytest.mark.parametrize("weights", [1e5, np.inf])
def test_parameters_that_nobody_could_act_with_end_the_publisher(make_loop, servers, spec, weights):
    stop = Stop()
    replica = Replica(stop, 60)
    updater = Updater(spec, DeviceStream(CPU), replica)
    updater.weights += weights
    make_loop(publish_period_seconds=0.0).update(updater, replica, mock.MagicMock(), spec, stop)
    with pytest.raises(ApexError, match=r"diverged by update 25 .*lower --learning-rate"):
        published(servers)[0]()


class Record:
    """Counts the reports; the evaluations name the updates whose network was evaluated."""

    def __init__(self):
        self.evaluated_updates, self.counters, self.waits, self.games = -1, Counters(updates=7), [], []

    def evaluated(self, evaluation):
        self.evaluated_updates = evaluation.params_version
        self.games.append(evaluation.returns)

    def published(self, params_version):
        pass

    def report(self, living, games, waits_for):
        self.waits.append((waits_for, self.evaluated_updates))


@pytest.fixture
def end_with(make_loop, servers, spec):
    """Ends a run of no update, while evaluations come one after the other."""

    def end(evaluations, seconds=1e6, stop=None):
        coming, record, stop = iter(evaluations), Record(), stop or Stop()
        servers["MetricsServer"].evaluations = lambda: [found for found in [next(coming, None)] if found]
        replica = Replica(stop, 0)
        updater = Updater(spec, DeviceStream(CPU), replica)
        updater.num_updates = 7
        make_loop(final_evaluation_seconds=seconds).evaluate_last(updater, replica, record, stop)
        (header,) = (decode_parameters(encode()).header for encode in published(servers))
        assert (header.params_version, header.is_last) == (7, True)
        end.games = record.games
        return record.waits

    return end


def evaluation_of(version, *returns, parameters=b"those"):
    return Evaluation(version, 0.0, returns or (1.0,), (1,) * max(len(returns), 1), 1.0, parameters=parameters)


@pytest.mark.parametrize(("has_finished", "is_stopped", "said"), [
    (True, False, [LAST_EVALUATION, "evaluated"]), (True, True, [""]), (False, False, [""]),
])  # fmt: skip
def test_the_first_status_at_the_end_says_that_an_evaluation_is_awaited(
    make_loop, spec, monkeypatch, has_finished, is_stopped, said
):
    """The launcher ends a run whose time is over and whose learner, perhaps started again, waits for nothing."""
    loop, stop, words = make_loop(final_evaluation_seconds=5.0), Stop(), list[str]()
    monkeypatch.setattr(loop, "_speak", lambda *told: words.append(loop._waits_for))
    monkeypatch.setattr(loop, "evaluate_last", lambda *told: words.append("evaluated"))
    if is_stopped:
        stop.set()
    updater, record = Updater(spec, DeviceStream(CPU), Replica(stop, 0)), mock.MagicMock()
    updater.num_updates = 7
    loop.end(updater, updater.replica, record, stop, has_finished)
    assert words == said and record.last_checkpoint.called


def test_a_run_ends_when_its_last_network_is_evaluated(end_with, monkeypatch):
    monkeypatch.setattr(learning_loop, "BATCH_WAIT_SECONDS", 0.0)
    waits = end_with([None, evaluation_of(5), None, evaluation_of(7)])
    assert waits == [(LAST_EVALUATION, 5), ("", 7)]


def test_a_run_does_not_wait_for_ever_for_its_last_evaluation(end_with):
    assert end_with([], seconds=0.001)[-1] == ("", -1)


@pytest.mark.parametrize("others", [True, False])
def test_the_first_games_of_the_last_network_count_where_the_others_come_too_late(end_with, monkeypatch, others):
    monkeypatch.setattr(learning_loop, "BATCH_WAIT_SECONDS", 0.0)
    coming = [evaluation_of(5, 2.0, parameters=b""), evaluation_of(7, 3.0, parameters=b"")]
    waits = end_with([*coming, *[evaluation_of(7, 3.0, 4.0)] * others], seconds=1e6 if others else 0.2)
    assert end_with.games == [(2.0,), (3.0, 4.0) if others else (3.0,)] and waits[-1] == ("", 7)


def test_a_signal_ends_the_wait_for_the_last_evaluation(end_with):
    stop = Stop()
    stop.set()
    assert end_with([], stop=stop) == [("", -1)]
