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

    def random(self, shape):
        assert self.draws.shape == shape
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

    def sample(self, num_batches, batch_size, rng):
        total = sum(self.values)
        running = np.cumsum(self.values)
        places = []
        for draws in rng.random((num_batches, batch_size)):
            masses = [min((i + u) * total / batch_size, np.nextafter(total, 0)) for i, u in enumerate(draws)]
            places.append([next(n for n, reached in enumerate(running) if mass < reached) for mass in masses])
        return places, [[self.values[place] / total for place in batch] for batch in places]


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
            shape = data.draw(st.sampled_from([(1, 16), (2, 8), (16, 1)]))
            draws = np.random.default_rng(data.draw(st.integers(0, 1000))).random(shape)
            borders = np.array(data.draw(st.lists(st.sampled_from([0.0, 0.5, ALMOST_ONE]), min_size=16, max_size=16)))
            for chosen in (Chosen(draws), Chosen(borders.reshape(shape))):
                rows, columns, probabilities = fast.sample(*shape, chosen)
                places, slow_probabilities = slow.sample(*shape, chosen)
                assert (rows * size + columns).tolist() == places
                assert probabilities.tolist() == slow_probabilities


@pytest.mark.parametrize("num_batches", [1, 8])
def test_frequencies_are_in_proportion(num_batches):
    rng = np.random.default_rng(0)
    index = PriorityIndex(70, 3)
    values = rng.exponential(size=(70, 3)) * (rng.random((70, 3)) < 0.7)
    index.set_rows(np.arange(70), values)
    draws = [
        rows * 3 + columns
        for rows, columns, _ in (index.sample(num_batches, 512, rng) for _ in range(400 // num_batches))
    ]
    frequencies = np.bincount(np.concatenate(draws).ravel(), minlength=210) / (400 * 512)
    expected = values.ravel() / values.sum()
    assert (frequencies[expected == 0] == 0).all()
    assert np.abs(frequencies - expected).max() < 0.002
    assert frequencies[expected > 0] == pytest.approx(expected[expected > 0], rel=0.25, abs=5e-4)


def test_batches_drawn_together_are_those_drawn_one_after_the_other():
    rng = np.random.default_rng(3)
    index = PriorityIndex(500, 7)
    index.set_rows(np.arange(500), rng.exponential(size=(500, 7)))
    together = index.sample(5, 32, np.random.default_rng(4))
    one_by_one = np.random.default_rng(4)
    for i in range(5):
        alone = index.sample(1, 32, one_by_one)
        assert all((many[i] == one[0]).all() for many, one in zip(together, alone, strict=True))


def test_rounding_never_picks_an_empty_place():
    rng = np.random.default_rng(1)
    index = PriorityIndex(137, 5)
    for _ in range(300):
        values = rng.random(5) * 10.0 ** rng.integers(-12, 12, 5) * (rng.random(5) < 0.3)
        index.set_rows(rng.integers(0, 137, 1), values[None])
        if index.total() > 0:
            rows, columns, probabilities = index.sample(2, 32, rng)
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
        rows, columns, _ = index.sample(1, 1, Chosen(np.array([[draw]])))
        assert index.get(rows, columns) > 0


def test_a_copy_of_rows_does_not_follow_the_index():
    index = PriorityIndex(3, 2)
    copy = index.get_rows(np.array([1]))
    index.set_rows(np.array([1]), np.ones((1, 2)))
    assert not copy.any()


def test_nothing_to_sample_is_an_error():
    with pytest.raises(ValueError, match="zero"):
        PriorityIndex(4, 4).sample(1, 2, np.random.default_rng(0))
