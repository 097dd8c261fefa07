import numpy as np
import pytest
import torch

from apexrl.agents.contract import Transitions
from apexrl.config.sections import EnvConfig
from apexrl.environments.vector import make_environment
from apexrl.learning.experience.draw import SampledKeys, fill
from apexrl.learning.experience.sizes import bytes_needed
from apexrl.learning.experience.unroll_store import UnrollStore
from apexrl.losses.windows import n_step_windows, valid_starts
from apexrl.types import StreamSpec
from apexrl.unroll import UnrollCodec
from tests.fake_graph import FakeDeviceStream
from tests.lockstep import CPU, TABLE, hold, want
from tests.networks.test_device_stream import SlowDeviceStream
from tests.streams import record, slow_screens, slow_transition

GAMMA = 0.97


def make_store(spec, ring_unrolls, device_stream=None, num_batches=4, n_steps=None):
    """A store of transitions whose batches have as many rows as keys."""
    view = Transitions(spec.overlap_steps if n_steps is None else n_steps, GAMMA)
    return UnrollStore(spec, ring_unrolls, [want(1, view)], CPU, num_batches, device_stream)


def gather(store, keys, weights):
    return store.gather(TABLE, keys, weights).batch


@pytest.mark.parametrize(
    ("env", "frames"),
    [("BreakoutNoFrameskip-v4", 3000), ("PongNoFrameskip-v4", 1000), ("Catch-v0", 1000), ("CartPole-v1", 1000)],
)
def test_gathered_transitions_equal_the_stream_pixel_for_pixel(env, frames):
    config = EnvConfig(env=env, max_episode_frames=frames)
    num_envs, num_steps = 2, 700
    envs = make_environment(config, num_envs)
    spec = envs.spec.streamed(unroll_starts=16, overlap_steps=3)
    streams, unrolls = record(envs, num_envs, num_steps, spec, seed=1)
    envs.close()
    assert any(step.is_reset for step in streams[0])
    assert any(step.ends and not step.terminated for step in streams[0]) == (env == "PongNoFrameskip-v4")
    store = make_store(spec, 2 * len(unrolls))
    codec = UnrollCodec(spec)
    num_valid = 0
    for i, both in enumerate(unrolls):
        for e in range(num_envs):
            number = 2 * i + e
            unroll = codec.decode(codec.encode(both.stream(e)))
            hold(store, number, unroll)
            offsets = np.flatnonzero(valid_starts(unroll.starts, 16))
            batch = gather(store, number * 16 + offsets, np.ones(len(offsets), np.float32))
            expected_valid = [k for k in range(16) if not streams[e][16 * i + k].is_reset]
            assert offsets.tolist() == expected_valid
            num_valid += len(offsets)
            observations, nexts = slow_screens(batch.observation), slow_screens(batch.next_observation)
            for row, k in enumerate(offsets):
                step = streams[e][16 * i + k]
                total, discount, end = slow_transition(streams[e], 16 * i + k, GAMMA, 3)
                assert np.array_equal(observations[row], step.observation)
                assert batch.action[row] == step.action
                assert batch.n_step_return[row] == pytest.approx(total, abs=1e-6)
                assert batch.discount[row] == pytest.approx(discount, abs=1e-6)
                if discount:
                    assert np.array_equal(nexts[row], end)
    assert num_valid > 1000


def test_a_later_unroll_takes_the_place_of_the_oldest(spec, make_unroll):
    store = make_store(spec, 3)
    unrolls = [make_unroll(spec, seed) for seed in range(5)]
    for number, unroll in enumerate(unrolls):
        hold(store, number, unroll)
    assert store.holds(TABLE, np.arange(5 * 8)).tolist() == [False] * 16 + [True] * 24
    with pytest.raises(KeyError, match="keys \\[15\\]"):
        gather(store, np.array([15, 16]), np.ones(2, np.float32))
    batch = gather(store, np.array([4 * 8 + 5]), np.ones(1, np.float32))
    assert np.array_equal(batch.observation[0], unrolls[4].frames[5:8])
    returns, _, _ = n_step_windows(unrolls[4].rewards, unrolls[4].discounts, unrolls[4].starts, GAMMA, 2)
    assert batch.n_step_return[0] == returns[5]


def test_bytes_needed_is_what_is_allocated(spec):
    store = make_store(spec, 100)
    assert store.num_bytes == pytest.approx(bytes_needed(spec, 100, [want(1, Transitions(2, GAMMA))]), rel=0.01)


def test_a_million_atari_transitions_take_at_most_7_8_gb():
    spec = StreamSpec("Atari-v0", (84, 84), "uint8", 4, 18, 4, unroll_starts=80, overlap_steps=3)
    assert bytes_needed(spec, 10**6 // 80, [want()]) <= 7.8e9


@pytest.mark.parametrize("frame_shape", [(2,), (7,), (3, 5), ()])
@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_frames_of_any_size_are_kept(make_unroll, frame_shape, dtype):
    spec = StreamSpec("Known-v0", frame_shape, dtype, 3, 4, 1, unroll_starts=8, overlap_steps=2)
    store = make_store(spec, 2)
    unroll = make_unroll(spec, 1)
    hold(store, 1, unroll)
    batch = gather(store, np.array([8 + 5]), np.ones(1, np.float32))
    assert np.array_equal(batch.observation[0], unroll.frames[5:8])
    assert np.array_equal(batch.next_observation[0], unroll.frames[7:10])


def staged(spec, ring_unrolls):
    """A store that does what it does on a GPU: unrolls go through staging, batches stay keys."""
    device_stream = FakeDeviceStream()
    device_stream.event = SlowDeviceStream().event
    return make_store(spec, ring_unrolls, device_stream)


def test_staged_unrolls_arrive_like_direct_ones(spec, make_unroll):
    there, here = staged(spec, 12), make_store(spec, 12)
    codec = UnrollCodec(spec)
    for number in range(30):  # more than there are pieces, and more than the ring holds
        block = codec.encode(make_unroll(spec, number))
        for store in (there, here):
            slot = store.begin(number)
            assert not store.holds(TABLE, np.array([number * 8]))[0]
            store.commit(slot, codec.decode(block, slot.frames if number % 3 else None))
    keys = np.arange(18 * 8, 30 * 8)
    weights = np.linspace(0, 1, len(keys), dtype=np.float32)
    for found, expected in zip(gather(there, keys, weights), gather(here, keys, weights), strict=True):
        assert np.array_equal(found, expected)


def test_an_unroll_that_was_not_decoded_leaves_nothing_behind(spec, make_unroll):
    for store in (staged(spec, 4), make_store(spec, 4)):
        hold(store, 0, make_unroll(spec, 0))
        store.begin(4).frames[:] = 7  # and then its block turned out to be broken
        hold(store, 5, make_unroll(spec, 5))
        assert store.holds(TABLE, np.array([0, 32, 40])).tolist() == [False, False, True]
        batch = gather(store, np.array([40]), np.ones(1, np.float32))
        assert np.array_equal(batch.observation[0], make_unroll(spec, 5).frames[:3])


def test_where_frames_lie_on_a_gpu_a_batch_stays_keys(spec, make_unroll):
    store = staged(spec, 4)
    hold(store, 0, make_unroll(spec, 0))
    keys = np.array([3, 9])
    batch = store.sample(TABLE, keys, np.ones(2, np.float32))
    assert isinstance(batch, SampledKeys) and batch.held().tolist() == [True, False]
    store.clear(1)
    hold(store, 0, make_unroll(spec, 1))
    assert not batch.held().any()  # another log's unroll has the number now


def test_what_was_never_written_is_gathered_from_inside_the_ring(spec):
    """A captured update is tried out before there is anything to learn from."""
    store = make_store(spec, 4)
    batch = store.batch(TABLE, torch.tensor([0, 31, 10**9]), torch.ones(3))
    assert batch.observation.shape == (3, 3, 2) and not batch.action.any()


@pytest.mark.parametrize(("count", "times"), [(1, [8]), (3, [3, 3, 2]), (7, [2, 1, 1, 1, 1, 1, 1]), (8, [1] * 8)])
def test_rows_that_only_fill_a_batch_repeat_all_keys_in_turn(count, times):
    keys, weights = np.empty(8, np.int64), np.empty(8, np.float32)
    fill(keys, weights, np.arange(10, 10 + count), np.linspace(1, 2, count, dtype=np.float32))
    assert keys[:count].tolist() == [*range(10, 10 + count)] and np.bincount(keys - 10).tolist() == times
    assert weights[:count] == pytest.approx(np.linspace(1, 2, count) * 8 / count) and not weights[count:].any()
