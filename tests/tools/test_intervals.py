import math
import statistics

import numpy as np
import pytest

from apexrl.tools.intervals import bootstrap_interval, interquartile_mean, mean, mean_curve

# [seeds, games] of exact fractions, and what rliable 1.2.0 makes of them with 50,000 resamples.
SCORES = np.array([[(7 * i + 13 * j * j + 3 * i * i) % 64 / 64 for j in range(4)] for i in range(10)])
RLIABLE_IQM, RLIABLE_IQM_INTERVAL = 0.521875, (0.384375, 0.6609375)
RLIABLE_MEAN_INTERVAL = 0.2375, 0.621875  # of the first game alone
TOLERANCE = 0.006  # of two bootstraps with so many resamples


def games_of(scores):
    return [scores[:, [game]] for game in range(scores.shape[1])]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 11, 40])
def test_the_interquartile_mean_leaves_out_a_quarter_at_each_end(size):
    scores = np.random.default_rng(size).normal(size=(size, 3))
    cut = int(0.25 * size)
    slow = [statistics.fmean(sorted(column)[cut : size - cut]) for column in scores.T.tolist()]
    np.testing.assert_allclose(interquartile_mean(scores), slow)


def test_intervals_are_those_of_rliable():
    assert interquartile_mean(SCORES.reshape(-1, 1)) == pytest.approx(RLIABLE_IQM)
    found = bootstrap_interval(games_of(SCORES), interquartile_mean, 50_000)
    np.testing.assert_allclose(np.ravel(found), RLIABLE_IQM_INTERVAL, atol=TOLERANCE)
    found = bootstrap_interval(games_of(SCORES)[:1], mean, 50_000)
    np.testing.assert_allclose(np.ravel(found), RLIABLE_MEAN_INTERVAL, atol=TOLERANCE)


def test_the_seeds_of_a_game_stay_in_it():
    """Each game alone has one score, so nothing can vary; drawn from all scores together it would."""
    low, high = bootstrap_interval([np.full((5, 1), 3.0), np.full((2, 1), 8.0)], mean)
    assert low == high == pytest.approx(31 / 7)


def test_whole_seeds_are_drawn_for_all_points_of_a_curve():
    """A seed and its mirror image: where a resample has two of one, both points say so, and their sum is always 0."""
    low, high = bootstrap_interval(
        [np.array([[1.0, -1.0], [-1.0, 1.0]])], lambda s: mean(s).sum(axis=-1, keepdims=True)
    )
    assert low == high == 0
    assert bootstrap_interval([np.array([[1.0, -1.0], [-1.0, 1.0]])], mean).high.tolist() == [1, 1]


def test_one_seed_says_nothing_about_others():
    one, many = np.zeros((1, 1)), np.arange(5.0)[:, None]
    assert np.isnan(bootstrap_interval([one], mean)).all() and np.isnan(bootstrap_interval([many, one], mean)).all()


def test_the_same_scores_have_the_same_interval():
    scores = [np.random.default_rng(3).normal(size=(6, 4))]
    np.testing.assert_array_equal(bootstrap_interval(scores, mean), bootstrap_interval(scores, mean))


def test_a_mean_curve_is_where_all_curves_are():
    first = np.array([0.0, 10.0, 30.0]), np.array([0.0, 10.0, 10.0])
    second = np.array([5.0, 25.0]), np.array([1.0, 5.0])
    curve = mean_curve([first, second])
    assert (curve.positions[0], curve.positions[-1]) == (5, 25)
    for position, value in zip(curve.positions, curve.means, strict=True):
        slow = (min(position, 10.0) + 1 + (position - 5) / 5) / 2
        assert math.isclose(value, slow, abs_tol=1e-9)
    np.testing.assert_array_less(curve.low, curve.high + 1e-9)


def test_curves_that_share_a_point_or_nothing():
    point = np.array([4.0]), np.array([2.0])
    assert [values.tolist() for values in mean_curve([point, point])] == [[4.0], [2.0], [2.0], [2.0]]
    assert all(len(values) == 0 for values in mean_curve([point, (np.array([5.0]), np.array([2.0]))]))


def test_of_evaluations_at_the_same_position_the_last_one_counts():
    """As of a learner from a journal, whose frames are all there at its start."""
    curve = mean_curve([(np.array([0.0, 2.0, 2.0, 4.0]), np.array([1.0, 2.0, 6.0, 0.0]))])
    assert curve.means[[0, 25, 50, 75, 100]].tolist() == [1, 3.5, 6, 3, 0]
