"""Updates that a graph repeats, on a CPU: `tests.fake_graph` stands for CUDA. They equal those that Python makes."""

import threading

import numpy as np
import pytest
import torch

from apexrl.config.schedules import schedules_of
from apexrl.config.sections import LearningConfig
from apexrl.learning.experience.draw import Draw
from apexrl.learning.experience.run_moments import RunMoments
from apexrl.learning.experience.unroll_store import UnrollStore
from apexrl.learning.updates.team import Team
from apexrl.learning.updates.updater import Updater
from tests.agents.impala_parts import LASER, updates
from tests.captured_runs import check_captured_run
from tests.devices import CPU
from tests.fake_graph import FakeDeviceStream, FakeGraph
from tests.learning.twins import state_of, update_both
from tests.learning.updates import test_impala_updates as impala
from tests.learning.updates.test_updater import RING, SCREENS, SIZE, VECTORS, World
from tests.lockstep import TABLE, hold, results, want


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


def test_a_graph_normalizes_by_the_numbers_of_the_moment(make_unroll):
    worlds = [World(make_unroll, VECTORS, CPU, device_stream=stream) for stream in (FakeDeviceStream(), None)]
    learning = LearningConfig(normalize_observations=True, scale_rewards=True)
    followed = [RunMoments(learning, 0.9, world.device_stream) for world in worlds]
    for world, moments in zip(worlds, followed, strict=True):
        moments.begin(VECTORS)
        normalizer = moments.normalizer_on(CPU)
        world.store = UnrollStore(VECTORS, RING, [want(SIZE)], CPU, 8, world.device_stream, normalizer)
        world.updater = Updater(world.updater.learner, world.device_stream, moments=moments)
        for number in range(RING):
            world.apply(number)
    graph, plain = worlds
    for number in range(5):
        for moments in followed:
            moments.add(make_unroll(VECTORS, 10 * number), VECTORS.unroll_starts, 0.0, is_new=True)
            moments.follow(Team())
        update_both(graph, plain, lambda: graph.by_keys(*graph.sample()), lambda: plain.plainly(*plain.sample()))
    assert graph.device_stream.num_captures == 1


def test_between_two_graphs_learners_add_their_gradients_up(make_unroll):
    """A mean does not change when all parts are doubled, the number that divides it included."""
    graph = World(make_unroll, VECTORS, CPU, device_stream=FakeDeviceStream())
    team = Doubling()
    graph.updater = Updater(graph.updater.learner, graph.device_stream, team)
    plain = World(make_unroll, VECTORS, CPU)
    for _ in range(5):
        update_both(graph, plain, lambda: graph.by_keys(*graph.sample()), lambda: plain.plainly(*plain.sample()))
    assert graph.device_stream.num_captures == 2 and team.calls == 5


def test_a_graph_is_there_before_the_first_draw(make_unroll):
    graph = World(make_unroll, SCREENS, CPU, device_stream=FakeDeviceStream())
    plain, before = World(make_unroll, SCREENS, CPU), state_of(graph)
    graph.updater.prepare(graph.store)
    assert graph.device_stream.num_captures == 1
    assert all(torch.equal(before[name], tensor) for name, tensor in state_of(graph).items())
    for _ in range(5):
        update_both(graph, plain, lambda: graph.by_keys(*graph.sample()), lambda: plain.plainly(*plain.sample()))
    assert graph.device_stream.num_captures == 1


@pytest.mark.parametrize("kind", ["named", "gathered"])
def test_a_graph_for_batches_of_either_kind_can_be_made_before_them(make_unroll, kind):
    world = World(make_unroll, SCREENS, CPU, device_stream=FakeDeviceStream())
    store = world.store if kind == "named" else World(make_unroll, SCREENS, CPU).store
    world.updater.prepare(store)
    captures = world.device_stream.num_captures
    sample = store.sample(TABLE, *world.sample())
    assert world.updater.update(Draw(0, {TABLE: sample})) is not None
    assert world.device_stream.num_captures == captures


def test_each_shard_has_a_graph(make_unroll):
    """Draws of several shards come in turns: none of them costs a capture."""
    first, second = (World(make_unroll, VECTORS, CPU, device_stream=FakeDeviceStream()) for _ in range(2))
    plain, updater = World(make_unroll, VECTORS, CPU), first.updater
    second.updater, second.device_stream = updater, first.device_stream
    for number in range(6):
        world = (first, second)[number % 2]
        keys, weights = plain.sample()

        def by_shard(world=world, shard=number % 2, keys=keys, weights=weights):
            return results(updater.update(world.keys(keys, weights)._replace(shard=shard)))

        update_both(first, plain, by_shard, lambda keys=keys, weights=weights: plain.plainly(keys, weights))
    assert first.device_stream.num_captures == 2


@pytest.mark.parametrize("is_prepared", [True, False])
def test_unrolls_come_while_a_graph_is_made(make_unroll, monkeypatch, is_prepared):
    """Libraries choose their algorithms for seconds: nobody waits for them who has to answer the replay server."""
    world = World(make_unroll, VECTORS, CPU, device_stream=FakeDeviceStream())
    learner, gradients, done = world.updater.learner, world.updater.learner.gradients, []

    def applying(*arguments):
        if not done:
            thread = threading.Thread(target=lambda: done.append(world.apply(RING)))
            thread.start()
            thread.join(10)
        return gradients(*arguments)

    monkeypatch.setattr(learner, "gradients", applying)
    if is_prepared:
        world.updater.prepare(world.store)
    else:
        world.by_keys(*world.sample())
    assert done and world.store.holds(TABLE, np.array([RING * VECTORS.unroll_starts])).all()


def test_a_store_is_not_given_up_while_a_graph_of_it_is_made(make_unroll, monkeypatch):
    world = World(make_unroll, VECTORS, CPU, device_stream=FakeDeviceStream())
    learner, gradients, releasing = world.updater.learner, world.updater.learner.gradients, []

    def giving_up(*arguments):
        if not releasing:
            releasing.append(threading.Thread(target=world.store.release))
            releasing[0].start()
            releasing[0].join(0.1)
            assert releasing[0].is_alive()
        return gradients(*arguments)

    monkeypatch.setattr(learner, "gradients", giving_up)
    world.updater.prepare(world.store)
    releasing[0].join(10)
    assert not world.store.num_bytes and world.device_stream.num_captures == 1
    assert world.updater.update(world.keys(*world.sample())) is None
    world.updater.prepare(world.store)  # nothing is there any more
    assert world.device_stream.num_captures == 1


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
@pytest.mark.parametrize("lstm", [False, True], ids=["feed-forward", "lstm"])
def test_a_replayed_update_of_impala_follows_its_schedule(lstm, optimizer):
    ways = {"learning_rate": "1e-3:1e-4", "entropy_cost": "0.3:0.1", "value_cost": "0.7:0.2",
            "max_gradient_norm": "4:1", "policy_cloning_cost": "0.1:0.3"}  # fmt: skip
    update = updates(mix=LASER, batch_size=impala.SIZE, optimizer=optimizer, **ways)
    graph, plain = impala.World(update, lstm, device_stream=FakeDeviceStream()), impala.World(update, lstm)
    for number in range(5):
        for world in (graph, plain):
            world.updater.schedule({name: way.at(number / 5) for name, way in schedules_of(update).items()})
        update_both(graph, plain, lambda: graph.by_names(graph.keys()), lambda: plain.plainly(plain.keys()))
    assert graph.device_stream.num_captures == 1


SHORT = ["--env", "Catch-v0", "--preset", "small", "--total-updates", "20", "--min-size-to-sample", "500",
         "--no-evaluator"]  # fmt: skip


@pytest.mark.parametrize(
    "flags",
    [
        ["--agent", "apex-dqn", "--target-period-updates", "7"],
        ["--agent", "impala", "--mix", *LASER, "--lstm", "--batch-size", "8"],
    ],
)
def test_a_run_on_a_stand_in_for_a_gpu_learns_the_same_network(tmp_path, monkeypatch, flags):
    """Unrolls through staged memory, draws by name, the copy that computes, the graph, its results: to the bit."""
    check_captured_run(monkeypatch, tmp_path, [*SHORT, *flags])


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x * float(x.sum()),
        lambda x: x[x > 0],
        lambda x: x + torch.ones(3).pin_memory() if torch.cuda.is_available() else x.nonzero(),
        lambda x: torch.cuda.Stream() and x,
        lambda x: torch.Stream() and x,
        lambda x: torch.cuda.synchronize() or x,
        lambda x: x * x.tolist()[0],
        lambda x: x.cpu() * 2,
        lambda x: x.to("cpu", non_blocking=True) * 2,
        lambda x: x.to(device="cpu") * 2,
        lambda x: x + torch.from_numpy(x.numpy()),
        lambda x: x + torch.tensor([1.0, 2.0, 3.0]),
        lambda x: torch.cuda.empty_cache() or x,
    ],
)
def test_work_that_waits_or_leaves_the_stream_cannot_be_captured(work):
    with pytest.raises(AssertionError, match="in a capture"), FakeGraph():
        work(torch.arange(3.0))
