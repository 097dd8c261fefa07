"""Batches of transitions beside a slow twin, which looks every number up in the unrolls."""

import numpy as np
import pytest
import torch

from apexrl.agents.contract import Transitions, Unrolls
from apexrl.errors import ConfigError
from apexrl.learning.experience.unroll_store import UnrollStore
from apexrl.losses.windows import n_step_windows
from apexrl.networks.frame_layout import FrameLayout
from apexrl.types import StreamSpec, Unroll
from tests.lockstep import CPU, hold, want
from tests.operations import Counted

K, RING = 8, 5
VIEW = Transitions(3, 0.97)
LIMITS = ((-1.0, 1.0), (0.0, 2.0))
SPECS = {
    "screens": StreamSpec("Screens-v0", (36, 40), "uint8", 4, 6, 4, unroll_starts=K, overlap_steps=3),
    "vectors": StreamSpec("Vectors-v0", (3,), "float32", 1, 2, 1, unroll_starts=K, overlap_steps=4),
    "bytes": StreamSpec("Bytes-v0", (7,), "uint8", 2, 3, 1, unroll_starts=K, overlap_steps=3),
    "continuous": StreamSpec("Box-v0", (2,), "float32", 3, 0, 1, LIMITS, unroll_starts=K, overlap_steps=3),
}


def random_unroll(spec, seed):
    """An unroll in which episodes begin and terminate anywhere."""
    rng = np.random.default_rng(seed)
    frames = rng.integers(1, 256, (spec.unroll_frames, *spec.frame_shape)).astype(spec.frame_dtype)
    steps = spec.unroll_steps
    actions = rng.integers(0, 2, (steps, *spec.action.shape)).astype(spec.action.dtype)
    rewards = rng.normal(size=steps).astype(np.float32)
    discounts = rng.choice([0.0, 1.0], steps, p=[0.1, 0.9]).astype(np.float32)
    return Unroll(frames, actions, rewards, discounts, rng.random(steps + 1) < 0.2)


@pytest.fixture(params=SPECS)
def world(request):
    """A spec, a store that holds the newest unrolls of more, and those unrolls by number."""
    spec = SPECS[request.param]
    store = UnrollStore(spec, RING, [want(1, VIEW), want(2, Unrolls(), "unrolls")], CPU, 2)
    unrolls = {number: random_unroll(spec, number) for number in range(2 * RING + 2)}
    for number, unroll in unrolls.items():
        hold(store, number, unroll)
    held = range(len(unrolls) - RING, len(unrolls))
    return spec, store, {number: unrolls[number] for number in held}


def slow_stack(unroll, t, stacked):
    """The frames [H, *frame] that the observation of a step shows."""
    stack = np.zeros((stacked, *unroll.frames.shape[1:]), unroll.frames.dtype)
    for back in range(stacked):
        if not unroll.starts[max(t - back + 1, 0) : t + 1].any():
            stack[stacked - 1 - back] = unroll.frames[t + stacked - 1 - back]
    return stack


def slow_batch(spec, unrolls, keys):
    """The six tensors of a batch, a row at a time."""
    rows = []
    for key in keys:
        unroll, start = unrolls[key // K], key % K
        returns, discounts, offsets = n_step_windows(
            unroll.rewards, unroll.discounts, unroll.starts, VIEW.gamma, VIEW.n_steps
        )
        left, right = (slow_stack(unroll, t, spec.stacked_frames) for t in (start, start + offsets[start]))
        rows.append((left, unroll.actions[start], returns[start], discounts[start], right))
    left, action, returns, discounts, right = (torch.from_numpy(np.stack(column)) for column in zip(*rows, strict=True))
    layout = FrameLayout.of(spec)
    action = action.long() if spec.num_actions else action
    return layout.store_stacks(left), action, returns, discounts, layout.store_stacks(right)


def test_batches_are_those_of_the_slow_twin_to_the_bit(world):
    spec, store, unrolls = world
    first = min(unrolls) * K
    keys = np.random.default_rng(1).permutation(np.arange(first, first + RING * K))
    weights = np.linspace(0, 1, len(keys), dtype=np.float32)
    *found, weight = store.gather("transitions", keys, weights).batch
    for own, other in zip(found, slow_batch(spec, unrolls, keys), strict=True):
        assert own.dtype == other.dtype and torch.equal(own, other)
    assert torch.equal(weight, torch.from_numpy(weights))


def test_whole_unrolls_lie_beside_the_records(world):
    spec, store, unrolls = world
    numbers = np.array(sorted(unrolls)[1:3])
    batch = store.gather("unrolls", numbers, np.ones(2, np.float32)).batch
    for row, number in enumerate(numbers):
        assert np.array_equal(batch.reward[:, row], unrolls[number].rewards)
        assert np.array_equal(batch.action[:, row], unrolls[number].actions)
        stacks = np.stack([slow_stack(unrolls[number], t, spec.stacked_frames) for t in range(spec.unroll_steps + 1)])
        stored = FrameLayout.of(spec).store_stacks(torch.from_numpy(stacks))
        assert torch.equal(batch.observation[:, row], stored)


def test_a_batch_of_transitions_is_three_lookups():
    """The key's place, the record, the frames: further lookups would be read by a GPU one after the other."""
    spec = SPECS["screens"]
    store = UnrollStore(spec, RING, [want(1, VIEW)], CPU, 2)
    keys, weights = torch.arange(32), torch.ones(32)
    with Counted() as counted:
        store.batch("transitions", keys, weights)
    assert counted.names["aten.index_select.default"] == 2 and counted.names["aten.remainder.Scalar"] == 1
    assert not any("aten.index." in name for name in counted.names)


@pytest.mark.parametrize("views", [[Transitions(5, 0.9)], [Transitions(1, 0.9), Transitions(2, 0.9)]])
def test_transitions_that_unrolls_do_not_hold_are_refused(views):
    with pytest.raises(ConfigError, match="do not fit unrolls that overlap by 3, or differ"):
        UnrollStore(SPECS["screens"], RING, [want(1, view, f"table-{view.n_steps}") for view in views], CPU, 2)
