import numpy as np
import pytest

from apexrl.config.tables import TableConfig
from apexrl.replay.kinds import make_table
from apexrl.replay.limiter import Limiter
from apexrl.replay.priority_table import importance_weights
from apexrl.replay.unroll_tables import UniformTable
from apexrl.types import StreamSpec
from tests.replay.records import powers_of


def make(kind="priority", ring=4, starts=2, exponents=(1.0, 0.4), seed=0, capacity=0):
    spec = StreamSpec("Known-v0", (2,), "float32", 3, 4, 1, unroll_starts=starts, overlap_steps=2)
    return make_table(TableConfig(kind, 0.0, 1, capacity), ring, spec, exponents, seed)


def give(table, first, priorities):
    """Inserts unrolls whose transitions are valid where they have a priority."""
    priorities = np.asarray(priorities)
    table.insert(first, priorities, priorities > 0)


def insert(table, first, count):
    """Inserts unrolls whose priorities are all 1."""
    give(table, first, np.ones((count, 2), np.float32))


def test_a_late_priority_never_touches_a_newer_transition():
    table = make()
    insert(table, 0, 4)
    for number in range(3):
        table.evict(number)
        insert(table, number + 4, 1)
        table.check_valid()
    table.update_priorities(np.array([0, 5, 6, 13, 14]), np.array([100.0, 100.0, 3.0, 5.0, 100.0]))
    assert table.num_stale == 3  # 0 and 5 are gone, 14 is not there yet
    draws = np.concatenate([table.sample(64).keys for _ in range(50)])
    counts = np.bincount(draws, minlength=14)
    assert counts[:6].sum() == 0
    assert counts[6:] / counts.sum() == pytest.approx(np.array([3, 1, 1, 1, 1, 1, 1, 5]) / 14, abs=0.02)


def test_what_is_no_transition_cannot_be_given_a_priority():
    table = make()
    give(table, 0, np.array([[0.0, 1.0]]))
    table.update_priorities(np.array([0, 1]), np.array([9.0, 2.0]))
    assert set(table.sample(32).keys) == {1}
    assert table.limiter.inserted == 1


def test_probabilities_and_weights_follow_the_exponents():
    table = make(ring=1, starts=3, exponents=(0.6, 0.4))
    give(table, 0, np.array([[1.0, 2.0, 4.0]]))
    sample = table.sample(256)
    expected = np.array([1, 2, 4]) ** 0.6 / (np.array([1, 2, 4]) ** 0.6).sum()
    assert sample.probabilities == pytest.approx(expected[sample.keys])
    weights = (3 * expected) ** -0.4
    assert sample.weights == pytest.approx((weights / weights.max())[sample.keys], rel=1e-6)
    assert table.limiter.sampled == 256


def test_exponent_zero_samples_transitions_uniformly_and_nothing_else():
    table = make(ring=2, starts=4, exponents=(0.0, 0.4))
    give(table, 0, np.array([[0.0, 5.0, 1e-6, 0.0]]))
    assert np.bincount(table.sample(1000).keys, minlength=4).tolist() == [0, 500, 500, 0]
    table.update_priorities(np.array([1]), np.array([0.0]))
    assert set(table.sample(10).keys) == {2}
    assert table.priority_quantiles((0.5,)).tolist() == [0.0]


def test_quantiles_are_of_the_priorities_before_the_exponent():
    table = make(ring=2, starts=8, exponents=(0.6, 0.4))
    assert table.priority_quantiles((0.5,)).tolist() == [0.0]
    give(table, 0, np.array([[0, 0, 2, 2, 2, 2, 2, 9]], np.float32))
    assert table.priority_quantiles((0.0, 0.5, 1.0)) == pytest.approx([2, 2, 9], rel=1e-6)


def test_weights_are_equal_when_probabilities_are():
    weights, largest = importance_weights(np.full(5, 0.01), 0.5)
    assert weights.tolist() == [1] * 5 and largest == pytest.approx(10)


@pytest.mark.parametrize(("capacity", "oldest"), [(0, 10), (20, 10), (8, 17)])
def test_a_uniform_table_draws_each_unroll_held_as_often_and_none_twice_in_a_batch(capacity, oldest):
    table = make("uniform", ring=20, capacity=capacity)
    assert not table.can_sample(1)
    insert(table, 0, 20)
    for number in range(10):
        table.evict(number)
    insert(table, 20, 5)
    held = 25 - oldest
    assert table.can_sample(held) and not table.can_sample(held + 1)
    samples = [table.sample(5) for _ in range(4000)]
    assert all(len(set(sample.keys)) == 5 for sample in samples)
    for drawn in (np.concatenate([s.keys for s in samples]), np.array([s.keys[0] for s in samples])):  # first: as fair
        counts = np.bincount(drawn, minlength=25)
        assert not counts[:oldest].any()
        assert counts[oldest:] / counts.sum() == pytest.approx(np.full(held, 1 / held), abs=0.02)
    assert (samples[0].probabilities == 1 / held).all() and (samples[0].weights == 1).all()
    assert (table.limiter.inserted, table.limiter.sampled) == (25, 20_000)
    assert sorted(table.sample(held).keys) == list(range(oldest, 25))


def test_a_uniform_table_repeats_with_its_seed():
    tables = [make("uniform", seed=seed) for seed in (1, 1, 2)]
    for table in tables:
        insert(table, 0, 90)
    same, again, other = (table.sample(50).keys.tolist() for table in tables)
    assert same == again != other


def test_a_fifo_table_hands_out_each_unroll_once_in_order():
    table = make("fifo", ring=10)
    insert(table, 0, 5)
    assert table.sample(2).keys.tolist() == [0, 1]
    assert table.can_sample(3) and not table.can_sample(4)
    assert table.sample(3).keys.tolist() == [2, 3, 4]
    assert not table.can_sample(1)
    insert(table, 5, 2)
    assert table.sample(1).keys.tolist() == [5]
    assert (table.limiter.inserted, table.limiter.sampled, table.num_missed) == (7, 6, 0)


def test_a_fifo_table_counts_what_was_evicted_undrawn():
    table = make("fifo", ring=10)
    insert(table, 0, 10)
    table.sample(3)
    for number in range(5):
        table.evict(number)
    assert table.num_missed == 2
    assert table.sample(2).keys.tolist() == [5, 6]
    for number in range(5, 9):
        table.evict(number)
    assert table.num_missed == 4


@pytest.mark.parametrize(("old_exponent", "new_exponent"), [(0.6, 0.6), (0.6, 1.0), (1.0, 0.5), (0.6, 0.0), (0.0, 0.6)])
def test_priorities_are_restored_also_for_another_exponent(old_exponent, new_exponent):
    old, new = make(exponents=(old_exponent, 0.4)), make(exponents=(new_exponent, 0.4))
    for table in (old, new):
        give(table, 0, np.array([[2.0, 0.0], [2.0, 3.0]]))
    old.update_priorities(np.array([0, 2]), np.array([7.0, 0.0]))
    old.sample(8)
    new.restore(old.state(), 0, 2)
    assert (new.limiter.inserted, new.limiter.sampled) == (3, 8)
    known = np.array([[7.0, 0.0], [0.0, 3.0]]) if old_exponent else np.array([[1.0, 0.0], [0.0, 1.0]])
    expected = np.where(known > 0, known**new_exponent, 0)
    assert powers_of(new, 2) == pytest.approx(expected, rel=1e-6)
    new.check_valid()


def test_priorities_are_restored_where_the_log_moved_on():
    old = make(ring=4)
    give(old, 0, np.full((4, 2), 5.0))
    state = old.state()
    new = make(ring=4)
    insert(new, 2, 4)  # 0 and 1 are gone, 4 and 5 came, and took their rows
    new.restore(state, 0, 4)
    new.check_valid()
    assert powers_of(new, 2).tolist() == [[5, 5], [5, 5], [1, 1], [1, 1]]
    assert new.limiter.inserted == 8 + 4


def test_priorities_of_unrolls_that_the_disk_lost_are_not_restored():
    old = make(ring=8)
    give(old, 0, np.full((6, 2), 5.0))
    new = make(ring=8)
    insert(new, 0, 2)
    new.skip(3)
    insert(new, 3, 1)
    new.restore(old.state(), 0, 6)
    new.check_valid()
    assert powers_of(new, 2).tolist() == [[5, 5], [5, 5], [0, 0], [5, 5]]
    insert(new, 4, 1)
    assert set(new.sample(100).keys // 2) == {0, 1, 3, 4}


def test_a_state_from_long_ago_changes_nothing_but_the_totals():
    old = make(ring=4)
    give(old, 0, np.full((4, 2), 5.0))
    new = make(ring=4)
    insert(new, 10, 4)
    new.restore(old.state(), 0, 4)
    assert powers_of(new, 2).tolist() == [[1, 1]] * 4
    new.check_valid()


def test_a_state_that_does_not_fit_is_an_error():
    old = make(starts=3)
    give(old, 0, np.ones((2, 3)))
    with pytest.raises(ValueError, match="priorities of 2 unrolls, not 3"):
        make(starts=3).restore(old.state(), 0, 3)


def test_a_fifo_table_goes_on_where_it_was():
    old = make("fifo", ring=10)
    insert(old, 0, 6)
    old.sample(4)
    new = make("fifo", ring=10)
    insert(new, 0, 8)
    new.restore(old.state(), 0, 6)
    assert (new.limiter.inserted, new.limiter.sampled) == (8, 4)
    assert new.sample(4).keys.tolist() == [4, 5, 6, 7]


def test_a_fifo_table_counts_as_missed_only_what_it_held():
    table = make("fifo", ring=10)
    insert(table, 500, 3)  # a log of which the state was lost
    table.limiter.resume(0, 0, 3)
    table.evict(500)
    assert table.num_missed == 1


def test_a_uniform_table_is_restored_with_its_totals():
    old = make("uniform", ring=10, capacity=3)
    insert(old, 0, 6)
    for _ in range(3):
        assert set(old.sample(3).keys) == {3, 4, 5}
    new = make("uniform", ring=10, capacity=3)
    insert(new, 3, 5)
    new.restore(old.state(), 0, 6)
    assert (new.limiter.inserted, new.limiter.sampled) == (8, 9)
    assert set(new.sample(3).keys) == {5, 6, 7}


@pytest.mark.parametrize("kind", ["priority", "uniform", "fifo"])
def test_missing_unrolls_are_neither_drawn_nor_counted(kind):
    table = make(kind, ring=12)
    table.skip(100)  # nothing before it is held: nothing is missing
    insert(table, 100, 2)
    table.skip(104)
    insert(table, 104, 1)
    table.skip(106)
    starts = 2 if kind == "priority" else 1
    assert table.limiter.inserted == 3 * starts
    drawn = [table.sample(1).keys[0] // starts for _ in range(200) if table.can_sample(1)]
    assert set(drawn) == {100, 101, 104}
    assert kind != "fifo" or drawn == [100, 101, 104]
    insert(table, 106, 2)
    for number in range(100, 104):
        table.evict(number)
    drawn = [table.sample(1).keys[0] // starts for _ in range(200) if table.can_sample(1)]
    assert set(drawn) == ({106, 107} if kind == "fifo" else {104, 106, 107})


def test_a_uniform_table_knows_the_probability_beside_missing_unrolls():
    table = make("uniform", ring=12)
    insert(table, 0, 2)
    table.skip(6)
    insert(table, 6, 2)
    assert (table.sample(4).probabilities == 1 / 4).all()
    for number in range(4):
        table.evict(number)
    assert (table.sample(2).probabilities == 1 / 2).all()
    assert not table.can_sample(3)


class CountedGenerator:
    """A generator that counts how often it is asked."""

    def __init__(self):
        self.num_calls = 0
        self._rng = np.random.default_rng(0)

    def __getattr__(self, name):
        self.num_calls += 1
        return getattr(self._rng, name)


def test_a_uniform_table_of_which_nearly_all_is_missing_draws_at_once():
    rng = CountedGenerator()
    table = UniformTable(Limiter(0.0, 1, 1.0), rng)
    insert(table, 0, 1)
    table.skip(5000)
    insert(table, 5000, 1)
    assert set(table.sample(2).keys) == {0, 5000}
    assert rng.num_calls == 1


@pytest.mark.parametrize("kind", ["uniform", "fifo"])
@pytest.mark.parametrize("seed", range(20))
def test_numbers_by_rank_are_those_of_a_scan(kind, seed):
    rng = np.random.default_rng(seed)
    capacity = int(rng.integers(1, 40)) if kind == "uniform" else 10**6
    table, held = make(kind, ring=1000, capacity=capacity), []
    first = end = int(rng.integers(0, 50))
    table.skip(end)
    for _ in range(60):
        match rng.integers(3):
            case 0:
                insert(table, end, 3)
                held += range(end, end + 3)
                end += 3
            case 1:
                was_empty, lost = first == end, int(rng.integers(1, 5))
                end += lost
                first = end if was_empty else first
                table.skip(end)
            case 2 if first < end:
                table.evict(first)
                first += 1
        held = [number for number in held if number >= first]
        drawable = [number for number in held if number >= end - capacity]
        assert not table.can_sample(len(drawable) + 1)
        if drawable and (kind == "uniform" or rng.random() < 0.2):
            drawn = table.sample(len(drawable)).keys.tolist()
            assert (drawn if kind == "fifo" else sorted(drawn)) == drawable
            held = held if kind == "uniform" else []  # a queue hands each out once


def test_a_draw_from_a_long_log_looks_at_few_of_its_numbers():
    table = make("uniform", ring=10)
    table.insert(0, np.broadcast_to(1.0, (10**12, 2)), None)  # an array of as many numbers would not fit
    assert len(set(table.sample(64).keys)) == 64


def test_a_fifo_table_does_not_miss_what_was_never_there():
    table = make("fifo", ring=12)
    insert(table, 0, 1)
    table.skip(3)
    insert(table, 3, 1)
    for number in range(4):
        table.evict(number)
    assert table.num_missed == 2


def test_totals_leave_out_what_is_missing():
    old = make("uniform", ring=12)
    insert(old, 0, 4)
    new = make("uniform", ring=12)
    insert(new, 0, 5)
    new.skip(7)
    insert(new, 7, 1)
    new.restore(old.state(), 0, 4)
    assert new.limiter.inserted == 6
