"""Interquartile means, and bootstrap intervals over seeds. Pure functions.

Source: Agarwal et al., arXiv:2108.13264, whose package `rliable` gives the same numbers.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

RESAMPLES = 2000
CONFIDENCE_PERCENT = 95.0
CURVE_POINTS = 101


class Interval(NamedTuple):
    """The bounds of a confidence interval, each of the statistic's shape."""

    low: np.ndarray
    high: np.ndarray


def mean(scores: np.ndarray) -> np.ndarray:
    """Returns the means of [..., N, G] scores over N, as [..., G]."""
    return scores.mean(axis=-2)


def interquartile_mean(scores: np.ndarray) -> np.ndarray:
    """Returns the means of the middle half of [..., N, G] scores over N, as [..., G].

    A quarter of the scores is left out at each end, rounded down to whole scores.
    """
    num_scores = scores.shape[-2]
    cut = num_scores // 4
    return np.sort(scores, axis=-2)[..., cut : num_scores - cut, :].mean(axis=-2)


def bootstrap_interval(
    strata: Sequence[np.ndarray], statistic: Callable[[np.ndarray], np.ndarray], resamples: int = RESAMPLES
) -> Interval:
    """Returns the percentile interval of a statistic; the same scores always give the same interval.

    Args:
      strata: one array [N_i, G] for each stratum, such as a game: its N_i seeds are drawn with replacement, on their
        own. Only with two or more do they say how much seeds differ: with fewer the bounds are NaN.
      statistic: reduces the scores [R, N, G] of R resamples to [R, G]; N is the sum of all N_i.
    """
    if any(len(scores) < 2 for scores in strata):
        unknown = np.full(strata[0].shape[1:], np.nan)
        return Interval(unknown, unknown)
    rng = np.random.default_rng(0)
    drawn = [scores[rng.integers(len(scores), size=(resamples, len(scores)))] for scores in strata]
    outside = (100.0 - CONFIDENCE_PERCENT) / 2
    low, high = np.percentile(statistic(np.concatenate(drawn, axis=1)), [outside, 100.0 - outside], axis=0)
    return Interval(low, high)


class MeanCurve(NamedTuple):
    """The mean of several curves where all of them are, with its interval: four arrays of one length."""

    positions: np.ndarray
    means: np.ndarray
    low: np.ndarray
    high: np.ndarray


def mean_curve(curves: Sequence[tuple[np.ndarray, np.ndarray]]) -> MeanCurve:
    """Returns the mean of curves (positions, values) whose values are interpolated linearly between their positions.

    Positions never decrease; of values at the same position the last one counts, as that of a learner that trains on
    while no frames come. The mean begins where the last curve begins and
    ends where the first one ends, so that each of its points is of all curves. It is empty without such a stretch.
    """
    first = max(positions[0] for positions, _ in curves)
    last = min(positions[-1] for positions, _ in curves)
    grid = np.linspace(first, last, CURVE_POINTS if first < last else int(first == last))
    values = np.stack([np.interp(grid, *_increasing(*curve)) for curve in curves])
    return MeanCurve(grid, mean(values), *bootstrap_interval([values], mean))


def _increasing(positions: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns a curve with one point at each position, the last value there."""
    alone, index = np.unique(positions[::-1], return_index=True)
    return alone, values[::-1][index]
