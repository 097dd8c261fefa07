import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apexrl.replay.priority_index import PriorityIndex

ALMOST_ONE = np.nextafter(1, 0)


class Chosen:
    """A generator whose draws are given."""

    def __init__(self, draws):
        self.draws = draws

    def random(self, size):
        assert len(self.draws) == size
        return self.draws


class SlowIndex:
    """The naive twin: a flat list, and a scan for each draw."""

    def __init__(self, num_rows, row_size):
        self.values = [0.0] * (num_rows * row_size)
        self.row_size = row_size

    def set_rows(self, rows, lines):
        for row, values in zip(rows, lines, strict=True):
            self.values[row * self.row_size : (row + 1) * self.row_size] = list(values)

    def set(self, rows, columns, values):
        for row, column, value in zip(rows, columns, values, strict=True):
            self.values[row * self.row_size + column] = value

    def sample(self, batch_size, rng):
        total = sum(self.values)
        places = []
        for i, u in enumerate(rng.random(batch_size)):
            mass = min((i + u) * total / batch_size, np.nextafter(total, 0))
            running = np.cumsum(self.values)
            places.append(next(place for place, reached in enumerate(running) if mass < reached))
        return places, [self.values[place] / total for place in places]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_equals_the_slow_twin_under_random_operations(data):
    num_rows, size = data.draw(st.sampled_from([1, 2, 9, 64, 65, 130])), data.draw(st.integers(1, 17))
    fast, slow = PriorityIndex(num_rows, size), SlowIndex(num_rows, size)
    priority = st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0, 64.0])  # sums of these are exact
    row, column = st.integers(0, num_rows - 1), st.integers(0, size - 1)
    for _ in range(data.draw(st.integers(1, 20))):
        rows = data.draw(st.lists(row, min_size=1, max_size=10))
        if data.draw(st.booleans()):
            rows = list(dict.fromkeys(rows))
            line = st.lists(priority, min_size=size, max_size=size)
            lines = data.draw(st.lists(line, min_size=len(rows), max_size=len(rows)))
            fast.set_rows(np.array(rows), np.array(lines))
            slow.set_rows(rows, lines)
        else:
            columns = data.draw(st.lists(column, min_size=len(rows), max_size=len(rows)))
            values = data.draw(st.lists(priority, min_size=len(rows), max_size=len(rows)))
            fast.set(np.array(rows), np.array(columns), np.array(values))
            slow.set(rows, columns, values)
        if data.draw(st.booleans()):  # changes are summed up when somebody looks
            continue
        fast.check_valid()
        assert fast.total() == sum(slow.values)
        assert fast.get_rows(np.arange(num_rows)).ravel().tolist() == slow.values
        everywhere = np.divmod(np.arange(num_rows * size), size)
        assert fast.get(*everywhere).tolist() == slow.values
        if fast.total() > 0:
            draws = np.random.default_rng(data.draw(st.integers(0, 1000))).random(16)
            borders = np.array(data.draw(st.lists(st.sampled_from([0.0, 0.5, ALMOST_ONE]), min_size=16, max_size=16)))
            for chosen in (Chosen(draws), Chosen(borders)):
                rows, columns, probabilities = fast.sample(16, chosen)
                places, slow_probabilities = slow.sample(16, chosen)
                assert (rows * size + columns).tolist() == places
                assert probabilities.tolist() == slow_probabilities


def test_frequencies_are_in_proportion():
    rng = np.random.default_rng(0)
    index = PriorityIndex(70, 3)
    values = rng.exponential(size=(70, 3)) * (rng.random((70, 3)) < 0.7)
    index.set_rows(np.arange(70), values)
    draws = [rows * 3 + columns for rows, columns, _ in (index.sample(512, rng) for _ in range(400))]
    frequencies = np.bincount(np.concatenate(draws), minlength=210) / (400 * 512)
    expected = values.ravel() / values.sum()
    assert (frequencies[expected == 0] == 0).all()
    assert np.abs(frequencies - expected).max() < 0.002
    assert frequencies[expected > 0] == pytest.approx(expected[expected > 0], rel=0.25, abs=5e-4)


def test_rounding_never_picks_an_empty_place():
    rng = np.random.default_rng(1)
    index = PriorityIndex(137, 5)
    for _ in range(300):
        values = rng.random(5) * 10.0 ** rng.integers(-12, 12, 5) * (rng.random(5) < 0.3)
        index.set_rows(rng.integers(0, 137, 1), values[None])
        if index.total() > 0:
            rows, columns, probabilities = index.sample(64, rng)
            assert (probabilities > 0).all() and (index.get(rows, columns) > 0).all()


def borders_of(index):
    """For each group but the first, the least draw that falls into it, and its neighbours."""
    running = np.cumsum(index._group_sums)
    borders = running[:-1] / running[-1]
    for _ in range(3):
        borders = np.nextafter(borders, 0)
    draws = []
    for _ in range(7):
        draws.append(borders)
        borders = np.nextafter(borders, 1)
    return np.clip(np.concatenate(draws), 0, ALMOST_ONE)


@pytest.mark.parametrize("seed", range(20))
def test_a_draw_at_the_border_of_a_group_falls_into_a_place_that_exists(seed):
    rng = np.random.default_rng(seed)
    index = PriorityIndex(64 * 40, 3)
    values = rng.exponential(size=(64 * 40, 3))
    values[np.arange(64 * 40) % 64 < 8] = 0.0  # as in the group whose oldest rows are evicted
    index.set_rows(np.arange(64 * 40), values)
    assert index.total() > 0
    for draw in borders_of(index):
        rows, columns, _ = index.sample(1, Chosen(np.array([draw])))
        assert index.get(rows, columns) > 0


def test_a_copy_of_rows_does_not_follow_the_index():
    index = PriorityIndex(3, 2)
    copy = index.get_rows(np.array([1]))
    index.set_rows(np.array([1]), np.ones((1, 2)))
    assert not copy.any()


def test_nothing_to_sample_is_an_error():
    with pytest.raises(ValueError, match="zero"):
        PriorityIndex(4, 4).sample(2, np.random.default_rng(0))
