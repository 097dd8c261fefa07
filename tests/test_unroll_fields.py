"""Fields through the builder and the codec, against slow oracles."""

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from apexrl.errors import ApexError, WireError
from apexrl.types import Field, StreamSpec, TimeSteps
from apexrl.unroll import UnrollBuilder, UnrollCodec
from tests.fields import random_array, random_unroll, slow_arrays, slow_block

EXTRAS = (
    Field("log_prob", "step", "float32"),
    Field("logits", "observation", "float16", (3,)),
    Field("state", "first", "float32", (2, 2)),
    Field("flag", "observation", "uint8"),
)
SPEC = StreamSpec("Count-v0", (1,), "float32", 1, 3, 1, unroll_starts=4, overlap_steps=2, extras=EXTRAS)

KINDS = [(at, dtype) for at in ("step", "observation", "first") for dtype in ("uint8", "int32", "float16", "float32")]


@st.composite
def specs(draw):
    """Draws specs: any mix of extras, discrete actions or vectors, any overlap."""
    kinds = draw(st.lists(st.sampled_from(KINDS), max_size=4))
    shapes = st.lists(st.integers(1, 3), max_size=2).map(tuple)
    extras = tuple(Field(f"extra-{i}", *kind, draw(shapes)) for i, kind in enumerate(kinds))
    size = draw(st.integers(0, 2))
    names = () if size else draw(st.sampled_from([(), ("left", "stay", "right")]))
    return StreamSpec(
        *("Any-v0", draw(shapes), draw(st.sampled_from(["uint8", "float32"])), draw(st.integers(1, 3))),
        num_actions=0 if size else 3,
        frames_per_step=1,
        action_bounds=((-1.0, 2.0),) * size,
        action_names=names,
        unroll_starts=draw(st.integers(1, 6)),
        overlap_steps=draw(st.integers(0, 8)),
        extras=extras,
    )


def steps_of(frames, t, num_envs):
    nothing = np.full(num_envs, np.nan), np.zeros(num_envs, int)
    return TimeSteps(frames, np.full(num_envs, t), np.ones(num_envs), np.zeros(num_envs, bool), *nothing)


def play(spec, num_envs, num_steps, seed):
    """Plays random numbers; returns what was given at each step and what the builder gave, with the step of each."""
    rng = np.random.default_rng(seed)
    builder = UnrollBuilder(spec, np.zeros((num_envs, *spec.frame_shape), spec.frame_dtype))
    seen, actions, found = [], [], []
    for t in range(num_steps):
        extras = {f.name: random_array(rng, f.dtype, (num_envs, *f.shape)) for f in spec.extras}
        extras["own"] = rng.normal(size=(num_envs, 2))
        seen.append(extras)
        complete = builder.observe(extras)
        if complete is not None:
            found.append(complete)
        actions.append(random_array(rng, spec.action.dtype, (num_envs, *spec.action.shape)))
        builder.add(actions[-1], steps_of(np.zeros((num_envs, *spec.frame_shape)), t, num_envs))
    return seen, actions, found


@settings(max_examples=150, deadline=None)
@given(specs(), st.integers(1, 3), st.integers(0, 1000))
def test_unrolls_hold_the_extras_of_their_steps(spec, num_envs, seed):
    k, steps = spec.unroll_starts, spec.unroll_steps
    seen, actions, found = play(spec, num_envs, 40, seed)
    assert len(found) == max(0, (40 - 1 - steps) // k + 1)
    for i, (unrolls, private) in enumerate(found):
        first = i * k
        assert unrolls.rewards[:, 0].tolist() == list(range(first, first + steps))
        assert np.array_equal(unrolls.actions, actions[first : first + steps])
        assert private.keys() == {"own"}
        assert np.array_equal(private["own"], [extras["own"] for extras in seen[first : first + steps + 1]])
        assert list(unrolls.extras) == [field.name for field in spec.extras]
        for field in spec.extras:
            expected = [extras[field.name] for extras in seen[first : first + spec.num_entries(field)]]
            array = unrolls.extras[field.name]
            assert array.dtype == field.dtype and np.array_equal(array, expected)
        codec = UnrollCodec(spec)
        assert np.array_equal(codec.decode(codec.encode(unrolls.stream(0))).actions, unrolls.actions[:, 0])


@settings(max_examples=300, deadline=None)
@given(specs(), st.integers(0, 1000))
def test_a_block_is_that_of_the_slow_writer(spec, seed):
    unroll = random_unroll(spec, seed)
    codec = UnrollCodec(spec)
    raw = slow_block(spec, unroll)
    assert len(raw) == spec.unroll_bytes
    block = codec.encode(unroll)
    assert zstandard.ZstdDecompressor().decompress(block) == raw
    for back in (codec.decode(block), codec.decode(zstandard.compress(raw))):
        assert slow_arrays(back).keys() == slow_arrays(unroll).keys()
        for name, array in slow_arrays(unroll).items():
            received = slow_arrays(back)[name]
            assert received.dtype == array.dtype and np.array_equal(received, array), name
            assert received.flags.aligned


def test_what_the_builder_gave_is_not_changed_later():
    _, _, found = play(SPEC, 2, 30, 0)
    _, _, fewer = play(SPEC, 2, 8, 0)
    for name, array in slow_arrays(fewer[0][0]).items():
        assert np.array_equal(array, slow_arrays(found[0][0])[name])


def extras_of(num_envs=3):
    return {field.name: np.zeros((num_envs, *field.shape), field.dtype) for field in SPEC.extras}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": None}, "gives the extras"),
        ({"logits": np.zeros((3, 2))}, "'logits' of the agent has shape"),
        ({"log_prob": np.zeros(())}, "'log_prob' of the agent has shape"),
        ({"flag": np.zeros(3, np.float32)}, "'flag' of the agent is no uint8"),
    ],
)
def test_extras_that_are_not_those_of_the_spec_are_refused(change, message):
    builder = UnrollBuilder(SPEC, np.zeros((3, 1), np.float32))
    extras = {name: values for name, values in (extras_of() | change).items() if values is not None}
    with pytest.raises(ApexError, match=message):
        builder.observe(extras)


def test_private_extras_stay_the_same():
    builder = UnrollBuilder(SPEC, np.zeros((3, 1), np.float32))
    builder.observe(extras_of() | {"own": np.zeros(3)})
    for other in ({}, {"own": np.zeros(4)}, {"own": np.zeros(3), "more": np.zeros(3)}):
        with pytest.raises(ApexError, match=r"of the agent|gives the extras"):
            builder.observe(extras_of() | other)


@pytest.mark.parametrize(("name", "value"), [("log_prob", np.nan), ("logits", np.inf), ("state", 2e12)])
def test_a_codec_refuses_extras_that_are_not_finite(name, value):
    unroll = random_unroll(SPEC, 0)
    codec = UnrollCodec(SPEC)
    unroll.extras[name].flat[1] = value
    with pytest.raises(WireError, match=f"holds a value of {name} that is not finite"):
        codec.encode(unroll)
    with pytest.raises(WireError, match=f"holds a value of {name} that is not finite"):
        codec.decode(zstandard.compress(slow_block(SPEC, unroll)))


def test_a_value_beyond_float16_is_refused_when_it_is_encoded():
    builder = UnrollBuilder(SPEC, np.zeros((3, 1), np.float32))
    large = np.full((3, 3), 1e6, np.float32)
    complete = None
    while complete is None:
        complete = builder.observe(extras_of() | {"logits": large})
        builder.add(np.zeros(3), steps_of(np.zeros((3, 1)), 0, 3)) if complete is None else None
    with pytest.raises(WireError, match="holds a value of logits that is not finite"):
        UnrollCodec(SPEC).encode(complete[0].stream(0))


def test_a_codec_refuses_arrays_that_are_not_those_of_the_spec():
    unroll = random_unroll(SPEC, 0)
    short = {name: array[:-1] for name, array in unroll.extras.items()}
    for wrong in ({"rewards": unroll.rewards[1:]}, {"frames": unroll.frames[1:]}, {"extras": {}}, {"extras": short}):
        with pytest.raises(WireError, match="not "):
            UnrollCodec(SPEC).encode(unroll._replace(**wrong))


def test_vectors_of_actions_go_through_the_codec():
    spec = msgspec.structs.replace(SPEC, num_actions=0, action_bounds=((-2.0, 2.0), (0.0, 1.0)))
    unroll = random_unroll(spec, 3)
    assert unroll.actions.shape == (6, 2)
    back = UnrollCodec(spec).decode(UnrollCodec(spec).encode(unroll))
    assert back.actions.dtype == np.float32 and np.array_equal(back.actions, unroll.actions)
    unroll.actions[2, 1] = np.nan
    with pytest.raises(WireError, match="holds a value of action that is not finite"):
        UnrollCodec(spec).encode(unroll)
