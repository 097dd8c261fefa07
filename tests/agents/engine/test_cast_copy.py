"""Updates that compute with a copy in autocast's type beside those whose layers autocast casts, on a CPU."""

import pytest
import torch

from apexrl.agents.engine import plain_learner
from apexrl.agents.engine.cast_copy import CastCopies
from apexrl.agents.engine.plain_learner import PlainLearner
from apexrl.networks import device
from apexrl.networks.config import DuelingConfig
from apexrl.networks.dueling import DuelingNetwork, make_network
from apexrl.networks.torsos import make_torso
from tests.agents.engine.test_minibatches import eagerly, metrics_of, world_of
from tests.agents.impala_parts import LASER, updates
from tests.devices import CPU
from tests.fake_graph import FakeDeviceStream
from tests.learning.twins import update_both
from tests.learning.updates import test_impala_updates as impala_updates
from tests.learning.updates.test_updater import SCREENS, World, whole
from tests.lockstep import TABLE
from tests.operations import Counted


@pytest.fixture
def copying(monkeypatch):
    """Computes in bfloat16 on any CPU; returns a function after which learners copy their layers."""
    monkeypatch.setattr(device, "fastest_dtype", lambda *_: torch.bfloat16)

    def begin():
        monkeypatch.setattr(plain_learner, "copied_dtype", lambda *_: torch.bfloat16)

    return begin


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_an_update_of_apex_is_the_same_to_the_bit(make_unroll, copying, optimizer):
    plain = World(make_unroll, SCREENS, CPU, optimizer)
    copying()
    graph = World(make_unroll, SCREENS, CPU, optimizer, device_stream=FakeDeviceStream())
    for _ in range(15):  # the target network follows twice
        update_both(graph, plain, lambda: graph.by_keys(*graph.sample()), lambda: plain.plainly(*plain.sample()))


@pytest.mark.parametrize("lstm", [False, True], ids=["feed-forward", "lstm"])
def test_an_update_of_impala_is_the_same_to_the_bit(copying, lstm):
    update = updates(mix=LASER, batch_size=impala_updates.SIZE, optimizer="adam", policy_cloning_cost=0.1)
    plain = impala_updates.World(update, lstm)
    copying()
    graph = impala_updates.World(update, lstm, device_stream=FakeDeviceStream())
    for _ in range(5):
        update_both(graph, plain, lambda: graph.by_names(graph.keys()), lambda: plain.plainly(plain.keys()))


def test_an_update_of_several_steps_is_the_same_to_the_bit(make_unroll, copying):
    """The parameters after the last step of the update before decide what is known before the first one."""
    plain = world_of(make_unroll, spec=SCREENS)
    copying()
    graph = world_of(make_unroll, spec=SCREENS, device_stream=FakeDeviceStream())
    for _ in range(3):
        draw = graph.keys(*graph.sample())
        update_both(graph, plain, lambda draw=draw: metrics_of(graph.updater.update(draw)), lambda: eagerly(plain))


def test_a_copy_saves_most_casts(make_unroll, copying, monkeypatch):
    monkeypatch.setattr(PlainLearner, "has_side_work", False)  # operations of a second thread are not counted
    counts = []
    for begin in (lambda: None, copying):
        begin()
        world = World(make_unroll, SCREENS, CPU)
        batch = world.store.gather(TABLE, *world.sample()).batch
        with Counted() as counted:
            whole(world.updater, {TABLE: batch})
        counts.append(counted)
    assert counts[1].total <= counts[0].total - 18


def test_a_copy_shares_what_it_computes_in_float32():
    network = make_network(SCREENS, DuelingConfig((4, 4, 4), 16))
    copied, same = CastCopies({"q": network}, torch.bfloat16), CastCopies({"q": network}, None)
    assert same.networks["q"] is network is not copied.networks["q"]
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(1)
    copied.cast()
    pairs = list(zip(copied.parameters["q"], network.parameters(), strict=True))
    shared = [own.data_ptr() == exact.data_ptr() for own, exact in pairs]
    assert shared == [own.dtype == torch.float32 for own, _ in pairs] and 0 < sum(shared) < len(shared)
    assert all(torch.equal(own, exact.to(own.dtype)) for own, exact in pairs)


class Counting(DuelingNetwork):
    """Has numbers of its own in its buffers, which each pass changes: of a layer, and beside all layers."""

    def __init__(self):
        super().__init__(make_torso(SCREENS, (4, 4, 4), 16), 16, SCREENS.num_actions)
        self.norm = torch.nn.BatchNorm1d(self.torso.num_features)
        self.register_buffer("passes", torch.zeros(()), persistent=False)

    def heads(self, features):
        self.passes += 1
        return super().heads(self.norm(features))


def test_buffers_are_those_of_the_network_itself():
    """They follow a checkpoint, another learner and the network that a target copies; what a pass writes stays."""
    network = Counting()
    copied = CastCopies({"q": network}, torch.bfloat16).networks["q"]
    before = network.norm.running_mean.clone()
    with torch.autocast("cpu", torch.bfloat16):
        copied.heads(torch.rand(3, network.torso.num_features))
    assert network.passes == 1 and not torch.equal(network.norm.running_mean, before)
    network.load_state_dict({name: torch.full_like(tensor, 3) for name, tensor in network.state_dict().items()})
    assert copied.norm.running_var.eq(3).all() and copied.norm.num_batches_tracked == 3
