"""Keys of an earlier log, which a reader may still hold."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from apexrl.net import handed_keys
from apexrl.net.handed_keys import HandedKeys

KEYS = st.lists(st.integers(0, 12), min_size=1, max_size=5)


@settings(deadline=None)
@given(st.lists(st.none() | KEYS, max_size=12))
def test_they_are_old_until_the_new_log_hands_them_out(turns):
    """A turn hands keys out, or begins another log."""
    keys, handed, old = HandedKeys(), set(), set()
    for turn in turns:
        if turn is None:
            keys.begin_anew()
            old = set(handed)
        else:
            keys.add(np.array(turn))
            handed |= set(turn)
            old -= set(turn)
        assert np.flatnonzero(keys.are_old(np.arange(14))).tolist() == sorted(old)


def test_only_the_newest_are_remembered(monkeypatch):
    monkeypatch.setattr(handed_keys, "REMEMBERED_KEYS", 4)
    keys = HandedKeys()
    for first in (0, 3, 6):
        keys.add(np.arange(first, first + 3))
    keys.begin_anew()
    assert np.flatnonzero(keys.are_old(np.arange(9))).tolist() == [6, 7, 8]
