"""Casts that change no number."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apexrl.casts import exactly

DTYPES = ("bool", "uint8", "int8", "uint16", "int32", "int64", "uint64", "float16", "float32", "float64")
NUMBERS = (0, 1, 2, -1, 127, 128, 255, 256, 2**24, 2**24 + 1, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, 0.5, -0.7,
           6e4, 1e5, float("nan"), float("inf"))  # fmt: skip


def is_kept(value, cast, target):
    """Whether a cast kept a number, by Python's own arithmetic."""
    if isinstance(value, float) and np.dtype(target).kind == "f":
        return True
    return value == cast


@settings(deadline=None)
@given(st.sampled_from(NUMBERS), st.sampled_from(DTYPES), st.sampled_from(DTYPES))
def test_a_number_is_kept_or_refused(number, source, target):
    with np.errstate(all="ignore"):
        value = np.array([number]).astype(source)
        expected = value.astype(target)
    if is_kept(value.item(), expected.item(), target):
        found = exactly(value, target)
        assert found.dtype == target and np.array_equal(found, expected, equal_nan=np.dtype(target).kind == "f")
    else:
        with pytest.raises(ValueError, match="are needed"):
            exactly(value, target)


def test_an_array_of_the_type_is_not_copied():
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    assert exactly(array, "int32") is array and exactly(array, "int32", (2, 3)) is array


def test_the_first_number_that_would_change_is_named():
    with pytest.raises(ValueError, match=r"300 at 1, 0, where whole numbers from 0 to 255 are needed"):
        exactly([[1, 2], [300, -1]], np.uint8)


@pytest.mark.parametrize("values", [None, "1", [1j], ["a"], np.array(["2020-01-01"], "M8[D]"), [{}]])
def test_what_is_no_number_is_refused(values):
    for dtype in ("uint8", "float32"):
        with pytest.raises(ValueError, match="where numbers are needed"):
            exactly(values, dtype)


@pytest.mark.parametrize(("given", "wanted"), [((3,), (3, 1)), ((1, 3), (3,)), ((), (1,)), ((2, 1, 3), (2, 3))])
def test_dimensions_of_one_may_come_and_go(given, wanted):
    assert exactly(np.ones(given), "float32", wanted).shape == wanted


@pytest.mark.parametrize(
    ("given", "wanted"), [((3, 2), (2, 3)), ((6,), (2, 3)), ((1,), (3,)), ((), (2,)), ((2, 3), (3,))]
)
def test_other_shapes_are_refused(given, wanted):
    with pytest.raises(ValueError, match="the shape"):
        exactly(np.ones(given), "float32", wanted)
