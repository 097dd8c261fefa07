"""IMPALA's updates as the updater runs them: eagerly, by a graph, with rows lost, after a checkpoint."""

import contextlib
import dataclasses

import numpy as np
import pytest
import torch

from apexrl.agents import impala
from apexrl.agents.contract import Want
from apexrl.agents.impala_config import ImpalaAlgorithm, stream, wants
from apexrl.agents.replaying.mix import batch_sizes, parts_of
from apexrl.learning.experience.draw import Draw, SampledKeys
from apexrl.learning.experience.unroll_store import UnrollStore
from apexrl.learning.updates.update_graph import BatchInputs, KeyInputs
from apexrl.learning.updates.updater import Updater
from apexrl.losses.relevance import PROJECTED
from apexrl.networks.checkpoint import load_checkpoint, save_checkpoint
from apexrl.networks.config import ActorCriticConfig, to_text
from apexrl.networks.device_stream import DeviceStream
from apexrl.networks.headers import CheckpointHeader, Counters, Identity
from apexrl.types import EnvironmentSpec
from tests.agents.impala_parts import CPU, LASER, NETWORK, make_learner, spec_of, updates
from tests.devices import DEVICES
from tests.fields import random_unroll
from tests.learning.twins import state_of, update_both
from tests.learning.updates.test_updater import OnDevice, whole
from tests.lockstep import hold

pytestmark = pytest.mark.filterwarnings("ignore:.*capturable=True")  # the plain computation, on a GPU

RING, SIZE = 10, 8
ONLY_NEW = ("queue=1",)
MIXES = pytest.mark.parametrize("mix", [ONLY_NEW, LASER], ids=["impala", "laser"])


class World:
    """An updater and an unroll store of one device stream, always from the same seed."""

    def __init__(self, update, lstm=False, device=CPU, store_device=None, without_resets=False, device_stream=None):
        self.update, self.device = update, device
        self.spec, self.sizes = spec_of(lstm), batch_sizes(parts_of(update.mix), update.batch_size)
        self.device_stream = device_stream or DeviceStream(device)
        with self.device_stream.exclusive():
            self.learner = make_learner(update, lstm, device=device)
        self.updater = Updater(self.learner, self.device_stream)
        own = wants(ImpalaAlgorithm(), update)
        self.store = UnrollStore(self.spec, RING, own, store_device or device, 8, self.device_stream)
        self.rng = np.random.default_rng(3)
        for number in range(RING):
            unroll = random_unroll(self.spec, number)
            if without_resets:
                unroll = unroll._replace(starts=np.zeros_like(unroll.starts))
            hold(self.store, number, unroll)

    def keys(self, lost=()):
        """Returns the keys of a draw by table; as many of a table as `lost` says are not held any more."""
        keys = {table: self.rng.integers(0, RING, size) for table, size in self.sizes.items()}
        for table, count in zip(keys, lost, strict=False):
            keys[table][:count] += RING
        return keys

    def named(self, keys):
        """Returns a draw that the update gathers, as where the store lies on a GPU."""
        weights = {table: np.ones(len(own), np.float32) for table, own in keys.items()}
        return Draw(0, {t: SampledKeys(self.store, t, 0, own, weights[t]) for t, own in keys.items()})

    def gathered(self, keys):
        """Returns a draw of batches, as where it lies in host memory."""
        return Draw(0, {t: self.store.sample(t, own, np.ones(len(own), np.float32)) for t, own in keys.items()})

    def plainly(self, keys):
        """The same update without graph, padding and fixed memory; the rows left stand for those that are lost."""
        with self.device_stream.exclusive():
            batches = {}
            for table, own in keys.items():
                held = torch.from_numpy(own[self.store.holds(table, own)]).to(self.store.device)
                weight = torch.full((len(held),), len(own) / len(held), device=self.store.device)
                batches[table] = moved(self.store.batch(table, held, weight), self.device)
            metrics = self.learner.gradients(batches, lambda: None).metrics | self.learner.apply()
            # Read here: the default stream, to which we come back, does not wait for this one.
            return (), {name: float(value) for name, value in metrics.items()}

    def by_names(self, keys):
        """An update as the learner makes it where the store lies on its device."""
        return (), self.updater.update(self.named(keys)).result()[1]


def moved(batch, device):
    *steps, extras, weight = batch
    extras = {name: tensor.to(device) for name, tensor in extras.items()}
    return type(batch)(*(tensor.to(device) for tensor in steps), extras, weight.to(device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
@pytest.mark.parametrize("lstm", [False, True], ids=["feed-forward", "lstm"])
@MIXES
def test_a_graph_gives_the_numbers_of_the_plain_update(mix, lstm, optimizer, device):
    cloning = 0.1 if mix == LASER else 0.0
    update = updates(mix=mix, batch_size=SIZE, optimizer=optimizer, policy_cloning_cost=cloning)
    graph, plain = (World(update, lstm, device) for _ in range(2))
    for _ in range(10):
        update_both(graph, plain, lambda: graph.by_names(graph.keys()), lambda: plain.plainly(plain.keys()))
    assert graph.updater.num_updates == 10


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("by", ["keys", "batches"])
@MIXES
def test_rows_that_were_lost_leave_the_others_their_share(mix, by, reduction, device):
    update = updates(mix=mix, batch_size=SIZE, reduction=reduction)
    graph, plain = (World(update, device=device, store_device=None if by == "keys" else CPU) for _ in range(2))
    for lost in ((1, 0), (0, 5), (1, 1)):
        keys = graph.keys(lost)
        draw = graph.named(keys) if by == "keys" else graph.gathered(keys)

        def loss_of(result):
            return (), {"loss": result[1]["loss"]}

        update_both(graph, plain, lambda: loss_of(graph.updater.update(draw).result()),
                    lambda: loss_of(plain.plainly(plain.keys(lost))), "closely")  # fmt: skip


def test_a_part_of_which_nothing_is_left_is_no_update():
    world = World(updates(mix=LASER, batch_size=SIZE))
    assert world.updater.update(world.named(world.keys(lost=(2, 0)))) is None and world.updater.num_updates == 0


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
@MIXES
def test_sum_and_rescaled_mean_make_the_same_updates(mix, optimizer):
    """Also from draws of which some rows were lost: the others stand for them."""
    epsilon, clip, rate = 1e-3, 90.0 if mix == LASER else 180.0, 1e-3
    for_sum = updates(mix=mix, batch_size=SIZE, optimizer=optimizer, learning_rate=rate, optimizer_epsilon=epsilon,
                      max_gradient_norm=clip, reduction="sum")  # fmt: skip
    by_sum = World(for_sum, without_resets=True)
    count = SIZE * by_sum.spec.unroll_steps
    power = 2 if optimizer == "rmsprop" else 1  # its epsilon is inside the root
    for_mean = dataclasses.replace(
        for_sum, reduction="mean", optimizer_epsilon=epsilon / count**power, max_gradient_norm=clip / count
    )
    by_mean, as_it_was = (
        World(update, without_resets=True) for update in (for_mean, dataclasses.replace(for_sum, reduction="mean"))
    )
    begun = {name: tensor.clone() for name, tensor in by_sum.learner.acting_tensors().items()}
    clipped = []
    for lost in [(0, 0), (1, 0), (0, 4), (1, 5), (1, 1)] * 3:
        for world in (by_sum, by_mean, as_it_was):
            norm = world.updater.update(world.gathered(world.keys(lost))).result()[1]["gradient_norm"]
            clipped += [norm > clip] * (world is by_sum)
    assert any(clipped) and not all(clipped)
    one, two, other = (world.learner.acting_tensors() for world in (by_sum, by_mean, as_it_was))
    moved = max((one[name] - begun[name]).abs().max().item() for name in one)
    assert max((one[name] - two[name]).abs().max().item() for name in one) < 1e-3 * moved
    assert max((one[name] - other[name]).abs().max().item() for name in one) > 0.1 * moved


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
@pytest.mark.parametrize("lstm", [False, True], ids=["feed-forward", "lstm"])
def test_save_restore_continue_equals_never_stopping(tmp_path, optimizer, lstm):
    update = updates(mix=LASER, batch_size=SIZE, optimizer=optimizer)
    never_stopped, stopped, restored = (World(update, lstm) for _ in range(3))
    for i in range(12):
        never_stopped.updater.update(never_stopped.gathered(never_stopped.keys()))
        keys = stopped.keys()
        stopped.updater.update(stopped.gathered(keys))
        if i == 5:
            path = tmp_path / "latest.safetensors"
            identity = Identity(stopped.spec, "impala", to_text(NETWORK))
            save_checkpoint(path, CheckpointHeader(*identity, Counters(updates=6)), stopped.updater.state_dict())
            restored.updater.update(restored.gathered(keys))  # a state of its own, to be replaced
            checkpoint = load_checkpoint(path)
            restored.updater.load_state_dict(checkpoint.tensors, checkpoint.header.counters.updates)
            restored.rng = stopped.rng
            stopped = restored
    assert restored.updater.num_updates == never_stopped.updater.num_updates == 12
    state, expected = state_of(restored), state_of(never_stopped)
    assert state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in state)


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_experience_without_a_finite_loss_changes_nothing(optimizer):
    world = World(updates(mix=LASER, batch_size=SIZE, optimizer=optimizer))
    world.updater.update(world.gathered(world.keys()))
    before = {name: tensor.clone() for name, tensor in world.updater.state_dict().items()}
    draw = world.gathered(world.keys())
    draw.samples["uniform"].batch.observation[2, 3] = torch.inf
    metrics = world.updater.update(draw).result()[1]
    assert not np.isfinite(metrics["gradient_norm"])
    assert all(torch.equal(before[name], tensor) for name, tensor in world.updater.state_dict().items())


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
@pytest.mark.parametrize("lstm", [False, True], ids=["feed-forward", "lstm"])
@pytest.mark.parametrize("torso", ["shallow", "deep"])
def test_an_update_waits_for_nothing_and_needs_nothing_of_the_host(monkeypatch, torso, lstm, optimizer):
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _: False)
    meta, environment = torch.device("meta"), EnvironmentSpec("Atari-v0", (84, 84), "uint8", 4, 6, 4)
    algorithm = ImpalaAlgorithm(lstm=lstm)
    spec = stream(algorithm, environment)
    replay_state = "burn-in:20" if torso == "deep" else "walk"
    replayed = "elite-1" if torso == "deep" else "uniform"
    update = updates(mix=("queue=1/4", f"{replayed}=3/4"), batch_size=32, optimizer=optimizer, policy_cloning_cost=0.1,
                     reduction="mean", reward_transform="soft-asymmetric", distance="l2",
                     replay_state=replay_state)  # fmt: skip
    learner = impala.make_learner(algorithm, ActorCriticConfig(torso), update, spec, meta)
    sizes = {"queue": 8, replayed: 24}
    own = [Want(want.table, sizes[want.table], want.view) for want in wants(algorithm, update)]
    store = UnrollStore(spec, 10, own, meta, 4)
    device_stream = DeviceStream(meta)
    by_keys = {table: KeyInputs(device_stream, store, table, size) for table, size in sizes.items()}
    by_batches = {table: BatchInputs(device_stream, inputs.batch()) for table, inputs in by_keys.items()}
    for inputs in (by_keys, by_batches):
        updater = Updater(learner, device_stream)
        with OnDevice():
            values = whole(updater, {table: entrance.batch() for table, entrance in inputs.items()})
        row = 1 + PROJECTED if torso == "deep" else 1  # the rejected share, and a feature
        num_metrics = sum(result.kind == "metrics" for result in updater._results)
        assert values.shape == (32 * row + num_metrics,)
