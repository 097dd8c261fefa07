"""On policy V-trace is the n-step Bellman target: through the real environments, actor, log and learner."""

import collections
from typing import NamedTuple

import numpy as np
import pytest
import torch

from apexrl.agents import impala
from apexrl.agents.contract import Observation
from apexrl.agents.engine.plain_learner import PlainLearner
from apexrl.agents.impala_config import FAMILY, ImpalaAlgorithm, ImpalaUpdate
from apexrl.config.sections import EnvConfig, ReplayConfig
from apexrl.environments.vector import make_environment, take_step
from apexrl.learning.experience.draw import Draw
from apexrl.learning.experience.unroll_store import UnrollStore
from apexrl.learning.updates.updater import Updater
from apexrl.losses.windows import valid_starts
from apexrl.networks import device, policy
from apexrl.networks.device_stream import DeviceStream
from apexrl.networks.recurrent import History
from apexrl.replay.journal import new_identity
from apexrl.replay.log import LogEntry
from apexrl.replay.replay import Replay
from apexrl.types import TimeSteps
from apexrl.unroll import UnrollBuilder, UnrollCodec
from tests.agents.impala_parts import CPU, LSTM_SIZE, NETWORK, parameters_of
from tests.lockstep import hold

NUM_ENVS, K, ROUNDS, GAMMA = 3, 8, 24, 0.97
ENVIRONMENTS = {
    "catch": EnvConfig(env="Catch-v0"),  # every episode terminates, after 9 steps
    "cartpole": EnvConfig(env="CartPole-v1", max_episode_frames=15),  # some are truncated
}


class Record(NamedTuple):
    """All that the environments saw and did: N steps, and N + 1 observations."""

    frames: np.ndarray  # [N + 1, E, *frame]
    starts: np.ndarray  # [N + 1, E]
    actions: np.ndarray  # [N, E]
    rewards: np.ndarray  # [N, E]
    discounts: np.ndarray  # [N, E]


def record_of(first, actions, steps):
    """The record, of the first frames and the environments' own steps."""
    columns = TimeSteps(*(np.array(column) for column in zip(*steps, strict=True)))
    frames = np.concatenate([first[None], columns.frames])
    starts = np.concatenate([np.ones((1, NUM_ENVS), bool), columns.starts])
    return Record(frames, starts, np.array(actions), columns.rewards, columns.discounts)


class Played(NamedTuple):
    """A play of real environments by a real actor, and a batch of all of it that went through the log."""

    record: Record
    learner: PlainLearner
    draw: Draw


def play(config, lstm):
    """Plays with a new network until the queue gives a batch of whole unrolls, and gathers it."""
    envs, num_unrolls = make_environment(config, NUM_ENVS), NUM_ENVS * ROUNDS
    algorithm, update = ImpalaAlgorithm(GAMMA, K, lstm, LSTM_SIZE), ImpalaUpdate(batch_size=num_unrolls)
    spec = FAMILY.stream(algorithm, envs.spec)
    torch.manual_seed(1)
    learner = impala.make_learner(algorithm, NETWORK, update, spec, CPU)
    actor = impala.make_actor(algorithm, parameters_of(learner, spec), CPU)
    replay = Replay(ReplayConfig(1000, 1, tables=tuple(map(str, FAMILY.tables(update)))), new_identity(spec), 0)
    store = UnrollStore(spec, replay.ring_unrolls, FAMILY.wants(algorithm, update), CPU, 2)
    codec, rng, exploration = UnrollCodec(spec), np.random.default_rng(0), actor.explore(np.arange(NUM_ENVS), NUM_ENVS)
    first, state = envs.reset(seed=0), actor.initial_state(NUM_ENVS)
    seen = Observation(first, np.ones(NUM_ENVS, bool), np.zeros(NUM_ENVS, np.float32))
    builder, actions, steps = UnrollBuilder(spec, first), [], []
    while not replay.tables["queue"].can_sample(num_unrolls):
        chosen, extras, state = actor.act(seen, exploration, state, rng)
        complete = builder.observe(extras)
        for e in range(NUM_ENVS if complete else 0):
            unroll = complete[0].stream(e)
            valid, block = valid_starts(unroll.starts, K), codec.encode(unroll)
            entry = LogEntry(b"", block, int(valid.sum()), 0.0)
            hold(store, replay.insert([entry], np.ones((1, K), np.float32), valid[None]), codec.decode(block))
        step = TimeSteps(*(np.copy(array) for array in take_step(envs, chosen)))
        builder.add(chosen, step)
        actions.append(chosen)
        steps.append(step)
        seen = Observation(step.frames, step.starts, step.rewards)
    envs.close()
    sample = replay.sample("queue", num_unrolls)
    assert sample.keys.tolist() == list(range(num_unrolls)), "oldest first; those of a round lie side by side"
    draw = Draw(0, {"queue": store.gather("queue", sample.keys, sample.weights)})
    return Played(record_of(first, actions, steps), learner, draw)


def values_of(learner, record):
    """The network's values [N + 1, E] of the whole record, as one unroll that begins with a state of zeros."""
    before = np.concatenate([np.zeros_like(record.actions[:1]), record.actions])
    rewards = np.concatenate([np.zeros_like(record.rewards[:1]), record.rewards])
    state = np.zeros((NUM_ENVS, 2, LSTM_SIZE), np.float32)
    numbers = (record.starts, before.astype(np.int64), rewards, state)
    with torch.no_grad():
        observation = torch.from_numpy(record.frames).unsqueeze(2)  # stacks of one frame
        return learner.online["network"].unroll(observation, History(*map(torch.from_numpy, numbers))).values.numpy()


def slow_target(record, values, t, e, end):
    """The return from step t on, up to the end of its episode or of its unroll, and then the value.

    None where the step is a reset. Else the target, and why it ends.
    """
    if record.starts[t + 1, e]:
        return None
    total, discount = 0.0, 1.0
    while t < end:
        if record.starts[t + 1, e]:  # the step t is a reset: the episode was cut, and t observes its final frame
            return total + discount * values[t, e], "truncated"
        total += discount * record.rewards[t, e]
        discount *= GAMMA * record.discounts[t, e]
        t += 1
        if discount == 0:
            return total, "terminated"
    return total + discount * values[t, e], "unroll"


@pytest.mark.parametrize("lstm", [False, True], ids=["feed-forward", "lstm"])
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_on_policy_the_target_is_the_n_step_bellman_target_of_the_environments_own_record(monkeypatch, name, lstm):
    for module in (policy, device):  # actor and learner compute in float32
        monkeypatch.setattr(module, "fastest_dtype", lambda *_: torch.float32)
    record, learner, draw = play(ENVIRONMENTS[name], lstm)
    values = values_of(learner, record)
    taken = []

    def vtrace(*tensors, **numbers):
        taken.append((tensors, numbers["valid"], impala_vtrace(*tensors, **numbers)))
        return taken[-1][-1]

    impala_vtrace = impala.vtrace
    monkeypatch.setattr(impala, "vtrace", vtrace)
    Updater(learner, DeviceStream(CPU)).update(draw)
    ((log_rhos, _, _, own_values, bootstrap_value), valid, targets) = taken[0]
    assert log_rhos[valid].abs().max() < 2e-3, "float16"
    own_values = torch.cat([own_values, bootstrap_value[None]])
    ends = collections.Counter()
    for row in range(NUM_ENVS * ROUNDS):
        (round_number, e) = divmod(row, NUM_ENVS)
        begin, end = round_number * K, (round_number + 1) * K
        assert own_values[:, row].tolist() == pytest.approx(values[begin : end + 1, e], abs=1e-3)
        for t in range(begin, end):
            found = slow_target(record, values, t, e, end)
            assert valid[t - begin, row] == (found is not None)
            if found is not None:
                assert targets.vs[t - begin, row].item() == pytest.approx(found[0], abs=1e-2)
                assert targets.errors[t - begin, row].item() == pytest.approx(found[0] - values[t, e], abs=1e-2)
                ends[found[1]] += 1
    wanted = {"unroll", "terminated"} | ({"truncated"} if name == "cartpole" else set())
    assert set(ends) == wanted and min(ends.values()) > 10, ends
