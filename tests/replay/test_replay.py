import numpy as np
import pytest

from apexrl.config import ReplayConfig
from apexrl.replay.limiter import Limiter
from apexrl.replay.log import Record
from apexrl.replay.replay import Replay
from apexrl.replay.table import PrioritizedTable, importance_weights


def make_replay(spec, **changes):
    numbers = {"capacity": 80, "min_size_to_sample": 16, "samples_per_insert": 0.0, "eviction_period_batches": 5}
    return Replay(ReplayConfig(**(numbers | changes)), spec, batch_size=4, seed=0)


def record(transitions=8):
    return Record(b"message", b"block", transitions, 0.0)


def test_keys_name_what_was_inserted(spec):
    replay = make_replay(spec)
    for number in range(200):
        priorities = np.zeros(8)
        priorities[number % 8] = 1.0
        assert replay.insert(record(), priorities) == number
        sample = replay.sample(4)
        first, end = replay.log.first_number, replay.log.end_number
        assert set(sample.keys.tolist()) <= {8 * n + n % 8 for n in range(first, end)}


def test_a_late_priority_never_touches_a_newer_transition():
    table = PrioritizedTable(ring_unrolls=4, unroll_starts=2, priority_exponent=1.0, importance_exponent=0.4, seed=0)
    for number in range(4):
        table.insert(number, np.ones(2))
    for number in range(4, 7):
        table.evict(number - 4)
        table.insert(number, np.ones(2))
    table.update_priorities(np.array([0, 5, 6, 13, 14]), np.array([100.0, 100.0, 3.0, 5.0, 100.0]))
    assert table.num_stale == 3  # 0 and 5 are gone, 14 is not there yet
    draws = np.concatenate([table.sample(64, 8).keys for _ in range(50)])
    counts = np.bincount(draws, minlength=14)
    assert counts[:6].sum() == 0
    assert counts[6:] / counts.sum() == pytest.approx(np.array([3, 1, 1, 1, 1, 1, 1, 5]) / 14, abs=0.02)


def test_what_is_no_transition_cannot_be_given_a_priority():
    table = PrioritizedTable(4, 2, 1.0, 0.4, 0)
    table.insert(0, np.array([0.0, 1.0]))
    table.update_priorities(np.array([0, 1]), np.array([9.0, 2.0]))
    assert set(table.sample(32, 1).keys) == {1}


def test_probabilities_and_weights_follow_the_exponents():
    table = PrioritizedTable(1, 3, priority_exponent=0.6, importance_exponent=0.4, seed=0)
    table.insert(0, np.array([1.0, 2.0, 4.0]))
    sample = table.sample(256, 3)
    expected = np.array([1, 2, 4]) ** 0.6 / (np.array([1, 2, 4]) ** 0.6).sum()
    assert sample.probabilities == pytest.approx(expected[sample.keys])
    weights = (3 * expected) ** -0.4
    assert sample.weights == pytest.approx((weights / weights.max())[sample.keys], rel=1e-6)


def test_uniform_sampling_leaves_out_what_is_no_transition():
    table = PrioritizedTable(2, 4, priority_exponent=0.0, importance_exponent=0.4, seed=0)
    table.insert(0, np.array([0.0, 5.0, 1e-6, 0.0]))
    assert np.bincount(table.sample(1000, 2).keys, minlength=4).tolist() == [0, 500, 500, 0]
    table.update_priorities(np.array([1]), np.array([0.0]))
    assert set(table.sample(10, 2).keys) == {2}
    assert table.priority_quantiles((0.5,)).tolist() == [0.0]


def test_weights_are_equal_when_probabilities_are():
    assert importance_weights(np.full(5, 0.01), 100, 0.4).tolist() == [1] * 5


def test_capacity_is_a_soft_limit_and_the_oldest_go_first(spec):
    replay = make_replay(spec)  # 10 unrolls, and 8 more before they must go
    for _ in range(18):
        replay.insert(record(), np.ones(8))
    assert len(replay.log) == 18
    for _ in range(4):
        replay.sample(4)
    assert len(replay.log) == 18
    replay.sample(4)  # the fifth batch
    assert (replay.log.first_number, replay.log.end_number) == (8, 18)
    for _ in range(9):
        replay.insert(record(), np.ones(8))
    assert (replay.log.first_number, replay.log.end_number) == (16, 27)
    assert replay.log.num_transitions == 88 and replay.log.num_bytes == 11 * len(b"messageblock")
    with pytest.raises(IndexError, match="unroll 15"):
        replay.log[15]


def test_nothing_is_sampled_before_the_minimum_size(spec):
    replay = make_replay(spec)
    assert replay.why_no_sample(4) == "min_size"
    replay.insert(record(), np.ones(8))
    assert replay.why_no_sample(4) == "min_size"
    replay.insert(record(), np.zeros(8))
    assert replay.why_no_sample(4) == ""
    empty = make_replay(spec)
    for _ in range(2):
        empty.insert(record(), np.zeros(8))
    assert empty.why_no_sample(4) == "priorities"


def test_limiter_keeps_the_error_in_its_band():
    rng = np.random.default_rng(0)
    limiter = Limiter(samples_per_insert=4.0, min_size=100, slack=64.0)
    errors = []
    for _ in range(20_000):
        if rng.random() < 0.5:
            if limiter.may_insert():
                limiter.inserted += 8
        elif limiter.may_sample(16):
            limiter.sampled += 16
        if limiter.inserted >= 100:
            errors.append(limiter.error)
    assert -64 <= min(errors) and max(errors) <= 64 + 8 * 4
    assert limiter.samples_per_insert_so_far() == pytest.approx(4.0, rel=0.01)


@pytest.mark.parametrize("numbers", [(-1.0, 1, 1.0), (1.0, 0, 1.0), (1.0, 1, 0.0)])
def test_limiter_refuses_numbers_that_cannot_work(numbers):
    with pytest.raises(ValueError, match="needed"):
        Limiter(*numbers)


def test_a_capacity_below_the_minimum_size_is_refused(spec):
    with pytest.raises(ValueError, match="smaller than min_size"):
        make_replay(spec, capacity=8)
