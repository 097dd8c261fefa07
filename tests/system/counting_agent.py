"""An algorithm of another family, which checks every number that reaches its learner.

It shares nothing with Ape-X: it has a recurrent state, adds fields of every kind to its unrolls, gives an unroll one
priority, and learns from whole unrolls of two tables. It acts in `counting_env`, whose observations are known: the
count of steps since ever decides each action and each extra, so that the learner can compute them again.
"""

import dataclasses
import sys

import numpy as np
import torch

from apexrl.agents.contract import Family, Observation, Outcome, UnrollBatch, Unrolls, Want
from apexrl.agents.families import FAMILIES
from apexrl.config.sections import AlgorithmConfig, NetworkConfig, UpdateConfig
from apexrl.config.tables import TableSpec
from apexrl.types import Field

STARTS, OVERLAP = 6, 2
STEPS = STARTS + OVERLAP
EXTRAS = (
    Field("ratio", "step", "float16", (2,)),
    Field("value", "observation", "float32"),
    Field("bits", "observation", "uint8", (3,)),
    Field("core_state", "first", "float32", (2, 2)),
    Field("slot", "first", "int32"),
)


@dataclasses.dataclass(frozen=True)
class CountingUpdate(UpdateConfig):
    """Two batch sizes."""

    queue_size: int = 2
    """Unrolls of the queue in a draw."""


FAMILIES["counting"] = Family(
    algorithm=AlgorithmConfig(unroll_starts=STARTS),
    network=NetworkConfig(),
    update=CountingUpdate(batch_size=3, learning_rate="1:0.1"),  # it tells how far the run is
    presets={"small": {"replay": {"capacity": 6_000, "min_size_to_sample": 60}}},
    stream=lambda algorithm, env: env.streamed(algorithm.unroll_starts, OVERLAP, EXTRAS, has_unroll_priorities=True),
    wants=lambda algorithm, update: (
        Want("queue", update.queue_size, Unrolls()),
        Want("sequences", update.batch_size, Unrolls()),
    ),
    tables=lambda update: (TableSpec("queue", "fifo"), TableSpec("sequences", "priority", 0, 3)),
    module="tests.system.counting_agent",
    divided_sizes=("queue_size",),
)


def extras_of(count):
    """The extras of an observation that shows a count [E]."""
    count = np.asarray(count, np.float64)
    return {
        "ratio": np.stack([count / 7, -1 / count], axis=-1).astype(np.float16),
        "value": (count / 10).astype(np.float32),
        "bits": np.stack([count % 2, count % 3, count % 256], axis=-1).astype(np.uint8),
    }


def next_state(state, count, reward):
    """The recurrent state [E, 2, 2] after an observation; float32 all the way, so that it is exact."""
    count, reward = (np.asarray(array, np.float32)[:, None, None] for array in (count, reward))
    return state * np.float32(0.5) + count * np.float32([[1, 0], [0, 0.25]]) + reward * np.float32([[0, 1], [0, 0]])


class CountingActor:
    def __init__(self, algorithm, parameters, device):
        self.load(parameters)
        self.slots = None

    def load(self, parameters):
        self.header = parameters.header
        assert parameters.tensors["updates"].item() == self.header.params_version

    def initial_state(self, num_envs):
        return np.zeros((num_envs, 2, 2), np.float32)

    evaluation_exploration = 0.0

    def explore(self, slots, ladder_size):
        return np.asarray(slots) + 0.5

    def act(self, observation: Observation, exploration, state, rng):
        count = observation.frames[:, 1]
        extras = extras_of(count) | {"core_state": state, "slot": (exploration - 0.5).astype(np.int32)}
        extras["secret"] = count  # for `priorities` alone
        return count.astype(np.int64) % 2, extras, next_state(state, count, observation.rewards)

    def priorities(self, unrolls, extras):
        assert extras.keys() == {"secret"} and np.array_equal(extras["secret"], unrolls.frames[:, :, 1])
        return extras["secret"][:1]


class CountingLearner:
    """Checks batches, and counts them where a status can show it."""

    has_side_work = False
    num_steps = 1

    def __init__(self, algorithm, network, update, spec, device):
        self.updates, self.checked = torch.zeros(()), torch.zeros(())
        self.rate = torch.ones((), dtype=torch.float64)
        self.digest = torch.zeros((), dtype=torch.int64)  # of everything that was drawn, in order
        self.following = {}  # after the queue's newest unrolls, by slot: the next count and state

    def schedule(self, numbers):
        assert 0.1 <= numbers["learning_rate"] <= self.rate
        self.rate.fill_(numbers["learning_rate"])

    def from_target(self, batches):
        return None

    def from_online(self, batches, from_target):
        return None

    def minibatches(self, batches, known):
        yield batches, known

    def gradients(self, batches, known):
        in_role = "pytest" not in sys.modules
        assert not in_role or torch.full((), 1e-39) * 1 == 0, "the process is not prepared for updates"
        assert known() is None and set(batches) == {"queue", "sequences"}
        queue, sequences = batches["queue"], batches["sequences"]
        assert self.rate < 1 or not self.updates, "the rate goes with what ends the run"
        assert len(queue.weight) == 2 and len(sequences.weight) == 3
        for batch in (queue, sequences):
            check(batch)
            self.checked += len(batch.weight)
            for count in batch.observation[0, :, 0, 1].long():
                self.digest.mul_(31).add_(count).remainder_(2**31)
        self.check_order(queue)
        counts = sequences.observation[0, :, 0, 1]
        probability = counts.new_tensor(0.25)
        metrics = {"checked": self.checked.clone(), "probability_0": probability, "probability_1": 1 - probability}
        return Outcome({"sequences": counts + 1}, metrics)

    def check_order(self, queue):
        """Every unroll of a queue begins where the one before it in its stream said, and comes once."""
        slots, counts = queue.extras["slot"].tolist(), queue.observation[0, :, 0, 1].tolist()
        states = queue.extras["core_state"].numpy()
        for slot, count, state, following in zip(slots, counts, states, following_states(queue), strict=True):
            expected_count, expected_state = self.following.get(slot, (count, state))
            assert count == expected_count, "an unroll came twice, or late"
            assert np.array_equal(state, expected_state)
            self.following[slot] = count + STARTS, following

    def apply(self):
        self.updates += 1
        return {}

    def is_copy_due(self, num_updates):
        return False

    def copy_target(self):
        raise AssertionError("never due")

    def acting_tensors(self):
        return {"updates": self.updates}

    def learning_tensors(self):
        return {"checked": self.checked, "rate": self.rate, "digest": self.digest}


def check(batch: UnrollBatch) -> None:
    """Compares a batch with what its counts say, bit for bit."""
    frames = batch.observation[:, :, 0].numpy()  # [T + 1, B, 2]: stacks of one
    counts = frames[:, :, 1]
    assert counts.shape == (STEPS + 1, len(batch.weight)) and batch.weight.gt(0).all()
    assert np.array_equal(counts, counts[0] + np.arange(STEPS + 1)[:, None])
    assert np.array_equal(batch.start.numpy(), frames[:, :, 0] == 1)
    assert np.array_equal(batch.action.numpy(), counts[:-1].astype(np.int64) % 2)
    assert np.array_equal(batch.reward.numpy(), np.where(batch.start[1:].numpy(), 0, counts[1:] % 5))
    expected = extras_of(counts)
    expected["ratio"] = expected["ratio"][:-1]
    for name, values in expected.items():
        found = batch.extras[name].numpy()
        assert found.dtype == values.dtype and np.array_equal(found, values), name


def following_states(batch: UnrollBatch):
    """The recurrent states [B, 2, 2] to which the stored ones lead in STARTS steps."""
    state, counts = batch.extras["core_state"].numpy(), batch.observation[:, :, 0, 1].numpy()
    rewards = np.concatenate([np.where(batch.start[:1], 0, counts[:1] % 5), batch.reward.numpy()])
    for t in range(STARTS):
        state = next_state(state, counts[t], rewards[t])
    return state


def make_network(spec, network):
    return torch.nn.Module()


make_actor, make_learner = CountingActor, CountingLearner
