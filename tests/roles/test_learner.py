"""The end of one of several learners: whether its host has to start it again."""

import contextlib
import os
import sys
from types import SimpleNamespace

import pytest

from apexrl.errors import PeerError
from apexrl.learning import loop
from apexrl.learning.updates import team
from apexrl.lifecycle import Stop
from apexrl.networks import device
from apexrl.roles import learner


class Loop:
    """Learns no longer than it is told to."""

    is_complete = False

    def __init__(self, *_):
        """Takes what a learner's loop takes."""

    def run(self, stop: Stop) -> bool:
        """Ends as every loop does."""
        stop.set()
        return self.is_complete


@pytest.mark.parametrize(
    ("spans_hosts", "is_complete", "num_signals", "begins_again"),
    [(True, False, 0, True), (True, False, 1, False), (True, True, 0, False), (False, False, 0, False)],
)
def test_a_learner_begins_again_when_one_of_another_host_was_stopped(
    monkeypatch, spans_hosts, is_complete, num_signals, begins_again
):
    """Not when it was stopped itself, or all have done what they were asked for."""
    rank = SimpleNamespace(rank=1, is_first=False, spans_hosts=spans_hosts)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("OMP_WAIT_POLICY", os.environ.get("OMP_WAIT_POLICY", "passive"))
    monkeypatch.setattr(sys, "argv", ["learner.py", "--preset", "small", "--learner-hosts", "2"])
    monkeypatch.setattr(team, "join_team", lambda command: (command, rank))
    monkeypatch.setattr(loop, "LearnerLoop", Loop)
    monkeypatch.setattr(Loop, "is_complete", is_complete)
    monkeypatch.setattr(learner, "OWN_SIGNAL_SECONDS", 0.0)
    monkeypatch.setattr(device, "prepare_for_updates", lambda _: None)  # it would change this process
    stop = Stop()
    stop.num_signals = num_signals
    expected = (
        pytest.raises(PeerError, match="of another host was stopped") if begins_again else contextlib.nullcontext()
    )
    with expected:
        learner.main(stop)
