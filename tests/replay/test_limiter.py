import numpy as np
import pytest

from apexrl.replay.limiter import Limiter


def test_the_error_stays_in_its_band():
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


@pytest.mark.parametrize("seed", range(20))
def test_a_queue_waits_for_its_start_once_and_then_gives_all_that_is_there(seed):
    rng = np.random.default_rng(seed)
    batch_size, min_size = int(rng.integers(1, 20)), int(rng.integers(1, 100))
    limiter = Limiter(1.0, min_size, slack=2.0 * batch_size, is_queue=True)
    while limiter.inserted < min_size:
        assert limiter.may_insert() and not limiter.may_sample(1)
        limiter.inserted += 1
    most = max(min_size, limiter.slack + 1)
    for _ in range(2000):
        size = int(rng.integers(1, batch_size + 1))
        held = limiter.inserted - limiter.sampled
        assert limiter.error == held and limiter.may_insert() == (held <= limiter.slack)
        if rng.random() < 0.5 and limiter.may_insert():
            limiter.inserted += 1
        elif held >= size:  # what a fifo can give
            assert limiter.may_sample(size)
            limiter.sampled += size
        assert 0 <= limiter.error <= most
        most = max(limiter.error, limiter.slack + 1)  # what the start left behind never comes back
    while limiter.inserted > limiter.sampled:  # no backlog stays
        assert limiter.may_sample(1)
        limiter.sampled += 1
    assert limiter.may_insert()


@pytest.mark.parametrize("seed", range(50))
def test_so_many_batches_may_be_sampled_one_after_the_other(seed):
    rng = np.random.default_rng(seed)
    rate, size = rng.choice([0.0, 0.3, 1.0, 7.7]), int(rng.integers(1, 20))
    limiter = Limiter(rate, 20, rng.choice([1.0, 40.5]), inserted=int(rng.integers(15, 60)))
    count = limiter.num_batches(size, 10)
    assert limiter.sampled == 0
    for _ in range(count):
        assert limiter.may_sample(size)
        limiter.sampled += size
    assert count == 10 or not limiter.may_sample(size)


@pytest.mark.parametrize("numbers", [(-1.0, 1, 1.0), (1.0, 0, 1.0), (1.0, 1, 0.0)])
def test_numbers_that_cannot_work_are_refused(numbers):
    with pytest.raises(ValueError, match="needed"):
        Limiter(*numbers)


def test_it_goes_on_with_the_totals_of_an_earlier_life():
    limiter = Limiter(2.0, 100, 10.0)
    limiter.resume(500, 790, 0)
    assert (limiter.inserted, limiter.sampled, limiter.error) == (500, 790, 10.0)


@pytest.mark.parametrize(
    ("inserted", "sampled", "since", "expected"),
    [
        (500, 790, 50, 890),  # 10 were due, and are after it
        (500, 805, 50, 900),  # sampled ahead by 5: nothing was due
        (500, 1000, 50, 1000),  # far ahead: the inserts since are not enough
        (0, 0, 300, 400),  # no totals at all: nothing to catch up with
        (50, 0, 20, 0),  # before the minimum nothing can have been sampled
        (50, 0, 100, 100),
    ],
)
def test_samples_of_the_time_not_seen_kept_pace(inserted, sampled, since, expected):
    limiter = Limiter(2.0, 100, 10.0)
    limiter.resume(inserted, sampled, since)
    assert (limiter.inserted, limiter.sampled) == (inserted + since, expected)


@pytest.mark.parametrize(
    ("inserted", "since", "expected"),
    [
        (200, 199, 0),  # nothing could be drawn yet
        (0, 399, 0),
        (200, 250, 51),  # from the 400th insert on
        (0, 1000, 601),
        (450, 100, 100),
    ],
)
def test_a_queue_that_had_not_begun_sampled_nothing(inserted, since, expected):
    limiter = Limiter(1.0, 400, 10.0, is_queue=True)
    limiter.resume(inserted, 0, since)
    assert (limiter.inserted, limiter.sampled) == (inserted + since, expected)


def test_without_a_proportion_only_what_is_known_is_counted():
    limiter = Limiter(0.0, 100, 10.0)
    limiter.resume(500, 790, 50)
    assert (limiter.inserted, limiter.sampled) == (550, 790)
