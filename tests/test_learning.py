from unittest import mock

import numpy as np
import pytest
import torch

from apexrl.config import LearnerCommand, LearningConfig, NetworkConfig
from apexrl.errors import ApexError
from apexrl.learning import LearnerLoop
from apexrl.lifecycle import Stop
from apexrl.parameters import Parameters, ParametersHeader, decode_parameters
from apexrl.types import LogPosition
from apexrl.update_graph import Pending
from tests.test_lane import SlowLane


class Replica:
    """Gives batches, and ends the learner after some."""

    def __init__(self, stop, num_batches):
        self.stop, self.left, self.sent, self.waits_for, self.counted = stop, num_batches, [], "", LogPosition()
        self.params_versions: list[int] = []
        self.num_undecodable = 0

    def take_episodes(self):
        return []

    def next_batch(self, timeout_seconds):
        self.left -= 1
        if self.left < 0:
            self.stop.set()
            return None
        return 5, self.left

    def upcoming_batch(self):
        return self.left - 1

    def update_priorities(self, life, keys, priorities):
        self.sent.append((life, int(keys[0]), float(priorities[0])))


class Agent:
    """Answers through a slow device; some batches have nothing left."""

    def __init__(self, spec, lane, replica, finite=True):
        self.num_updates, self.spec, self.lane, self.replica, self.finite = 0, spec, lane, replica, finite
        self.most_in_flight = 0

    def update(self, batch, upcoming):
        assert upcoming == batch - 1
        if batch % 10 == 3:
            return None
        self.num_updates += 1
        self.most_in_flight = max(self.most_in_flight, self.num_updates - len(self.replica.sent))
        values = torch.tensor([self.num_updates if self.finite else np.inf, 0.5])
        return Pending(np.array([self.num_updates]), values, ("loss",), self.lane.mark())

    def fetch_parameters(self):
        header = ParametersHeader(self.num_updates, self.spec, NetworkConfig())
        return Parameters(header, {"a": torch.ones(1)}), self.lane.mark()


@pytest.fixture
def loop(monkeypatch):
    for name in ("ParameterPublisher", "MetricsServer", "LogClient"):
        monkeypatch.setattr(f"apexrl.learning.{name}", mock.MagicMock())
    return LearnerLoop(LearnerCommand(learning=LearningConfig(device="cpu")), "learner")


@pytest.mark.parametrize(("least_seconds", "versions"), [(0.0, [25, 50]), (1000.0, [])])
def test_updates_stay_in_flight_and_all_arrive_in_order(loop, spec, monkeypatch, least_seconds, versions):
    monkeypatch.setattr("apexrl.learning.LEAST_PUBLISH_SECONDS", least_seconds)
    stop, published = Stop(), []
    loop._publisher.publish = published.append
    loop._lane = SlowLane(num_questions=50)
    replica = Replica(stop, 60)
    agent = Agent(spec, loop._lane, replica)
    loop._update(agent, replica, mock.MagicMock(), spec, stop)
    assert agent.num_updates == 54
    assert replica.sent == [(5, number, float(number)) for number in range(1, 55)]
    assert agent.most_in_flight == 5  # the fifth is on its way while the first is waited for
    assert [decode_parameters(encoded).header.params_version for encoded in published] == versions
    assert loop._figures == {"loss": 0.5}


def test_errors_that_are_not_finite_end_the_learner(loop, spec):
    stop = Stop()
    replica = Replica(stop, 60)
    with pytest.raises(ApexError, match="update 1 gave errors that are not finite"):
        loop._update(Agent(spec, loop._lane, replica, finite=False), replica, mock.MagicMock(), spec, stop)
    assert replica.sent == []
