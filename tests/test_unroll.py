import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from apexrl.errors import WireError
from apexrl.losses.windows import n_step_windows, valid_starts
from apexrl.unroll import LARGEST_VALUE, UnrollCodec
from tests.fields import slow_block


def windows_of(rewards, terminated=(), truncated=(), gamma=0.9, n=3):
    """Windows of one stream in which the step after an end is the reset."""
    steps = len(rewards)
    discounts = np.ones(steps, np.float32)
    discounts[list(terminated)] = 0
    starts = np.zeros(steps + 1, bool)
    for end in (*terminated, *truncated):
        if end + 2 <= steps:
            starts[end + 2] = True
    rewards = np.asarray(rewards, np.float32)
    return (*n_step_windows(rewards, discounts, starts, gamma, n), valid_starts(starts, steps - n))


def test_return_of_ones_has_three_rewards():
    returns, discounts, offsets, valid = windows_of([1] * 8)
    assert np.allclose(returns, 2.71)
    assert np.allclose(discounts, 0.9**3)
    assert (offsets == 3).all() and valid.all()


@pytest.mark.parametrize("kind", ["terminated", "truncated"])
@pytest.mark.parametrize("length", [1, 2, 3, 6])
def test_an_episode_gives_as_many_transitions_as_it_has_steps(length, kind):
    steps = length + 8
    returns, discounts, offsets, valid = windows_of([1] * steps, **{kind: [length - 1]})
    assert valid[:length].all() and not valid[length]  # the step after the end is the reset
    for start in range(length):
        left = min(3, length - start)
        assert offsets[start] == left
        assert returns[start] == pytest.approx(sum(0.9**i for i in range(left)))
        ended = start + left == length and kind == "terminated"
        assert discounts[start] == pytest.approx(0.0 if ended else 0.9**left)


def test_a_lost_life_ends_the_window_but_the_next_step_is_no_reset():
    rewards = np.ones(8, np.float32)
    discounts = np.ones(8, np.float32)
    discounts[2] = 0
    starts = np.zeros(9, bool)
    returns, bootstrap, _ = n_step_windows(rewards, discounts, starts, 0.9, 3)
    assert returns[:3] == pytest.approx([2.71, 1.9, 1.0])
    assert bootstrap[:3] == pytest.approx([0, 0, 0])
    assert returns[3] == pytest.approx(2.71)
    assert valid_starts(starts, 5).all()


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_windows_equal_the_slow_twin(data):
    n = data.draw(st.integers(1, 5))
    starts_count = data.draw(st.integers(1, 12))
    steps = starts_count + n
    rewards = np.array(data.draw(st.lists(st.floats(-9, 9, width=32), min_size=steps, max_size=steps)), np.float32)
    kinds = data.draw(
        st.lists(st.sampled_from(["on", "on", "on", "life", "term", "trunc"]), min_size=steps, max_size=steps)
    )
    discounts, starts, reset = np.ones(steps, np.float32), np.zeros(steps + 1, bool), False
    for t, kind in enumerate(kinds):
        starts[t + 1], reset = reset, False
        if starts[t + 1]:
            kinds[t], rewards[t] = "reset", 0
        elif kind in ("life", "term"):
            discounts[t] = 0
        reset = kind in ("term", "trunc")
    returns, bootstrap, offsets = n_step_windows(rewards, discounts, starts, 0.97, n)
    tensors = n_step_windows(*map(torch.from_numpy, (rewards, discounts, starts)), 0.97, n)
    for found, expected in zip(tensors, (returns, bootstrap, offsets), strict=True):
        np.testing.assert_array_equal(found.numpy(), expected)
    for s in range(starts_count):
        if kinds[s] == "reset":
            continue
        total, discount, used = 0.0, 1.0, 0
        for t in range(s, s + n):
            total += discount * rewards[t]
            discount *= 0.97 * discounts[t]
            used += 1
            if kinds[t] in ("life", "term", "trunc"):
                break
        assert returns[s] == pytest.approx(total, rel=1e-5, abs=1e-5)
        assert bootstrap[s] == pytest.approx(discount, rel=1e-5)
        assert offsets[s] == used


def test_codec_round_trip(spec, make_unroll):
    unroll = make_unroll(spec)
    back = UnrollCodec(spec).decode(UnrollCodec(spec).encode(unroll))
    for sent, received in zip(unroll[:5], back[:5], strict=True):
        assert sent.dtype == received.dtype and np.array_equal(sent, received)
    assert back.extras == {}


def test_codec_refuses_a_bomb_before_it_decompresses(spec):
    bomb = zstandard.ZstdCompressor().compress(bytes(2**28))
    assert len(bomb) < 2**15
    with pytest.raises(WireError, match="this block says 268435456"):
        UnrollCodec(spec).decode(bomb)


def test_codec_refuses_damage(spec, make_unroll):
    codec = UnrollCodec(spec)
    block = codec.encode(make_unroll(spec))
    for damaged in (b"", block[:-3], b"x" + block, bytes(len(block))):
        with pytest.raises(WireError):
            codec.decode(damaged)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("actions", 4, "action outside 0..3"),
        ("actions", -1, "action outside 0..3"),
        *(
            (name, value, name[:-1])
            for name in ("frames", "rewards")
            for value in (np.nan, np.inf, -np.inf, 3e38, -2e12)
        ),
        *(("discounts", value, "discount outside 0..1") for value in (np.nan, np.inf, -0.01, 1.01, 3e38)),
    ],
)
def test_codec_refuses_content_that_cannot_be(spec, make_unroll, name, value, message):
    unroll = make_unroll(spec)
    good = UnrollCodec(spec).encode(unroll)
    getattr(unroll, name).flat[3] = value
    with pytest.raises(WireError, match=message):  # an actor hears of it before it sends
        UnrollCodec(spec).encode(unroll)
    with pytest.raises(WireError, match=message):
        UnrollCodec(spec).decode(compressed(spec, unroll))
    assert UnrollCodec(spec).decode(good).rewards.any()


def compressed(spec, unroll):
    """Compresses an unroll as a peer would that checks nothing."""
    return zstandard.ZstdCompressor().compress(slow_block(spec, unroll))


def test_no_window_of_content_that_is_taken_overflows(spec, make_unroll):
    unroll = make_unroll(spec)
    unroll.rewards[:] = LARGEST_VALUE
    unroll = UnrollCodec(spec).decode(UnrollCodec(spec).encode(unroll))
    returns, _, _ = n_step_windows(unroll.rewards, unroll.discounts, unroll.starts, 1.0, spec.overlap_steps)
    assert np.isfinite(returns * returns).all()
