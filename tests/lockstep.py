"""The real parts of a run in one process and one thread, one after the other: no timing decides anything."""

import numpy as np
import torch

from apexrl.agents.apex_dqn import ApexActor, ApexLearner
from apexrl.agents.exploration import epsilon_ladder
from apexrl.config import SMALL, AgentConfig, EnvConfig, NetworkConfig, ReplayConfig, UpdateConfig
from apexrl.environments.vector import make_environment, make_spec, take_step
from apexrl.flags import with_defaults
from apexrl.learning.unroll_store import FrameStore, TransitionBatch
from apexrl.networks.parameters import decode_parameters, encode_parameters
from apexrl.replay.journal import new_identity
from apexrl.replay.log import Record
from apexrl.replay.replay import Replay
from apexrl.types import Unroll
from apexrl.unroll import UnrollBuilder, UnrollCodec

AGENT = AgentConfig(unroll_starts=8)
UPDATE = with_defaults(UpdateConfig(), SMALL | {"batch_size": 16, "target_period_updates": 20})
NETWORK = NetworkConfig(channels=(4, 4, 4), hidden_size=16)
NUM_ENVS = 4
TABLE = "transitions"


def train(env: str, num_updates: int, seed: int) -> tuple[ApexLearner, list[TransitionBatch]]:
    """Acts and learns at a fixed ratio; returns the learner and the batches that it saw."""
    torch.manual_seed(seed)
    config = EnvConfig(env=env)
    envs = make_environment(config, NUM_ENVS)
    spec = make_spec(config, envs, AGENT.unroll_starts, AGENT.n_steps)
    learner = ApexLearner(AGENT, UPDATE, NETWORK, spec, torch.device("cpu"))
    actor = ApexActor(AGENT, decode_parameters(encode_parameters(*learner.parameters())), torch.device("cpu"))
    replay = Replay(ReplayConfig(1000, 64, 2.0), new_identity(spec), seed)
    replay.set_batch_sizes({TABLE: UPDATE.batch_size})
    store = FrameStore(spec, replay.ring_unrolls, AGENT.gamma, torch.device("cpu"), 10**6)
    codec = UnrollCodec(spec)
    rng = np.random.default_rng(seed)
    epsilons = epsilon_ladder(np.arange(NUM_ENVS), NUM_ENVS)
    frames, starts, state = envs.reset(seed=seed), np.ones(NUM_ENVS, bool), actor.initial_state(NUM_ENVS)
    builder = UnrollBuilder(spec, frames)
    batches = []
    while learner.num_updates < num_updates:
        actions, extras = actor.act(frames, starts, epsilons, state, rng)
        complete = builder.observe(extras)
        if complete is not None:
            priorities = actor.priorities(*complete)
            for e in range(NUM_ENVS):
                block = codec.encode(Unroll(*(array[:, e] for array in complete[0])))
                record = Record(b"", block, int((priorities[:, e] > 0).sum()), 0.0)
                number = replay.insert([record], priorities[None, :, e])
                store.apply(number, codec.decode(block))
        while not replay.why_no_sample(TABLE, UPDATE.batch_size) and learner.num_updates < num_updates:
            sample = replay.sample(TABLE, UPDATE.batch_size)
            batches.append(store.gather(sample.keys, sample.weights))
            new_priorities, _ = learner.update(batches[-1]).result()
            replay.tables[TABLE].update_priorities(sample.keys, new_priorities)
            if learner.num_updates % 5 == 0:
                actor.load(decode_parameters(encode_parameters(*learner.parameters())))
        seen = take_step(envs, actions)
        builder.add(actions, seen)
        frames, starts = seen.frames, seen.starts
    envs.close()
    return learner, batches
