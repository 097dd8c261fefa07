"""Arguments that callers give to the clients are checked before anything is sent."""

import pytest

from apexrl.net.arguments import checked_update


@pytest.mark.parametrize("priority", [float("nan"), [float("nan")], -1.0, [float("inf")]])
def test_a_priority_that_is_none_is_named_with_its_key(priority):
    with pytest.raises(ValueError, match=r"priority (nan|-1\.0|inf) of key 3, where finite float32 numbers from 0"):
        checked_update([3], priority)
