"""Sets of whole numbers as sorted arrays, beside numpy's own."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apexrl.sets import are_in, distinct

NUMBERS = st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 3), max_size=30)


@settings(deadline=None)
@given(NUMBERS, NUMBERS)
def test_they_are_those_of_numpy(one, other):
    one, other = np.array(one, np.int64), np.array(other, np.int64)
    held = distinct(other)
    assert held.dtype == np.int64 and held.tolist() == np.unique(other).tolist()
    assert are_in(one, held).tolist() == np.isin(one, other).tolist()


@pytest.mark.parametrize("numbers", [[], [7], [2**62, 0, 2**62]])
def test_what_is_given_stays_as_it_is(numbers):
    given = np.array(numbers, np.int64)
    distinct(given)
    assert given.tolist() == numbers
