"""The elite table beside a slow twin, and through restarts."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apexrl.replay.limiter import Limiter
from apexrl.replay.unroll_tables import ELITE_DRAWS, EliteTable
from tests.replay.records import powers_of
from tests.replay.test_table import insert, make


def numbers_in(table):
    """The numbers that a table can hand out, by draws of all of them."""
    size = next(size for size in range(100) if not table.can_sample(size + 1))
    return set(table.sample(size).keys.tolist()) if size else set()


def test_each_unroll_is_drawn_as_often_and_none_twice_in_a_batch():
    table = make("elite", ring=50, capacity=8)
    insert(table, 0, 8)
    samples = [table.sample(3) for _ in range(4000)]
    assert all(len(set(sample.keys)) == 3 for sample in samples)
    for drawn in (np.concatenate([s.keys for s in samples]), np.array([s.keys[0] for s in samples])):
        assert np.bincount(drawn) / len(drawn) == pytest.approx(np.full(8, 1 / 8), abs=0.02)
    assert (samples[0].probabilities == 1 / 8).all() and (samples[0].weights == 1).all()
    assert (table.limiter.inserted, table.limiter.sampled) == (8, 12_000)


def test_a_new_unroll_takes_the_place_of_the_worst_of_those_drawn():
    """With 20 draws of 4 places all of them are drawn, but for one time in a hundred."""
    left = []
    for seed in range(40):
        table = make("elite", ring=50, capacity=4, seed=seed)
        insert(table, 0, 4)
        table.update_priorities(np.array([0, 1, 2, 3, 99]), np.array([0.5, 0.9, 0.1, 0.3, 0.0], np.float32))
        insert(table, 4, 1)
        insert(table, 5, 1)
        left.append(frozenset(numbers_in(table)))
    assert left.count(frozenset({0, 1, 4, 5})) >= 36
    assert all(4 in numbers or 5 in numbers for numbers in left)


def test_without_priorities_any_unroll_may_go():
    gone = []
    for seed in range(600):
        table = make("elite", ring=50, capacity=5, seed=seed)
        insert(table, 0, 6)
        gone += set(range(6)) - numbers_in(table)
    assert np.bincount(gone, minlength=6)[5] == 0
    assert np.bincount(gone)[:5] / len(gone) == pytest.approx(np.full(5, 0.2), abs=0.06)


class Twin:
    """A table as a plain dictionary, which draws as the table draws."""

    def __init__(self, capacity, seed):
        self.capacity, self.rng = capacity, np.random.default_rng(seed)
        self.places = []  # numbers
        self.priorities = {}

    def insert(self, number):
        if len(self.places) < self.capacity:
            self.places.append(number)
        else:
            drawn = self.rng.integers(len(self.places), size=ELITE_DRAWS).tolist()
            place = min(drawn, key=lambda drawn: self.priorities[self.places[drawn]])
            del self.priorities[self.places[place]]
            self.places[place] = number
        self.priorities[number] = 1.0

    def remove(self, number):
        if number in self.priorities:
            place, last = self.places.index(number), self.places.pop()
            if last != number:
                self.places[place] = last
            del self.priorities[number]


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 6), st.lists(st.one_of(st.just("insert"), st.just("evict"), st.just("restart"),
       st.tuples(st.integers(0, 30), st.sampled_from([0.0, 0.25, 0.5, 0.75]))), max_size=60))  # fmt: skip
def test_a_table_does_what_its_twin_does(capacity, steps):
    table, twin = make("elite", ring=64, capacity=capacity, seed=7), Twin(capacity, 7)
    first = end = 0
    for step in steps:
        if step == "insert":
            insert(table, end, 1)
            twin.insert(end)
            end += 1
        elif step == "evict" and first < end:
            table.evict(first)
            twin.remove(first)
            first += 1
        elif step == "restart" and (twin.places or first == end):
            rng = np.random.default_rng(7)
            new = EliteTable(Limiter(0.0, 1, 1.0), rng, capacity)
            if end > first:
                insert(new, first, end - first)
            new.restore(table.state(), first, end)
            rng.bit_generator.state = twin.rng.bit_generator.state
            table = new
        elif isinstance(step, tuple):
            number, priority = step
            table.update_priorities(np.array([number]), np.array([priority], np.float32))
            if priority == 0:
                twin.remove(number)
            elif number in twin.priorities:
                twin.priorities[number] = priority
        size, state = len(twin.places), table.state()
        kept_none = [-1] if end > first else []  # a table of another kind has no numbers
        assert np.frombuffer(state.numbers, np.int64).tolist() == (twin.places or kept_none)
        powers = powers_of(table, 1)[:size, 0].tolist()
        assert powers == [twin.priorities[number] for number in twin.places]
        assert table.can_sample(size) and not table.can_sample(size + 1)


def test_a_restart_keeps_the_worthy_and_what_came_after_the_snapshot():
    old = make("elite", ring=64, capacity=3)
    insert(old, 0, 3)
    old.update_priorities(np.array([0, 1, 2]), np.array([0.9, 0.8, 0.7], np.float32))
    state = old.state()
    new = make("elite", ring=64, capacity=5)
    insert(new, 1, 1)
    new.skip(3)  # 0 was evicted, the disk lost 2
    insert(new, 3, 2)
    new.restore(state, 0, 3)
    assert numbers_in(new) == {1, 3, 4}
    assert new.limiter.inserted == 3 + 2
    with pytest.raises(ValueError, match="priorities of 0 unrolls, not of 3"):
        new.restore(type(state)(3, 0, numbers=state.numbers), 0, 3)
    with pytest.raises(ValueError, match="of another kind"):
        new.restore(make("uniform", ring=64).state(), 0, 3)
    assert numbers_in(new) == {1, 3, 4}, "a state that does not fit changes nothing"
