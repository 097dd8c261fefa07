import contextlib
import dataclasses
import itertools
import math
import threading
import time
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from apexrl.agents import apex_dqn
from apexrl.agents.apex_dqn_config import ApexUpdate
from apexrl.agents.contract import Outcome
from apexrl.agents.engine.plain_learner import PlainLearner
from apexrl.errors import ApexError
from apexrl.learning.experience.draw import Draw, Gathered, SampledKeys
from apexrl.learning.experience.unroll_store import UnrollStore
from apexrl.learning.updates.update_graph import BatchInputs, KeyInputs, UpdateGraph, Work
from apexrl.learning.updates.updater import Updater
from apexrl.networks.config import DuelingConfig
from apexrl.networks.device_stream import DeviceStream, wait
from apexrl.types import StreamSpec
from tests.devices import CPU, DEVICES
from tests.learning.twins import update_both
from tests.lockstep import ALGORITHM, TABLE, draw_of, hold, make_updater, results, want
from tests.operations import Counted

VECTORS = StreamSpec("Vectors-v0", (5,), "float32", 2, 3, 1, unroll_starts=8, overlap_steps=3)
SCREENS = StreamSpec("Screens-v0", (36, 36), "uint8", 3, 4, 1, unroll_starts=8, overlap_steps=3)
RING, SIZE = 6, 12
# Of an update of Ape-X, gathering included: a GPU starts each as a kernel, and most are too small to take longer.
MOST_OPERATIONS = {"adam": 115, "rmsprop": 132}

pytestmark = pytest.mark.filterwarnings("ignore:.*capturable=True")  # the plain computation, on a GPU


class World:
    """An updater and an unroll store of one device stream, always from the same seed."""

    def __init__(self, make_unroll, spec, device, optimizer="adam", store_device=None, device_stream=None):
        torch.manual_seed(7)
        self.make_unroll, self.spec, self.device = make_unroll, spec, device
        self.device_stream = device_stream or DeviceStream(device)
        self.updater = make_updater(
            spec,
            ApexUpdate(SIZE, optimizer, 1e-3, optimizer_epsilon=1e-5, max_gradient_norm=40.0, target_period_updates=7),
            self.device_stream,
        )
        self.store = UnrollStore(spec, RING, [want(SIZE)], store_device or device, 8, self.device_stream)
        self.rng = np.random.default_rng(3)
        for number in range(RING):
            self.apply(number)

    def apply(self, number):
        hold(self.store, number, self.make_unroll(self.spec, number))

    def sample(self):
        keys = self.rng.integers(0, RING * self.spec.unroll_starts, SIZE)
        return keys, self.rng.uniform(0.1, 1, SIZE).astype(np.float32)

    def keys(self, keys, weights):
        return Draw(0, {TABLE: SampledKeys(self.store, TABLE, self.store.generation, keys, weights)})

    def by_keys(self, keys, weights):
        """An update as the learner makes it where the store lies on its device."""
        return results(self.updater.update(self.keys(keys, weights)))

    def plainly(self, keys, weights):
        """The same update without graph, padding and fixed memory."""
        held = self.store.holds(TABLE, keys)
        learner = self.updater.learner
        with self.device_stream.exclusive():
            key, weight = (torch.from_numpy(array[held]).to(self.store.device) for array in (keys, weights))
            batch = self.store.batch(TABLE, key, weight)
            batches = {TABLE: batch._make(tensor.to(self.device) for tensor in batch)}
            outcome = learner.gradients(batches, lambda: learner.from_online(batches, learner.from_target(batches)))
            metrics = outcome.metrics | learner.apply()
            # Read here: the default stream, to which we come back, does not wait for this one.
            priorities = outcome.priorities[TABLE].cpu().numpy()
            numbers = {name: value.cpu().numpy() for name, value in metrics.items()}
        self.updater.num_updates += 1
        if self.updater.num_updates % 7 == 0:
            with self.device_stream.exclusive():
                learner.target.load_state_dict(learner.online.state_dict())
        reduced = {name: value.max() if name.endswith("_max") else value.mean() for name, value in numbers.items()}
        return priorities, {name: float(value) for name, value in reduced.items()}


def whole(updater, batches):
    """The work of an update, as a graph holds it."""
    return updater._work.run(batches)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
@pytest.mark.parametrize("spec", [VECTORS, SCREENS], ids=["vectors", "screens"])
def test_a_graph_gives_the_numbers_of_the_plain_update(make_unroll, device, optimizer, spec):
    graph, plain = (World(make_unroll, spec, device, optimizer) for _ in range(2))
    for _ in range(20):
        update_both(graph, plain, lambda: graph.by_keys(*graph.sample()), lambda: plain.plainly(*plain.sample()))
    assert graph.updater.num_updates == 20


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_the_loose_comparison_bears_other_convolutions_and_no_other_batch(make_unroll, monkeypatch, optimizer):
    """On a GPU, a graph's convolutions are not those of the plain update: here some results differ by the last bit."""
    graph, plain, wrong = (World(make_unroll, SCREENS, CPU, optimizer) for _ in range(3))
    rng, convolution = torch.Generator().manual_seed(0), torch.nn.functional.conv2d

    def other_convolution(*arguments, **named):
        result = convolution(*arguments, **named)
        is_other = torch.rand(result.shape, generator=rng) < 0.03
        return torch.where(is_other, result * (1 + 2 * torch.finfo(result.dtype).eps), result)

    def otherwise(keys, weights):
        with monkeypatch.context() as patched:
            patched.setattr(torch.nn.functional, "conv2d", other_convolution)
            return plain.plainly(keys, weights)

    for _ in range(20):
        keys, weights = graph.sample()
        update_both(graph, plain, lambda: graph.by_keys(keys, weights), lambda: otherwise(keys, weights), "loosely")
        with pytest.raises(AssertionError):
            update_both(plain, wrong, lambda: plain.by_keys(keys, weights),
                        lambda: wrong.plainly(keys[::-1].copy(), weights), "loosely")  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_lost", [0, 9])
def test_batches_from_host_memory_give_the_same_numbers(make_unroll, device, num_lost):
    graph, plain = (World(make_unroll, SCREENS, device, store_device=CPU) for _ in range(2))
    for i in range(5):
        lost = num_lost if i % 2 else 0  # the rest of an earlier, larger batch must not count
        keys, weights = (values[lost:] for values in graph.sample())

        def by_graph(keys=keys, weights=weights):
            # Called from within: on a CPU the updater takes such batches without a graph.
            return results(graph.updater._update_by_graph(draw_of(graph.store, keys, weights)))

        how = "closely" if num_lost else "exactly"
        update_both(graph, plain, by_graph, lambda: plain.plainly(keys, weights), how)


@pytest.mark.parametrize("device", DEVICES)
def test_transitions_that_were_overwritten_do_not_count(make_unroll, device):
    """In float32: bfloat16 rounds other weights otherwise, and those that are left make up for those that are lost."""
    graph, plain = (World(make_unroll, VECTORS, device) for _ in range(2))
    for number in range(RING, RING + 5):
        keys, weights = graph.sample()
        keys[1] = (number - RING) * VECTORS.unroll_starts + 2
        batch = graph.keys(keys, weights)
        graph.apply(number)
        plain.apply(number)
        held = graph.store.holds(TABLE, keys)
        assert not held.all()

        def by_graph(batch=batch, left=keys[held]):
            pending = graph.updater.update(batch)
            assert np.array_equal(pending.keys[TABLE], left)
            return results(pending)

        update_both(graph, plain, by_graph, lambda: plain.plainly(keys, weights), "closely")


@pytest.mark.parametrize("device", DEVICES)
def test_rows_that_only_fill_a_batch_read_nothing_that_is_not_held(make_unroll, device):
    world = World(make_unroll, VECTORS, device)
    world.store._numbers[0] = -1
    with world.device_stream.exclusive():
        world.store._frames[world.store._frames_of(0)].view(torch.float32).fill_(torch.nan)
    keys, weights = world.sample()
    keys[:7] = 3
    keys[7:] = 9
    priorities, metrics = results(world.updater.update(world.keys(keys, weights)))
    assert len(priorities) == 5 and np.isfinite(priorities).all() and np.isfinite(list(metrics.values())).all()


@pytest.mark.parametrize("device", DEVICES)
def test_a_batch_of_which_nothing_is_left_is_no_update(make_unroll, device):
    world = World(make_unroll, VECTORS, device)
    before = {name: tensor.clone() for name, tensor in world.updater.state_dict().items()}
    keys, weights = world.sample()
    batch = world.keys(keys, weights)
    assert world.updater.update(world.keys(keys + 10**6, weights)) is None
    world.store.clear(1)
    world.apply(0)  # the same number, of another log
    assert world.updater.update(batch) is None
    world.store.release()
    assert world.updater.update(batch) is None
    assert world.updater.num_updates == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in world.updater.state_dict().items())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_making_a_graph_changes_nothing_and_moves_nothing(make_unroll, device, optimizer):
    world = World(make_unroll, SCREENS, device, optimizer)
    world.plainly(*world.sample())  # the optimizer's averages are no zeros
    learner = world.updater.learner
    tensors = {**learner.acting_tensors(), **learner.learning_tensors()}
    before = {name: (tensor.data_ptr(), tensor.cpu().clone()) for name, tensor in tensors.items()}
    with world.device_stream.exclusive():
        inputs = {TABLE: KeyInputs(world.device_stream, world.store, TABLE, SIZE)}
    UpdateGraph(world.device_stream, inputs, world.updater._work, tensors.values())
    for name, tensor in {**learner.acting_tensors(), **learner.learning_tensors()}.items():
        assert tensor.data_ptr() == before[name][0], name
        assert torch.equal(tensor.cpu(), before[name][1]), name


@pytest.mark.parametrize("device", DEVICES)
def test_a_graph_goes_on_with_what_is_loaded(make_unroll, device):
    saved, loaded = (World(make_unroll, SCREENS, device) for _ in range(2))
    for _ in range(3):
        saved.updater.update(saved.keys(*saved.sample()))
        loaded.updater.update(loaded.keys(*loaded.sample()))
    for _ in range(9):
        saved.updater.update(saved.keys(*saved.sample()))
    state = {name: tensor.clone() for name, tensor in saved.updater.state_dict().items()}
    loaded.updater.load_state_dict(state, saved.updater.num_updates)
    loaded.rng = np.random.default_rng(4)
    saved.rng = np.random.default_rng(4)
    for _ in range(5):
        update_both(loaded, saved, *(lambda world=world: world.by_keys(*world.sample()) for world in (loaded, saved)))


@pytest.mark.parametrize("device", DEVICES)
def test_another_store_gets_another_graph(make_unroll, device):
    world, plain = (World(make_unroll, VECTORS, device) for _ in range(2))
    for _ in range(2):
        update_both(world, plain, lambda: world.by_keys(*world.sample()), lambda: plain.plainly(*plain.sample()))
        world.store.release()
        world.store = UnrollStore(VECTORS, RING, [want(SIZE)], device, 8, world.device_stream)
        for number in range(RING):
            world.apply(number)


class OnDevice(TorchDispatchMode):
    """Fails when an operation takes or makes something in host memory; one that asks for a value fails by itself.

    Torch's Adam with its rate in a tensor has no kernel for the meta device: its arguments are checked, it is not run.
    """

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        has_kernel = operation is not torch.ops.aten._fused_adam_.tensor_lr
        out = operation(*args, **(kwargs or {})) if has_kernel else None
        for value in tree_leaves((args, kwargs, out)):
            assert not isinstance(value, torch.Tensor) or value.device.type == "meta", operation
        return out


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
@pytest.mark.parametrize("rescaling", [False, True])
def test_an_update_waits_for_nothing_and_needs_nothing_of_the_host(monkeypatch, optimizer, rescaling):
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _: False)
    monkeypatch.setattr(PlainLearner, "has_side_work", False)  # no second thread, as on a GPU
    meta, spec = torch.device("meta"), StreamSpec("Atari-v0", (84, 84), "uint8", 4, 6, 4)
    algorithm = dataclasses.replace(ALGORITHM, value_rescaling=rescaling, unroll_starts=80)
    learner = apex_dqn.make_learner(algorithm, DuelingConfig(), ApexUpdate(512, optimizer), spec, meta)
    store = UnrollStore(spec, 10, [want(512)], meta, 4)
    stream = DeviceStream(meta)
    by_keys = KeyInputs(stream, store, TABLE, 512)
    for inputs in (by_keys, BatchInputs(stream, by_keys.batch())):
        updater = Updater(learner, stream)
        with OnDevice(), Counted() as counted:
            values = whole(updater, {TABLE: inputs.batch()})
        assert rescaling or counted.total <= MOST_OPERATIONS[optimizer]
        num_metrics = sum(math.prod(result.shape) for result in updater._results if result.kind == "metrics")
        assert values.shape == (512 + num_metrics,)


class SlowKeyInputs(KeyInputs):
    """Leaves another thread the time to come between the check of the keys and the gathering, on a CPU."""

    def batch(self):
        time.sleep(1e-3)
        return super().batch()


@pytest.mark.parametrize("device", DEVICES)
def test_what_an_update_reads_is_whole_while_unrolls_arrive(make_unroll, device):
    """Each unroll shows one number and takes it as its action; another thread replaces them all the time."""
    device_stream = DeviceStream(device)
    store = UnrollStore(VECTORS, RING, [want(SIZE)], device, 4, device_stream)
    store._staging = store._make_staging()
    made, stop = make_unroll(VECTORS), threading.Event()

    def apply(number):
        frames, actions = (np.full_like(array, number % 5) for array in (made.frames, made.actions))
        hold(store, number, made._replace(frames=frames, actions=actions))

    def keep_applying():
        for number in itertools.count(RING):
            if stop.is_set():
                return
            apply(number)

    def shown(batches):
        batch = batches[TABLE]
        is_whole = (batch.observation.flatten(1) == batch.action[:, None]).all(dim=1)
        yield
        return torch.where(is_whole, batch.action, -torch.ones_like(batch.action))

    for number in range(RING):
        apply(number)
    with device_stream.exclusive():
        inputs = {TABLE: SlowKeyInputs(device_stream, store, TABLE, SIZE)}
    graph = UpdateGraph(device_stream, inputs, Work(shown, None), [])
    rng, num_read, num_lost = np.random.default_rng(0), 0, 0
    thread = threading.Thread(target=keep_applying)
    thread.start()
    try:
        while num_read < 2000 or not num_lost:
            keys = (store._numbers.max() - rng.integers(0, RING, SIZE)) * 8 + rng.integers(0, 8, SIZE)
            named = SampledKeys(store, TABLE, store.generation, keys, np.ones(SIZE, np.float32))
            with device_stream.exclusive():
                started = graph.run(Draw(0, {TABLE: named}))
                event = device_stream.event()
            num_lost += SIZE - (len(started[0][TABLE]) if started else 0)
            if started is not None:
                wait(event)
                read = started[0][TABLE]
                assert np.array_equal(started[1].numpy()[: len(read)], read // 8 % 5)
                num_read += len(read)
    finally:
        stop.set()
        thread.join()


def test_metrics_of_rows_are_of_one_table():
    learner = mock.MagicMock(has_side_work=False, num_steps=1)
    learner.minibatches = lambda batches, known: [(batches, known)]
    learner.gradients.return_value = Outcome({}, {"q_mean": torch.ones(3)})
    samples = {table: Gathered(np.arange(3), SimpleNamespace(weight=torch.ones(3))) for table in ("new", "old")}
    with pytest.raises(ApexError, match="the metric q_mean of rows: where it wants several tables, give scalars"):
        Updater(learner, DeviceStream(CPU)).update(Draw(0, samples))
