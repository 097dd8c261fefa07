"""Selection against slow twins: lists, loops and dictionaries."""

import math
from typing import NamedTuple

import numpy as np
import pytest

from apexrl.agents.replaying.mix import Selection
from apexrl.agents.replaying.selection import Findings, Selector, elite, num_candidates


def slow_elite(rule, num_kept, distances, uses):
    """The rules as they are told: sorted lists of candidates, stable, the first of equals first."""
    candidates = list(range(len(distances)))
    by_distance = sorted(candidates, key=lambda i: distances[i])
    if rule == "elite-1":
        return by_distance[:num_kept]
    if rule == "elite-3":
        return sorted(by_distance, key=lambda i: uses[i])[:num_kept]
    if len(candidates) <= num_kept:
        return by_distance
    small, num_large = divmod(len(candidates), num_kept)  # the first groups are larger by one where it does not divide
    kept = []
    for g in range(num_kept):
        size = small + (g < num_large)
        group, by_distance = by_distance[:size], by_distance[size:]
        kept.append(group[0] if rule == "elite-2" else min(group, key=lambda i: uses[i]))
    return kept


RULES = ["elite-1", "elite-2", "elite-3", "elite-4"]


@pytest.mark.parametrize("rule", RULES)
def test_rules_equal_their_slow_twins_with_ties_and_with_any_number_of_candidates(rule):
    rng = np.random.default_rng(0)
    for _ in range(500):
        size, num_kept = int(rng.integers(1, 40)), int(rng.integers(1, 12))
        distances = rng.integers(0, 6, size).astype(np.float32) / 2
        uses = rng.integers(0, 4, size)
        kept = elite(rule, num_kept, distances, uses)
        assert kept.tolist() == slow_elite(rule, num_kept, distances.tolist(), uses.tolist())
        assert len(set(kept.tolist())) == len(kept) == min(num_kept, size)


def test_every_kth_is_kept_where_the_groups_are_equal():
    distances = np.random.default_rng(1).permutation(12).astype(np.float32)
    assert distances[elite("elite-2", 3, distances, np.zeros(12))].tolist() == [0, 4, 8]


def test_a_distance_that_is_no_number_comes_last():
    distances = np.array([np.nan, 2.0, np.inf, 1.0], np.float32)
    assert elite("elite-1", 2, distances, np.zeros(4)).tolist() == [3, 1]
    assert elite("elite-3", 3, distances, np.zeros(4)).tolist() == [3, 1, 2]


def test_candidates_become_fewer_linearly():
    assert [num_candidates(32, 8, updates, 100) for updates in (0, 25, 50, 99, 100, 10**6)] == [32, 26, 20, 8, 8, 8]
    assert num_candidates(32, 8, 10**6, 0) == 32
    assert num_candidates(5, 5, 0, 100) == 5


class Known(NamedTuple):
    """The twin's record of an unroll."""

    uses: int
    first: list[float]
    newest: list[float]


def slow_distance(features, others, measure):
    if measure == "l2":
        return math.sqrt(sum((a - b) ** 2 for a, b in zip(features, others, strict=True)))
    norms = [max(math.sqrt(sum(a * a for a in vector)), 1e-8) for vector in (features, others)]
    return 1 - sum(a * b for a, b in zip(features, others, strict=True)) / (norms[0] * norms[1])


@pytest.mark.parametrize("measure", ["l2", "cosine"])
def test_findings_equal_a_dictionary_of_the_newest_unrolls(measure):
    rng, ring = np.random.default_rng(2), 16
    findings, known = Findings(ring), {}
    for time in range(300):
        newest = 20 + time // 3
        window = int(rng.integers(max(newest - 2 * ring, 0), newest - ring + 1))  # a batch is of one ring
        numbers = rng.choice(np.arange(window, window + ring), 5, replace=False)
        features = rng.normal(size=(5, 3)).astype(np.float32)
        findings.add(numbers, {"feature": features, "distance": features[:, 0]})
        for number, feature in zip(numbers.tolist(), features.tolist(), strict=True):
            if any(other > number and other % ring == number % ring for other in known):
                continue  # its place was taken
            known = {other: value for other, value in known.items() if other == number or other % ring != number % ring}
            before = known.get(number, Known(0, feature, feature))
            known[number] = Known(before.uses + 1, before.first, feature)
        asked = np.arange(max(newest - 2 * ring, 0), newest + 3)
        found = [known.get(number, Known(0, [0.0], [0.0])) for number in asked.tolist()]
        assert findings.uses(asked).tolist() == [one.uses for one in found]
        moved = [slow_distance(one.newest, one.first, measure) if one.uses else 0.0 for one in found]
        assert findings.distances(asked, measure) == pytest.approx(moved, abs=1e-5)
        assert findings.distances(asked, "kl").tolist() == pytest.approx([one.newest[0] for one in found])
        query = rng.normal(size=3).astype(np.float32)
        expected = [slow_distance(one.newest, query.tolist(), measure) if one.uses else 0.0 for one in found]
        assert findings.distances(asked, measure, query) == pytest.approx(expected, abs=1e-5)


def test_unknown_unrolls_have_no_uses_and_no_distance():
    findings, numbers = Findings(8), np.array([0, 3, 9])
    query = np.ones(2, np.float32)
    assert not findings.uses(numbers).any()
    assert not findings.distances(numbers, "kl").any() and not findings.distances(numbers, "l2").any()
    assert not findings.distances(numbers, "l2", query).any()


def test_a_selector_keeps_by_the_findings_of_all_tables():
    selections = {"old": Selection("elite-1", 2, "kl"), "rare": Selection("elite-3", 2, "kl")}
    selector = Selector(selections, 16)
    numbers = np.array([5, 6, 7, 8])
    assert selector.keep("old", numbers, 0).positions.tolist() == [0, 1]  # nothing is known
    selector.add({"queue": (numbers, {"distance": np.array([3.0, 1.0, 2.0, 0.5], np.float32)})})
    selector.add({"old": (numbers[3:], {"distance": np.array([9.0], np.float32)})})
    kept = selector.keep("old", numbers, 0)
    assert numbers[kept.positions].tolist() == [6, 7]
    assert kept.metrics == {"candidates": 4, "distance_candidates": 3.75, "distance_kept": 1.5, "uses_kept": 1.0}
    assert numbers[selector.keep("rare", numbers, 0).positions].tolist() == [6, 7]
    assert numbers[selector.keep("rare", numbers[::-1][:2], 0).positions].tolist() == [6, 5]  # all: by uses


def test_parts_of_different_distances_select_beside_each_other():
    """Each part has its own measure: KL, the change of an unroll's own features, nearness to the newest ones."""
    selector = Selector(
        {
            "by-kl": Selection("elite-1", 1, "kl"),
            "by-change": Selection("elite-1", 1, "l2"),
            "near": Selection("attentive", 1, "cosine", queue="queue"),
        },
        16,
    )
    numbers = np.array([1, 2, 3])
    first = np.array([[1, 0], [0, 1], [0, 3]], np.float32)
    later = np.array([[1, 0], [0, 2], [3, 3]], np.float32)
    for features, distances in ((first, [5, 5, 5]), (later, [2, 1, 0])):
        selector.add({"by-kl": (numbers, {"distance": np.array(distances, np.float32), "feature": features})})
    selector.add({"queue": (np.array([9]), {"distance": np.ones(1, np.float32), "feature": later[1:2]})})
    for table, kept in {"by-kl": [3], "by-change": [1], "near": [2]}.items():
        assert numbers[selector.keep(table, numbers, 0).positions].tolist() == kept


def test_attentive_replay_has_to_compare_features():
    with pytest.raises(ValueError, match="old: attentive replay compares features"):
        Selector({"old": Selection("attentive", 2, "kl", queue="queue")}, 16)


def test_an_annealed_selector_looks_at_the_first_of_its_candidates():
    selector = Selector({"old": Selection("elite-1", 2, "kl", anneal_updates=10)}, 16)
    numbers = np.arange(8)
    selector.add({"queue": (numbers, {"distance": np.arange(8, 0, -1).astype(np.float32)})})
    assert [selector.keep("old", numbers, updates).positions.tolist() for updates in (0, 5, 10)] == [
        [7, 6],
        [4, 3],
        [1, 0],
    ]


@pytest.mark.parametrize("measure", ["l2", "cosine"])
def test_attentive_replay_keeps_what_is_near_the_newest_unrolls(measure):
    selector = Selector({"old": Selection("attentive", 2, measure, queue="queue")}, 64)
    rng = np.random.default_rng(3)
    features = rng.normal(size=(40, 4)).astype(np.float32)
    numbers = np.arange(40)
    assert selector.keep("old", numbers[:8], 0).positions.tolist() == [0, 1]  # no newest unrolls yet
    for start in range(0, 40, 4):
        selector.add({"queue": (numbers[start : start + 4], {"feature": features[start : start + 4]})})
    query = np.mean(features[36:], axis=0).tolist()
    candidates = rng.choice(40, 8, replace=False)
    expected = sorted(candidates.tolist(), key=lambda number: slow_distance(features[number].tolist(), query, measure))
    assert candidates[selector.keep("old", candidates, 0).positions].tolist() == expected[:2]
