import logging
import math

import numpy as np
import pytest

from apexrl.agents import apex_dqn_config
from apexrl.learning.record import metrics
from apexrl.learning.record.metrics import (
    RejectedShares,
    UpdateMetrics,
    VersionLags,
    episode_sums,
    returns_by_exploration,
)
from apexrl.types import Episode


def versions(*numbers):
    return np.array(numbers, np.int64)


def test_lags_are_the_learners_version_minus_the_one_that_acted():
    lags, rng, slow = VersionLags({"queue", "second"}), np.random.default_rng(0), []
    for version in range(100, 150):
        acted = {table: rng.integers(0, version + 1, 5) for table in ("queue", "second", "uniform")}
        lags.add(version, acted)
        slow += [(table, version - int(one)) for table, several in acted.items() for one in several]
    fifo = sorted(lag for table, lag in slow if table != "uniform")
    other = sorted(lag for table, lag in slow if table == "uniform")
    assert lags.report() == {
        "learner/version_lag_p50": (fifo[249] + fifo[250]) / 2,
        "learner/version_lag_p95": pytest.approx(0.95 * fifo[474] + 0.05 * fifo[475], abs=1),
        "learner/version_lag_max": fifo[-1],
        "learner/version_lag/uniform/p50": (other[124] + other[125]) / 2,
        "learner/version_lag/uniform/p95": pytest.approx(other[237], abs=1),
        "learner/version_lag/uniform/max": other[-1],
    }
    assert lags.report() == {}, "each lag is reported once"


def test_versions_that_a_peer_made_up_harm_nothing():
    lags = VersionLags({"queue"})
    lags.add(7, {"queue": versions(-1, -(2**53))})
    assert lags.report() == {}
    lags.add(7, {"queue": versions(-1, 2**53, 8, 7, 5), "empty": versions()})
    assert lags.report() == {
        "learner/version_lag_p50": 1.0,
        "learner/version_lag_p95": pytest.approx(1.9),
        "learner/version_lag_max": 2.0,
    }, "those above 7 are of another run"


def test_lags_of_old_updates_are_forgotten():
    lags = VersionLags({"queue"})
    for version in range(metrics.MAX_KEPT_UPDATES + 5):
        lags.add(version, {"queue": versions(0 if version < 5 else version)})
    assert lags.report()["learner/version_lag_max"] == 0


def test_actors_that_lag_are_said_once_and_again_when_it_is_worse(caplog):
    caplog.set_level(logging.WARNING)
    lags = VersionLags({"queue"})

    def report(lag, table="queue"):
        caplog.clear()
        lags.add(1000, {table: versions(*[1000 - lag] * 20, 0)})
        lags.report()
        return caplog.messages

    assert report(20) == [] and report(900, "uniform") == []
    (said,) = report(21)
    assert "21 updates" in said and "--publish-period-updates" in said and "--batch-size" in said
    assert report(21) == report(31) == [], "nothing is said again and again"
    assert "32 updates" in report(32)[0]
    assert report(20) == report(48) == []
    assert "49 updates" in report(49)[0]


def test_probabilities_are_means_over_updates_and_other_metrics_are_the_newest():
    found, shown = UpdateMetrics(), []
    assert found.values() == {}
    for update in range(400):
        found.add({"loss": float(update), "probability_left": update / 400, "probability_right": 1 - update / 400})
        shown.append(found.values())
    assert shown[0] == {"loss": 0.0, "probability_left": 0.0, "probability_right": 1.0}
    assert shown[4]["probability_left"] == pytest.approx(2 / 400)
    assert shown[399] == {
        "loss": 399.0,
        "probability_left": pytest.approx(349.5 / 400),
        "probability_right": pytest.approx(50.5 / 400),
    }


def test_metrics_without_probabilities_are_the_newest():
    found = UpdateMetrics()
    found.add({"loss": 1.0})
    found.add({"loss": 2.0})
    assert found.values() == {"loss": 2.0}


def test_metrics_of_rows_are_computed_when_they_are_asked_for():
    asked = []

    def of_rows():
        asked.append(True)
        return {"td_error": 2.0}

    found = UpdateMetrics()
    for loss in (3.0, 1.0):
        found.add({"loss": loss}, of_rows)
    assert not asked and found.values() == {"loss": 1.0, "td_error": 2.0} and asked == [True]


def test_rejected_shares_are_means_by_age_of_replayed_rows():
    rejected, rng, slow = RejectedShares({"queue"}), np.random.default_rng(0), []
    for version in range(0, 20_000, 1000):
        acted = {table: rng.integers(-1, version + 5, 6) for table in ("queue", "uniform", "elite-1", "other")}
        shares = {table: rng.random(6).astype(np.float32) for table in acted}
        rejected.add(version, acted, {t: {"rejected_share": s} if t != "other" else {} for t, s in shares.items()})
        for table in ("uniform", "elite-1"):
            slow += [
                (version - one, share)
                for one, share in zip(acted[table], shares[table], strict=True)
                if 0 <= one <= version
            ]
    expected = {}
    for low, high in ((0, 10), (10, 100), (100, 1000), (1000, 10_000), (10_000, 10**9)):
        inside = [share for age, share in slow if low <= age < high]
        if inside:
            expected[f"learner/rejected_share_by_age/from_{low}"] = pytest.approx(np.mean(inside), rel=1e-5)
    assert len(expected) >= 4
    assert rejected.report() == expected
    assert rejected.report() == {}, "each row is reported once"


def test_every_exploration_that_a_peer_may_send_has_a_band_of_epsilons():
    bands = apex_dqn_config.FAMILY.exploration_bands
    explorations = [-1e300, -0.5, -0.0, 0.005, 0.01, 0.3, 1e300]
    sums = episode_sums([Episode(1.0, 5, exploration) for exploration in explorations], bands)
    assert sums[0].tolist() == [7, 2, 0, 1, 4] and sums[2, 0] == 35
    prefix = "actor/return_by_exploration/"
    tags = {tag.removeprefix(prefix) for tag in returns_by_exploration(sums, bands) if tag.startswith(prefix)}
    assert tags == {"above_0.2", "0.01_to_0.05", "below_0.01"}


def test_a_noise_is_in_no_band_of_epsilons():
    episodes = [Episode(float(i), 5, noise) for i, noise in enumerate((0.7, 0.3, 0.1))]
    assert returns_by_exploration(episode_sums(episodes, ()), ()) == {"actor/return_mean": 1.0, "actor/game_steps": 5.0}
    bands = ((0.5, "noise_above_0.5"), (0.2, "noise_0.2_to_0.5"))
    found = returns_by_exploration(episode_sums(episodes, bands), bands)
    assert {tag: found[tag] for tag in found if "exploration" in tag} == {
        "actor/return_by_exploration/noise_above_0.5": 0.0,
        "actor/return_by_exploration/noise_0.2_to_0.5": 1.0,
    }


def test_one_probability_that_is_not_finite_hides_no_other():
    found = UpdateMetrics()
    for value in (0.2, math.nan, 0.4):
        found.add({"loss": 1.0, "probability_left": value})
    assert found.values() == {"loss": 1.0, "probability_left": pytest.approx(0.3)}


def test_one_rejected_share_that_is_not_finite_hides_no_other():
    rejected = RejectedShares(())
    rejected.add(5, {"old": np.array([5, 5, 5])}, {"old": {"rejected_share": np.array([0.2, np.nan, 0.4])}})
    assert rejected.report() == {"learner/rejected_share_by_age/from_0": pytest.approx(0.3)}
