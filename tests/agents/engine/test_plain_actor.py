"""Mistakes of an author in the actor's half of a plain algorithm."""

import numpy as np
import pytest

from apexrl.agents.contract import Observation
from apexrl.agents.engine.plain import Acting
from apexrl.agents.engine.plain_actor import actor_of
from apexrl.errors import ApexError
from apexrl.networks.config import DuelingConfig
from apexrl.networks.dueling import make_network
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
