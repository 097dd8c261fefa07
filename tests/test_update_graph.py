import contextlib
import dataclasses
import itertools
import threading
import time

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from apexrl.agents.apex_dqn import FIGURES, ApexLearner
from apexrl.config import NetworkConfig, UpdateConfig
from apexrl.learning.unroll_store import FrameStore, KeyBatch
from apexrl.learning.updater import BatchInputs, KeyInputs, UpdateGraph
from apexrl.networks.device_stream import Lane
from apexrl.types import StreamSpec
from tests.lockstep import AGENT, NETWORK

VECTORS = StreamSpec("Vectors-v0", (5,), "float32", 2, 3, 1, unroll_starts=8, n_steps=3)
SCREENS = StreamSpec("Screens-v0", (36, 36), "uint8", 3, 4, 1, unroll_starts=8, n_steps=3)
RING, SIZE = 6, 12
CPU = torch.device("cpu")
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = [CPU, pytest.param(torch.device("cuda"), marks=NEEDS_GPU)]

pytestmark = pytest.mark.filterwarnings("ignore:.*capturable=True")  # the plain computation, on a GPU


class World:
    """A learner and a frame store of one lane, always from the same seed."""

    def __init__(self, make_unroll, spec, device, optimizer="adam", store_device=None):
        torch.manual_seed(7)
        self.make_unroll, self.spec, self.device = make_unroll, spec, device
        self.lane = Lane(device)
        self.update = UpdateConfig(SIZE, optimizer, 1e-3, 1e-5, 40.0, 7)
        self.learner = ApexLearner(AGENT, self.update, NETWORK, spec, device, self.lane)
        self.store = FrameStore(spec, RING, AGENT.gamma, store_device or device, 8, self.lane)
        self.rng = np.random.default_rng(3)
        for number in range(RING):
            self.apply(number)

    def apply(self, number):
        self.store.apply(number, self.make_unroll(self.spec, number))

    def sample(self):
        keys = self.rng.integers(0, RING * self.spec.unroll_starts, SIZE)
        return keys, self.rng.uniform(0.1, 1, SIZE).astype(np.float32)

    def keys(self, keys, weights):
        return KeyBatch(self.store, self.store.generation, keys, weights)

    def plainly(self, keys, weights):
        """The same update without graph, padding and fixed memory."""
        held = self.store.holds(keys)
        with self.lane.turn():
            batch = self.store.gather(keys[held], weights[held])
            values = self.learner._step(batch._replace(**self.on_device(batch))).cpu().numpy()
            self.learner.num_updates += 1
            if self.learner.num_updates % self.update.target_period_updates == 0:
                self.learner._target.load_state_dict(self.learner._online.state_dict())
        return values[: held.sum()], dict(zip(FIGURES, values[held.sum() :].tolist(), strict=True))

    def on_device(self, batch):
        return {name: getattr(batch, name).to(self.device) for name in batch._fields if name != "keys"}


def compare(graph, plain, updates, exactly):
    """Compares what was pending and what is left with the plain updates; on a GPU sums have no fixed order."""
    error = 0.0 if exactly else 1e-4 if graph.device == CPU else 0.02
    tolerance = {"rel": error, "abs": error / 10}
    for pending, (priorities, figures) in updates:
        found, found_figures = pending.result()
        assert found == pytest.approx(priorities, **tolerance)
        assert found_figures == pytest.approx(figures, **tolerance)
    first, second = graph.learner.state_dict(), plain.learner.state_dict()
    for name in first:
        if exactly:
            assert torch.equal(first[name], second[name]), name
        else:
            assert torch.allclose(first[name], second[name], rtol=error, atol=error / 10), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
@pytest.mark.parametrize("spec", [VECTORS, SCREENS], ids=["vectors", "screens"])
def test_a_graph_gives_the_numbers_of_the_plain_update(make_unroll, device, optimizer, spec):
    graph, plain = (World(make_unroll, spec, device, optimizer) for _ in range(2))
    updates = [(graph.learner.update(graph.keys(*graph.sample())), plain.plainly(*plain.sample())) for _ in range(20)]
    assert graph.learner.num_updates == 20
    compare(graph, plain, updates, exactly=device == CPU)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_lost", [0, 9])
def test_batches_from_host_memory_give_the_same_numbers(make_unroll, device, num_lost):
    graph, plain = (World(make_unroll, SCREENS, device, store_device=CPU) for _ in range(2))
    updates = []
    for i in range(5):
        lost = num_lost if i % 2 else 0  # what an earlier, larger batch left behind must not count
        keys, weights = (values[lost:] for values in graph.sample())
        # Called from within: on a CPU the learner takes such batches without a graph.
        updates.append((graph.learner._update_by_graph(graph.store.gather(keys, weights)), None))
        updates[-1] = (updates[-1][0], plain.plainly(*(values[lost:] for values in plain.sample())))
    compare(graph, plain, updates, exactly=device == CPU and not num_lost)


@pytest.mark.parametrize("device", DEVICES)
def test_transitions_that_were_overwritten_do_not_count(make_unroll, device):
    graph, plain = (World(make_unroll, SCREENS, device) for _ in range(2))
    updates = []
    for number in range(RING, RING + 5):
        keys, weights = graph.sample()
        keys[1] = (number - RING) * SCREENS.unroll_starts + 2
        batch = graph.keys(keys, weights)
        graph.apply(number)
        plain.apply(number)
        updates.append((graph.learner.update(batch), plain.plainly(keys, weights)))
        held = graph.store.holds(keys)
        assert not held.all() and np.array_equal(updates[-1][0].keys, keys[held])
    compare(graph, plain, updates, exactly=False)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_that_only_fill_a_batch_read_nothing_that_is_not_held(make_unroll, device):
    world = World(make_unroll, VECTORS, device)
    world.store._numbers[0] = -1
    with world.lane.turn():
        world.store._frames[world.store._frames_of(0)].view(torch.float32).fill_(torch.nan)
    keys, weights = world.sample()
    keys[:7] = 3
    keys[7:] = 9
    priorities, figures = world.learner.update(world.keys(keys, weights)).result()
    assert len(priorities) == 5 and np.isfinite(priorities).all() and np.isfinite(list(figures.values())).all()


@pytest.mark.parametrize("device", DEVICES)
def test_a_batch_of_which_nothing_is_left_is_no_update(make_unroll, device):
    world = World(make_unroll, VECTORS, device)
    before = {name: tensor.clone() for name, tensor in world.learner.state_dict().items()}
    keys, weights = world.sample()
    batch = world.keys(keys, weights)
    assert world.learner.update(world.keys(keys + 10**6, weights)) is None
    world.store.clear()
    world.apply(0)  # the same number, of another log
    assert world.learner.update(batch) is None
    world.store.release()
    assert world.learner.update(batch) is None
    assert world.learner.num_updates == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in world.learner.state_dict().items())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_making_a_graph_changes_nothing_and_moves_nothing(make_unroll, device, optimizer):
    world = World(make_unroll, SCREENS, device, optimizer)
    world.plainly(*world.sample())  # the optimizer's averages are no zeros
    tensors = world.learner._tensors()
    before = {name: (tensor.data_ptr(), tensor.cpu().clone()) for name, tensor in tensors.items()}
    state = [tensor for name, tensor in tensors.items() if not name.startswith("target.")]
    inputs = KeyInputs(world.lane, world.store, SIZE)
    UpdateGraph(world.lane, inputs, world.learner._step, FIGURES, state)
    for name, tensor in world.learner._tensors().items():
        assert tensor.data_ptr() == before[name][0], name
        assert torch.equal(tensor.cpu(), before[name][1]), name


@pytest.mark.parametrize("device", DEVICES)
def test_a_graph_goes_on_with_what_is_loaded(make_unroll, device):
    saved, loaded = (World(make_unroll, SCREENS, device) for _ in range(2))
    for _ in range(3):
        saved.learner.update(saved.keys(*saved.sample()))
        loaded.learner.update(loaded.keys(*loaded.sample()))
    for _ in range(9):
        saved.learner.update(saved.keys(*saved.sample()))
    state = {name: tensor.clone() for name, tensor in saved.learner.state_dict().items()}
    loaded.learner.load_state_dict(state, saved.learner.num_updates)
    loaded.rng = np.random.default_rng(4)
    saved.rng = np.random.default_rng(4)
    updates = []
    for _ in range(5):
        pending = loaded.learner.update(loaded.keys(*loaded.sample()))
        updates.append((pending, saved.learner.update(saved.keys(*saved.sample())).result()))
    compare(loaded, saved, updates, exactly=device == CPU)


@pytest.mark.parametrize("device", DEVICES)
def test_another_frame_store_gets_another_graph(make_unroll, device):
    world, plain = (World(make_unroll, VECTORS, device) for _ in range(2))
    updates = []
    for _ in range(2):
        updates.append((world.learner.update(world.keys(*world.sample())), plain.plainly(*plain.sample())))
        world.store.release()
        world.store = FrameStore(VECTORS, RING, AGENT.gamma, device, 8, world.lane)
        for number in range(RING):
            world.apply(number)
    compare(world, plain, updates, exactly=device == CPU)


class OnDevice(TorchDispatchMode):
    """Fails when an operation takes or makes something in host memory; one that asks for a value fails by itself."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        for value in tree_leaves((args, kwargs, out)):
            assert not isinstance(value, torch.Tensor) or value.device.type == "meta", operation
        return out


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
@pytest.mark.parametrize("rescaling", [False, True])
def test_an_update_waits_for_nothing_and_needs_nothing_of_the_host(monkeypatch, optimizer, rescaling):
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _: False)
    meta, spec = torch.device("meta"), StreamSpec("Atari-v0", (84, 84), "uint8", 4, 6, 4)
    agent = dataclasses.replace(AGENT, value_rescaling=rescaling)
    learner = ApexLearner(agent, UpdateConfig(512, optimizer), NetworkConfig(), spec, meta)
    store = FrameStore(spec, 10, AGENT.gamma, meta, 4)
    for inputs in (KeyInputs(Lane(meta), store, 512), BatchInputs(Lane(meta), spec, 512)):
        with OnDevice():
            values = learner._step(inputs.batch())
        assert values.shape == (512 + len(FIGURES),)


class SlowKeyInputs(KeyInputs):
    """Leaves another thread the time to come between the check of the keys and the gathering, on a CPU."""

    def batch(self):
        time.sleep(1e-3)
        return super().batch()


@pytest.mark.parametrize("device", DEVICES)
def test_what_an_update_reads_is_whole_while_unrolls_arrive(make_unroll, device):
    """Each unroll shows one number and takes it as its action; another thread replaces them all the time."""
    lane = Lane(device)
    store = FrameStore(VECTORS, RING, AGENT.gamma, device, 4, lane)
    store._staging = store._make_staging()
    made, stop = make_unroll(VECTORS), threading.Event()

    def apply(number):
        frames, actions = (np.full_like(array, number % 5) for array in (made.frames, made.actions))
        store.apply(number, made._replace(frames=frames, actions=actions))

    def keep_applying():
        for number in itertools.count(RING):
            if stop.is_set():
                return
            apply(number)

    def shown(batch):
        is_whole = (batch.observation.flatten(1) == batch.action[:, None]).all(dim=1)
        return torch.where(is_whole, batch.action, -torch.ones_like(batch.action))

    for number in range(RING):
        apply(number)
    graph = UpdateGraph(lane, SlowKeyInputs(lane, store, SIZE), shown, (), [])
    rng, num_read, num_lost = np.random.default_rng(0), 0, 0
    thread = threading.Thread(target=keep_applying)
    thread.start()
    try:
        while num_read < 2000 or not num_lost:
            keys = (store._numbers.max() - rng.integers(0, RING, SIZE)) * 8 + rng.integers(0, 8, SIZE)
            pending = graph.update(KeyBatch(store, store.generation, keys, np.ones(SIZE, np.float32)))
            num_lost += SIZE - (len(pending.keys) if pending else 0)
            if pending is not None:
                found, _ = pending.result()
                assert np.array_equal(found, pending.keys // 8 % 5)
                num_read += len(found)
    finally:
        stop.set()
        thread.join()
