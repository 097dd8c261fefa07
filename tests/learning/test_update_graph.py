"""Updates that a graph repeats, on a CPU: `tests.fake_graph` stands for CUDA. They equal those that Python makes."""

import pytest
import torch

from apexrl.learning.team import Team
from apexrl.learning.updater import Updater
from tests.agents.impala_parts import LASER, updates
from tests.devices import CPU
from tests.fake_graph import FakeDeviceStream, FakeGraph
from tests.learning import test_impala_updates as impala
from tests.learning.test_updater import RING, SCREENS, VECTORS, World
from tests.learning.twins import update_both
from tests.lockstep import hold


class Doubling(Team):
    """A team in which another learner always has the same gradients."""

    def __init__(self):
        super().__init__()
        self.size, self.calls = 2, 0

    def add_up(self, gradient, scale):
        self.calls += 1
        gradient.mul_(2)


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
@pytest.mark.parametrize("spec", [VECTORS, SCREENS], ids=["vectors", "screens"])
def test_a_replayed_update_is_the_one_that_python_makes(make_unroll, spec, optimizer):
    graph = World(make_unroll, spec, CPU, optimizer, device_stream=FakeDeviceStream())
    plain = World(make_unroll, spec, CPU, optimizer)
    for number in range(15):
        update_both(graph, plain, lambda: graph.by_keys(*graph.sample()), lambda: plain.plainly(*plain.sample()))
        for world in (graph, plain):  # other frames come to a place that the graph reads
            hold(world.store, number % RING, make_unroll(spec, 100 + number))
    assert graph.device_stream.num_captures == 1


def test_between_two_graphs_learners_add_their_gradients_up(make_unroll):
    """A mean does not change when all parts are doubled, the number that divides it included."""
    graph = World(make_unroll, VECTORS, CPU, device_stream=FakeDeviceStream())
    graph.updater = Updater(graph.updater._learner, graph.device_stream, Doubling())
    plain = World(make_unroll, VECTORS, CPU)
    for _ in range(5):
        update_both(graph, plain, lambda: graph.by_keys(*graph.sample()), lambda: plain.plainly(*plain.sample()))
    assert graph.device_stream.num_captures == 2 and graph.updater._team.calls == 5


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
@pytest.mark.parametrize("lstm", [False, True], ids=["feed-forward", "lstm"])
def test_a_replayed_update_of_impala_follows_its_schedule(lstm, optimizer):
    update = updates(mix=LASER, batch_size=impala.SIZE, optimizer=optimizer, policy_cloning_cost=0.1)
    graph, plain = impala.World(update, lstm, device_stream=FakeDeviceStream()), impala.World(update, lstm)
    for number in range(5):
        for world in (graph, plain):
            world.updater.schedule(1000 * number, number / 5)
        update_both(graph, plain, lambda: graph.by_names(graph.keys()), lambda: plain.plainly(plain.keys()))
    assert graph.device_stream.num_captures == 1


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x * float(x.sum()),
        lambda x: x[x > 0],
        lambda x: x + torch.ones(3).pin_memory() if torch.cuda.is_available() else x.nonzero(),
        lambda x: torch.cuda.Stream() and x,
        lambda x: torch.cuda.synchronize() or x,
    ],
)
def test_work_that_waits_or_leaves_the_stream_cannot_be_captured(work):
    with pytest.raises(AssertionError, match="in a capture"), FakeGraph():
        work(torch.arange(3.0))
