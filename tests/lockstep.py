"""The real parts of a run in one process and one thread, one after the other: no timing decides anything."""

import numpy as np
import torch

from apexrl.agents.apex_dqn import ApexActor, ApexLearner
from apexrl.agents.apex_dqn_config import FAMILY, ApexAlgorithm, ApexUpdate
from apexrl.agents.contract import Observation, Transitions, Want
from apexrl.config import EnvConfig, ReplayConfig
from apexrl.environments.vector import make_environment, make_spec, take_step
from apexrl.learning.draw import Draw
from apexrl.learning.unroll_store import UnrollStore
from apexrl.learning.updater import Updater
from apexrl.losses.windows import valid_starts
from apexrl.networks.config import DuelingConfig, to_text
from apexrl.networks.device_stream import DeviceStream
from apexrl.networks.parameters import Identity, Parameters, ParametersHeader, decode_parameters, encode_parameters
from apexrl.replay.journal import new_identity
from apexrl.replay.log import LogEntry
from apexrl.replay.replay import Replay
from apexrl.unroll import UnrollBuilder, UnrollCodec

CPU = torch.device("cpu")
TABLE = "transitions"
ALGORITHM = ApexAlgorithm(unroll_starts=8)
UPDATE = ApexUpdate(16, "adam", 1e-3, 1e-5, 40.0, 20, TABLE)
NETWORK = DuelingConfig(channels=(4, 4, 4), hidden_size=16)
VIEW = Transitions(ALGORITHM.n_steps, ALGORITHM.gamma)
NUM_ENVS = 4


def identity_of(spec):
    return Identity(spec, "apex-dqn", to_text(NETWORK))


def make_updater(spec, update=UPDATE, device_stream=None, algorithm=ALGORITHM):
    """Returns an updater with new networks."""
    device_stream = device_stream or DeviceStream(CPU)
    with device_stream.exclusive():
        learner = ApexLearner(algorithm, NETWORK, update, spec, device_stream.device)
    return Updater(learner, device_stream)


def parameters_of(updater, spec, run=""):
    """Returns the parameters of an updater as they reach an actor."""
    tensors, _ = updater.parameters()
    header = ParametersHeader(updater.num_updates, *identity_of(spec), run)
    return decode_parameters(encode_parameters(header, tensors))


def exact_parameters_of(updater, spec):
    return Parameters(ParametersHeader(updater.num_updates, *identity_of(spec)), updater.parameters()[0])


def want(batch_size=16, view=VIEW, table=TABLE):
    return Want(table, batch_size, view)


def hold(store, number, unroll):
    """Stores an unroll."""
    store.commit(store.begin(number), unroll)


def draw_of(store, keys, weights):
    """Returns a draw of one table, gathered."""
    return Draw(store.generation, {TABLE: store.gather(TABLE, keys, weights)})


def results(pending):
    """Returns the priorities of the only table, and the metrics."""
    priorities, metrics = pending.result()
    return priorities[TABLE], metrics


def train(env: str, num_updates: int, seed: int) -> tuple[Updater, list[Draw]]:
    """Acts and learns at a fixed ratio; returns the updater and the draws that it saw."""
    torch.manual_seed(seed)
    config = EnvConfig(env=env)
    envs = make_environment(config, NUM_ENVS)
    spec = FAMILY.stream(ALGORITHM, make_spec(config, envs))
    updater = make_updater(spec)
    actor = ApexActor(ALGORITHM, parameters_of(updater, spec), CPU)
    replay = Replay(ReplayConfig(1000, 64, 2.0, tables=(f"{TABLE}=priority",)), new_identity(spec), seed)
    replay.set_batch_sizes({TABLE: UPDATE.batch_size})
    store = UnrollStore(spec, replay.ring_unrolls, [want()], CPU, 10**6)
    codec = UnrollCodec(spec)
    rng = np.random.default_rng(seed)
    exploration = actor.explore(np.arange(NUM_ENVS), NUM_ENVS)
    frames, state = envs.reset(seed=seed), actor.initial_state(NUM_ENVS)
    seen = Observation(frames, np.ones(NUM_ENVS, bool), np.zeros(NUM_ENVS, np.float32))
    builder = UnrollBuilder(spec, frames)
    draws = []
    while updater.num_updates < num_updates:
        actions, extras, state = actor.act(seen, exploration, state, rng)
        complete = builder.observe(extras)
        if complete is not None:
            valid = valid_starts(complete[0].starts, spec.unroll_starts)
            priorities = np.where(valid, actor.priorities(*complete), 0).astype(np.float32)
            for e in range(NUM_ENVS):
                block = codec.encode(complete[0].stream(e))
                entry = LogEntry(b"", block, int(valid[:, e].sum()), 0.0)
                number = replay.insert([entry], priorities[None, :, e], valid[None, :, e])
                hold(store, number, codec.decode(block))
        while not replay.why_no_sample(TABLE, UPDATE.batch_size) and updater.num_updates < num_updates:
            sample = replay.sample(TABLE, UPDATE.batch_size)
            draws.append(draw_of(store, sample.keys, sample.weights))
            new_priorities, _ = results(updater.update(draws[-1]))
            replay.tables[TABLE].update_priorities(sample.keys, new_priorities)
            if updater.num_updates % 5 == 0:
                actor.load(parameters_of(updater, spec))
        step = take_step(envs, actions)
        builder.add(actions, step)
        seen = Observation(step.frames, step.starts, step.rewards)
    envs.close()
    return updater, draws
