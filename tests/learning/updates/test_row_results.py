"""Results of each row of an update: from the learner of a mix, through the updater, to the selection of samples."""

import numpy as np
import pytest
import torch

from apexrl.agents.contract import Unrolls, Want
from apexrl.agents.impala import make_learner
from apexrl.agents.impala_config import ImpalaAlgorithm, ImpalaUpdate, stream, wants
from apexrl.learning.experience.draw import Draw, SampledKeys
from apexrl.learning.experience.replica import Replica
from apexrl.learning.experience.unroll_store import UnrollStore
from apexrl.learning.results import acted_rows
from apexrl.learning.updates.updater import Updater
from apexrl.lifecycle import Stop
from apexrl.net.log_client import LogBatch, LogStart
from apexrl.networks.config import ActorCriticConfig
from apexrl.networks.device_stream import DeviceStream
from apexrl.types import EnvironmentSpec, LogPosition, Sample
from tests.agents.impala_parts import keeping
from tests.fields import random_unroll
from tests.learning.experience.test_replica import Log, append
from tests.lockstep import CPU, hold

SPEC = stream(ImpalaAlgorithm(unroll_starts=6), EnvironmentSpec("Vectors-v0", (5,), "float32", 2, 3, 1))
NETWORK = ActorCriticConfig(torso="shallow", channels=(4, 4, 4), hidden_size=8)
MIX = ("queue=1/4", "elite-1=1/2", "uniform=1/4")
RING = 24


class World:
    """A learner of a mix and a store, always from the same seed."""

    def __init__(self, **changes):
        torch.manual_seed(0)
        update = ImpalaUpdate(**{"batch_size": 8, "mix": MIX, "optimizer": "adam", "trust_region": 0.05} | changes)
        self.wants = wants(ImpalaAlgorithm(), update)
        self.learner = make_learner(ImpalaAlgorithm(), NETWORK, update, SPEC, CPU)
        device_stream = DeviceStream(CPU)
        self.updater = Updater(self.learner, device_stream)
        self.store = UnrollStore(SPEC, RING, self.wants, CPU, 4, device_stream)
        for number in range(RING):
            hold(self.store, number, unroll_of(number))

    def draw(self, by_keys, **keys):
        named = {table: np.array(numbers) for table, numbers in keys.items()}
        weights = {table: np.ones(len(numbers), np.float32) for table, numbers in named.items()}
        make = self.named if by_keys else self.store.gather
        return Draw(0, {table: make(table, named[table], weights[table]) for table in named})

    def named(self, table, keys, weights):
        return SampledKeys(self.store, table, 0, keys, weights)

    def expected(self, number):
        """KL, mean normalised feature and rejected share of an unroll, from the network as it is, step by step."""
        unroll = unroll_of(number)
        key, weight = torch.tensor([number]), torch.ones(1)
        batch = self.store.batch(self.wants[-1].table, key, weight)
        with torch.no_grad():
            output = self.learner.online["network"].unroll(batch.observation)
        pi = output.logits[:-1, 0].double().softmax(-1).numpy()
        mu = np.exp(unroll.extras["behavior_log_probs"].astype(np.float64))
        mu /= mu.sum(axis=1, keepdims=True)
        implied = np.minimum(mu, pi)
        implied /= implied.sum(axis=1, keepdims=True)
        steps = [t for t in range(SPEC.unroll_steps) if not unroll.starts[t + 1]]
        divergence = sum((pi[t] * np.log(pi[t] / mu[t])).sum() for t in steps)
        rejected = sum((pi[t] * np.log(pi[t] / implied[t])).sum() >= 0.05 for t in steps) / max(len(steps), 1)
        features = output.features[:-1, 0].numpy()
        normal = [(features[t] - features[t].mean()) / np.sqrt(features[t].var() + 1e-5) for t in steps]
        return divergence, np.mean(normal, axis=0) if normal else np.zeros(8), rejected


def unroll_of(number):
    unroll = random_unroll(SPEC, number)
    logits = np.random.default_rng(number).normal(size=(SPEC.unroll_steps, 3))
    behavior = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    extras = {**unroll.extras, "behavior_log_probs": behavior.astype(np.float16)}
    return unroll._replace(extras=extras, actions=unroll.actions % 3)


@pytest.mark.filterwarnings("ignore:.*capturable=True")
@pytest.mark.parametrize("by_keys", [False, True], ids=["gathered", "graph"])
@pytest.mark.parametrize(
    ("mix", "distance", "found_names"),
    [
        (MIX, "kl", {"distance"}),
        (MIX, "l2", {"feature"}),
        (("queue=1/4", "elite-1=1/2", "attentive=1/4"), "kl", {"distance", "feature"}),
        (("queue=1/4", "elite-1=1/2", "elite-insertion@20=1/4"), "l2", {"distance", "feature"}),
    ],
)
def test_each_row_gets_its_own_results(mix, distance, found_names, by_keys):
    world = World(mix=mix, distance=distance)
    last = world.wants[-1].table
    keys = {"queue": [3, 4], "elite-1": [9, 1, 7], last: [0, 100]}  # one row lacks, one is not held
    if not by_keys:
        keys[last] = [0]
    expected = {number: world.expected(number) for number in (3, 4, 9, 1, 7, 0)}
    pending = world.updater.update(world.draw(by_keys, **keys))
    assert np.isfinite(pending.result()[1]["loss"])
    rows = pending.rows()
    assert {table: there.tolist() for table, there in pending.keys.items()} == keys | {last: [0]}
    for table, there in pending.keys.items():
        found = rows[table]
        assert found.keys() == {"rejected_share", *found_names}
        for i, number in enumerate(there.tolist()):
            divergence, feature, rejected = expected[number]
            assert found["rejected_share"][i] == pytest.approx(rejected, abs=1e-5)
            if "distance" in found:
                assert found["distance"][i] == pytest.approx(divergence, rel=1e-3, abs=1e-4)
            if "feature" in found:
                projected = feature @ world.learner.learning._row_results.projection.numpy()
                assert found["feature"][i] == pytest.approx(projected, rel=1e-3, abs=1e-4)
        assert all(len(values) == len(there) for values in found.values())
    assert 0 < np.mean([rejected for _, _, rejected in expected.values()]) < 1
    whole = {"queue": [5, 6], "elite-1": [9, 1, 7, 8], last: [2, 3]}
    assert world.updater.update(world.draw(by_keys, **whole)).rows()["elite-1"]["rejected_share"].shape == (4,)


@pytest.mark.filterwarnings("ignore:.*capturable=True")
@pytest.mark.parametrize("by_keys", [False, True], ids=["gathered", "graph"])
def test_elite_insertion_gets_priorities_that_fall_with_the_distance(by_keys):
    world = World(mix=("queue=1/4", "elite-insertion@20=1/2", "uniform=1/4"))
    keys = {"queue": [3, 4], "elite-insertion@20": [9, 1, 7], "uniform": [0, 100] if by_keys else [0]}
    expected = [1 / (1 + world.expected(number)[0]) for number in (9, 1, 7)]
    priorities, _ = world.updater.update(world.draw(by_keys, **keys)).result()
    assert priorities.keys() == {"elite-insertion@20"}
    assert priorities["elite-insertion@20"] == pytest.approx(np.array(expected), rel=1e-3)


def test_a_mix_without_replay_has_no_results_to_bring():
    world = World(mix=("queue=1",))
    assert world.updater.update(world.draw(False, queue=list(range(8)))).rows() == {}


def test_versions_that_acted_are_those_of_the_rows_that_were_there():
    draw = Draw(0, {"a": SampledKeys(None, "a", 0, np.array([5, 6, 7]), None, np.array([50, 60, 70]))})
    assert acted_rows(draw, {"a": np.array([5, 7])})["a"].tolist() == [50, 70]


def start(log):
    return LogStart(log, SPEC, RING, 0, False, dict.fromkeys(("queue", "elite-1"), "unrolls"))


class TwoTables(Log):
    """A log of several tables."""

    def __init__(self):
        super().__init__()
        self.used = []

    def batch_used(self, table):
        self.used.append(table)


def test_a_replica_keeps_the_best_of_its_candidates_by_the_results_of_updates():
    update = ImpalaUpdate(batch_size=4, mix=("queue=1/2", "elite-1=1/2"))
    selecting = wants(ImpalaAlgorithm(), update)
    assert [(want.batch_size, want.num_rows) for want in selecting] == [(2, 2), (8, 2)]
    log = TwoTables()
    appends = [append(SPEC, unroll_of(n), n) for n in range(RING)]
    log.events = [start("log"), *appends]
    replica = Replica(log, keeping(ImpalaAlgorithm(), update), LogPosition(), Stop())
    while replica.follow(0):
        pass

    def draws(*keys):
        for table, numbers in (("queue", [0, 1]), ("elite-1", keys)):
            weights = np.ones(len(numbers), np.float32)
            log.events.append(LogBatch(table, Sample(np.array(numbers), weights, weights)))
            replica.follow(0)
        return replica.next_draw(0).samples["elite-1"]

    assert draws(8, 7, 6, 5, 4, 3, 2, 1).keys.tolist() == [8, 7]  # nothing is known
    distances = np.arange(RING, 0, -1, dtype=np.float32)
    replica.add_results(replica.store.generation, {"queue": (np.arange(RING), {"distance": distances})})
    replica.add_results(replica.store.generation - 1, {"queue": (np.arange(RING), {"distance": -distances})})
    sample = draws(8, 7, 6, 5, 4, 3, 2, 1)
    assert sample.keys.tolist() == [8, 7]
    assert draws(1, 2, 23, 4, 22, 6, 7, 8).keys.tolist() == [23, 22]
    assert replica.selection_metrics["elite-1/distance_kept"] == 1.5
    assert sample.batch.reward.shape[1] == sample.batch.weight.shape[0] == 2
    gone = draws(100, 101, 102, 103, 104, 105, 106, 9)  # not decodable: never a candidate
    assert gone.keys.tolist() == [9] and gone.batch.weight.tolist() == [2, 0]
    log.events = [start("another"), *appends]
    while replica.follow(0):
        pass
    assert draws(1, 2, 23, 4, 22, 6, 7, 8).keys.tolist() == [1, 2]  # again nothing is known


def test_candidates_have_no_rows_of_their_own_in_memory():
    world = World()
    assert [want.num_rows for want in world.wants] == [2, 4, 2]
    assert world.store.gather("elite-1", np.array([1, 2]), np.ones(2, np.float32)).batch.weight.shape == (4,)
    assert Want("any", 3, Unrolls()).num_rows == 3
    assert sum(want.num_transitions(SPEC) for want in world.wants) == 8 * 6
