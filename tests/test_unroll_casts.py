"""Arrays of other types than the spec's, on their way into a block: the same numbers, or refused by name."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apexrl.errors import ApexError, WireError
from apexrl.types import Field, StreamSpec, TimeSteps
from apexrl.unroll import UnrollBuilder, UnrollCodec
from tests.fields import random_unroll, slow_arrays

EXTRAS = (
    Field("id", "first", "int32", (2,)),
    Field("label", "step", "uint8"),
    Field("half", "observation", "float16"),
    Field("score", "step", "float32", (2,)),
)
SPEC = StreamSpec("Any-v0", (2,), "uint8", 2, 3, 1, unroll_starts=4, overlap_steps=2, extras=EXTRAS)
VECTORS = msgspec.structs.replace(SPEC, num_actions=0, action_bounds=((-1.0, 1.0),), frame_dtype="float32")
OWN = {"frame": "frames", "action": "actions", "reward": "rewards", "discount": "discounts", "start": "starts"}


def with_values(unroll, name, values):
    """The unroll with other values in one of its arrays."""
    if name in OWN:
        return unroll._replace(**{OWN[name]: values})
    return unroll._replace(extras={**unroll.extras, name: values})


CHANGED = [
    ("frame", 0.99), ("frame", 300), ("frame", -1), ("frame", np.nan), ("frame", 1 + 0j),
    ("action", 0.7), ("action", 2**32 + 1), ("action", np.nan), ("action", 1.9),
    ("reward", 1 + 2j), ("reward", 2**24 + 1), ("reward", 2**63 - 1), ("discount", 1j),
    ("start", 256), ("start", 0.5), ("start", 2), ("start", np.nan), ("start", -1),
    ("id", 2**40 + 5), ("id", -(2**31) - 1), ("id", 1.5), ("id", np.nan), ("id", np.inf),
    ("label", 300), ("label", -1.7), ("label", 256), ("label", -1),
    ("half", 2049), ("half", 1j), ("score", 2**24 + 1), ("score", 1j),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), CHANGED)
def test_a_codec_refuses_numbers_that_it_would_change(name, value):
    unroll = random_unroll(SPEC, 0)
    values = slow_arrays(unroll)[name].astype(np.asarray(value).dtype)
    values.flat[1 % values.size] = value
    with pytest.raises(WireError, match=f"an unroll of Any-v0 has a {name} of {values.dtype} with"):
        UnrollCodec(SPEC).encode(with_values(unroll, name, values))


@pytest.mark.parametrize("values", [np.full(7, True, object), np.full(7, "1"), np.full(7, "2020", "M8[Y]")])
def test_a_codec_refuses_what_is_no_number(values):
    for name in ("start", "half"):
        with pytest.raises(WireError, match=f"has a {name} of .* where numbers are needed"):
            UnrollCodec(SPEC).encode(with_values(random_unroll(SPEC, 0), name, values))


def test_a_codec_refuses_an_extra_that_its_spec_does_not_name():
    unroll = with_values(random_unroll(SPEC, 0), "other", np.zeros(6))
    with pytest.raises(WireError, match=r"has the extras \['other'\], which its spec does not name"):
        UnrollCodec(SPEC).encode(unroll)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from([SPEC, VECTORS]),
    st.sampled_from(["int64", "uint16", "float32", "float64", ">i4", ">f8"]),
    st.integers(0, 99),
)
def test_a_codec_keeps_the_same_numbers_of_another_type(spec, dtype, seed):
    """Zeros and ones, which every type has."""
    unroll, codec = random_unroll(spec, seed), UnrollCodec(spec)
    arrays = {name: (array > 0).astype(array.dtype) for name, array in slow_arrays(unroll).items()}
    plain, other = unroll, unroll
    for name, array in arrays.items():
        plain, other = with_values(plain, name, array), with_values(other, name, array.astype(dtype))
    assert codec.encode(plain) == codec.encode(other)


def test_floats_are_rounded_to_the_precision_of_their_field():
    unroll = random_unroll(VECTORS, 0)
    precise = unroll._replace(rewards=np.full(6, 0.1), frames=np.full(unroll.frames.shape, 1 / 3))
    back = UnrollCodec(VECTORS).decode(UnrollCodec(VECTORS).encode(precise))
    assert (back.rewards == np.float32(0.1)).all() and (back.frames == np.float32(1 / 3)).all()


@pytest.mark.parametrize(("name", "value"), [("frame", 1e39), ("reward", -1e39), ("half", 1e5), ("score", 1e300)])
def test_a_float_that_overflows_is_not_finite(name, value):
    unroll = random_unroll(VECTORS, 0)
    values = slow_arrays(unroll)[name].astype(np.float64)
    values.flat[1] = value
    with pytest.raises(WireError, match=f"holds a value of {name} that is not finite"):
        UnrollCodec(VECTORS).encode(with_values(unroll, name, values))


def step_of(spec, num_envs=3, **values):
    """A step of zeros, with other values of some names; and its actions."""
    shapes = {"frame": spec.frame_shape, "action": spec.action.shape}
    arrays = {name: np.zeros((num_envs, *shapes.get(name, ()))) for name in OWN} | values
    nothing = np.full(num_envs, np.nan), np.zeros(num_envs, int)
    return arrays["action"], TimeSteps(*(arrays[name] for name in ("frame", "reward", "discount", "start")), *nothing)


def extras_of(num_envs=3, **values):
    return {field.name: np.zeros((num_envs, *field.shape), field.dtype) for field in EXTRAS} | values


def builder_of(spec, num_envs=3):
    builder = UnrollBuilder(spec, np.zeros((num_envs, *spec.frame_shape), spec.frame_dtype))
    builder.observe(extras_of(num_envs))
    return builder


@pytest.mark.parametrize(("name", "value"), [pair for pair in CHANGED if pair[0] in OWN])
def test_a_builder_refuses_numbers_that_it_would_change(name, value):
    values = np.zeros((3, 2) if name == "frame" else 3, np.asarray(value).dtype)
    values.flat[1] = value
    builder = builder_of(SPEC)
    with pytest.raises(ApexError, match=f"a step has a {name} of"):
        builder.add(*step_of(SPEC, **{name: values}))
    builder.add(*step_of(SPEC))


@pytest.mark.parametrize(("name", "value"), [pair for pair in CHANGED if pair[0] not in OWN])
def test_a_builder_refuses_extras_that_it_would_change(name, value):
    values = extras_of()[name].astype(np.asarray(value).dtype)
    values.flat[1] = value
    builder = UnrollBuilder(SPEC, np.zeros((3, 2), np.uint8))
    with pytest.raises(ApexError, match=f"extra '{name}'"):
        builder.observe(extras_of(**{name: values}))


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("shape", [(), (1,), (2,), (4,), (3, 2, 2)])
def test_a_builder_refuses_shapes_that_would_be_repeated(name, shape):
    builder = builder_of(SPEC)
    with pytest.raises(ApexError, match=f"a step has a {name} of the shape"):
        builder.add(*step_of(SPEC, **{name: np.zeros(shape)}))
    with pytest.raises(ApexError, match="a step has a frame of the shape"):
        UnrollBuilder(SPEC, np.zeros(2, np.uint8))


def test_a_private_extra_keeps_its_numbers():
    builder = UnrollBuilder(SPEC, np.zeros((3, 2), np.uint8))
    builder.observe(extras_of(own=np.zeros(3, np.int32)))
    for values in (np.full(3, 2**40), np.full(3, 0.5)):
        with pytest.raises(ApexError, match="extra 'own'"):
            builder.observe(extras_of(own=values))


def test_a_builder_takes_the_same_numbers_of_another_type():
    builder = builder_of(SPEC)
    values = {"frame": np.array([[1, 255]] * 3), "action": np.array([0.0, 1.0, 2.0]), "reward": np.array([1, -2, 3])}
    builder.add(*step_of(SPEC, **values, start=np.array([1, 0, 1])))
    for _ in range(5):
        builder.observe(extras_of())
        builder.add(*step_of(SPEC))
    unrolls, _ = builder.observe(extras_of())
    assert unrolls.frames[2].tolist() == values["frame"].tolist() and unrolls.actions[0].tolist() == [0, 1, 2]
    assert unrolls.rewards[0].tolist() == [1, -2, 3] and unrolls.starts[1].tolist() == [True, False, True]
