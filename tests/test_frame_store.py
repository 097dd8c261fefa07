import numpy as np
import pytest
import torch

from apexrl.config import EnvConfig
from apexrl.envs import make_environment, make_spec
from apexrl.frame_store import FrameStore
from apexrl.types import Unroll
from apexrl.unroll import UnrollCodec, n_step_windows, valid_starts
from tests.streams import record, slow_transition

GAMMA = 0.97


@pytest.mark.parametrize(
    ("env", "frames"),
    [("BreakoutNoFrameskip-v4", 3000), ("PongNoFrameskip-v4", 1000), ("Catch-v0", 1000), ("CartPole-v1", 1000)],
)
def test_gathered_transitions_equal_the_stream_pixel_for_pixel(env, frames):
    config = EnvConfig(env=env, max_episode_frames=frames)
    num_envs, num_steps = 2, 700
    envs = make_environment(config, num_envs)
    spec = make_spec(config, envs, unroll_starts=16, n_steps=3)
    streams, unrolls = record(envs, num_envs, num_steps, spec, seed=1)
    envs.close()
    assert any(step.is_reset for step in streams[0])
    assert any(step.ends and not step.terminated for step in streams[0]) == (env == "PongNoFrameskip-v4")
    store = FrameStore(spec, 2 * len(unrolls), GAMMA, torch.device("cpu"), 4)
    codec = UnrollCodec(spec)
    num_valid = 0
    for i, both in enumerate(unrolls):
        for e in range(num_envs):
            number = 2 * i + e
            unroll = codec.decode(codec.encode(Unroll(*(array[:, e] for array in both))))
            store.apply(number, unroll)
            offsets = np.flatnonzero(valid_starts(unroll.starts, 16))
            batch = store.gather(number * 16 + offsets, np.ones(len(offsets), np.float32))
            expected_valid = [k for k in range(16) if not streams[e][16 * i + k].is_reset]
            assert offsets.tolist() == expected_valid
            num_valid += len(offsets)
            for row, k in enumerate(offsets):
                step = streams[e][16 * i + k]
                total, discount, end = slow_transition(streams[e], 16 * i + k, GAMMA, 3)
                assert np.array_equal(batch.observation[row], step.observation)
                assert batch.action[row] == step.action
                assert batch.n_step_return[row] == pytest.approx(total, abs=1e-6)
                assert batch.discount[row] == pytest.approx(discount, abs=1e-6)
                if discount:
                    assert np.array_equal(batch.next_observation[row], end)
    assert num_valid > 1000


def test_a_later_unroll_takes_the_place_of_the_oldest(spec, make_unroll):
    store = FrameStore(spec, 3, GAMMA, torch.device("cpu"), 4)
    unrolls = [make_unroll(spec, seed) for seed in range(5)]
    for number, unroll in enumerate(unrolls):
        store.apply(number, unroll)
    assert store.holds(np.arange(5 * 8)).tolist() == [False] * 16 + [True] * 24
    with pytest.raises(KeyError, match="unrolls \\[1\\]"):
        store.gather(np.array([15, 16]), np.ones(2, np.float32))
    batch = store.gather(np.array([4 * 8 + 5]), np.ones(1, np.float32))
    assert np.array_equal(batch.observation[0], unrolls[4].frames[5:8])
    returns, _, _ = n_step_windows(unrolls[4].rewards, unrolls[4].discounts, unrolls[4].starts, GAMMA, 2)
    assert batch.n_step_return[0] == returns[5]


def test_bytes_needed_is_what_is_allocated(spec):
    store = FrameStore(spec, 100, GAMMA, torch.device("cpu"), 4)
    assert store.num_bytes == pytest.approx(FrameStore.bytes_needed(spec, 100), rel=0.01)
