import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apexrl.replay.priority_index import PriorityIndex


class SlowIndex:
    """The naive twin: a flat list, and a scan for each draw."""

    def __init__(self, num_rows, row_size):
        self.values = [0.0] * (num_rows * row_size)
        self.row_size = row_size

    def set_row(self, row, values):
        self.values[row * self.row_size : (row + 1) * self.row_size] = list(values)

    def set_slots(self, slots, values):
        for slot, value in zip(slots, values, strict=True):
            self.values[slot] = value

    def sample(self, batch_size, rng):
        total = sum(self.values)
        slots = []
        for i, u in enumerate(rng.random(batch_size)):
            mass = (i + u) * total / batch_size
            running = np.cumsum(self.values)
            slots.append(next(slot for slot, reached in enumerate(running) if mass < reached))
        return slots, [self.values[slot] / total for slot in slots]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_equals_the_slow_twin_under_random_operations(data):
    rows, size = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 7))
    fast, slow = PriorityIndex(rows, size), SlowIndex(rows, size)
    priority = st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0, 64.0])  # sums of these are exact
    for _ in range(data.draw(st.integers(1, 20))):
        if data.draw(st.booleans()):
            row = data.draw(st.integers(0, rows - 1))
            values = data.draw(st.lists(priority, min_size=size, max_size=size))
            fast.set_row(row, np.array(values))
            slow.set_row(row, values)
        else:
            slots = data.draw(st.lists(st.integers(0, rows * size - 1), min_size=1, max_size=10))
            values = data.draw(st.lists(priority, min_size=len(slots), max_size=len(slots)))
            fast.set_slots(np.array(slots), np.array(values))
            slow.set_slots(slots, values)
        fast.check_valid()
        assert fast.total() == sum(slow.values)
        assert fast.get(np.arange(rows * size)).tolist() == slow.values
        if fast.total() > 0:
            seed = data.draw(st.integers(0, 1000))
            slots, probabilities = fast.sample(16, np.random.default_rng(seed))
            slow_slots, slow_probabilities = slow.sample(16, np.random.default_rng(seed))
            assert slots.tolist() == slow_slots
            assert probabilities.tolist() == slow_probabilities


def test_frequencies_are_in_proportion():
    rng = np.random.default_rng(0)
    index = PriorityIndex(20, 8)
    values = rng.exponential(size=(20, 8)) * (rng.random((20, 8)) < 0.7)
    for row in range(20):
        index.set_row(row, values[row])
    draws = np.concatenate([index.sample(512, rng)[0] for _ in range(400)])
    frequencies = np.bincount(draws, minlength=160) / len(draws)
    expected = values.ravel() / values.sum()
    assert (frequencies[expected == 0] == 0).all()
    assert np.abs(frequencies - expected).max() < 0.002
    assert frequencies[expected > 0] == pytest.approx(expected[expected > 0], rel=0.25, abs=5e-4)


def test_rounding_never_picks_an_empty_slot():
    rng = np.random.default_rng(1)
    index = PriorityIndex(37, 5)
    for _ in range(300):
        values = rng.random(5) * 10.0 ** rng.integers(-12, 12, 5) * (rng.random(5) < 0.3)
        index.set_row(int(rng.integers(37)), values)
        if index.total() > 0:
            slots, probabilities = index.sample(64, rng)
            assert (probabilities > 0).all() and (index.get(slots) > 0).all()


def test_nothing_to_sample_is_an_error():
    with pytest.raises(ValueError, match="zero"):
        PriorityIndex(4, 4).sample(2, np.random.default_rng(0))
