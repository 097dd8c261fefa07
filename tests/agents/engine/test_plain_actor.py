"""Mistakes of an author in the actor's half of a plain algorithm."""

import numpy as np
import pytest

from apexrl.agents.contract import Observation
from apexrl.agents.engine.plain import Acting
from apexrl.agents.engine.plain_actor import actor_of
from apexrl.agents.recurrence import lstm_size_of, recurrent_fields
from apexrl.errors import ApexError, ConfigError
from apexrl.networks.config import DuelingConfig
from apexrl.networks.dueling import make_network
from apexrl.types import EnvironmentSpec
from tests.devices import CPU
from tests.learning.updates.test_updater import VECTORS
from tests.lockstep import ALGORITHM, make_updater, parameters_of


@pytest.mark.parametrize(
    ("found", "complaint"),
    [
        (np.zeros(2, int), "`act` gives a ndarray: give a tuple of actions, and extras by name"),
        ((np.zeros(2, int),), "`act` gives a tuple"),
        ((np.zeros(2, int), None), "`act` gives a tuple"),
    ],
)
def test_what_is_no_pair_of_actions_and_extras_is_named(found, complaint):
    kind = type("Mistaken", (Acting,), {"act": lambda *_: found})
    actor = actor_of(kind, DuelingConfig, make_network)(ALGORITHM, parameters_of(make_updater(VECTORS), VECTORS), CPU)
    seen = Observation(np.zeros((2, 5), np.float32), np.ones(2, bool), np.zeros(2, np.float32))
    with pytest.raises(ApexError, match=complaint):
        actor.act(seen, np.zeros(2), actor.initial_state(2), np.random.default_rng(0))


def test_vectors_beside_the_fields_of_an_lstm_are_refused():
    spec = EnvironmentSpec("Arm-v0", (3,), "float32", 1, 0, 1, ((-1.0, 1.0), (-1.0, 1.0)))
    assert lstm_size_of(spec.streamed(4, 0)) == 0
    with pytest.raises(ConfigError, match=r"'Arm-v0' has actions of 2 numbers, and .* recurrent_fields"):
        lstm_size_of(spec.streamed(4, 0, recurrent_fields(8)))
