"""Attentive and elite replay: a learner keeps the most relevant of the candidates that a table hands out.

The rules are pure functions of uses and distances, in which the first of equal candidates goes first. `Findings` knows
both of each unroll from the updates that used it. `Selector` puts them together; one thread owns it.

An unroll that was never used has no uses and distance 0, as its actor's own policy has. A learner that restarts forgets
all findings; an unroll is found anew when it is used.

Source: Sun, Zhou and Li, Attentive Experience Replay, AAAI 2020, for transitions. Elite replay compares an unroll with
itself instead: the policy that acted, or its features when it was first used.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch

from apexrl.agents.replaying.mix import Distance, Selection
from apexrl.losses.relevance import feature_distances


class Kept(NamedTuple):
    """The candidates of one batch that are kept."""

    positions: np.ndarray  # [b] among the candidates
    metrics: dict[str, float]


def elite(rule: str, num_kept: int, distances: np.ndarray, uses: np.ndarray) -> np.ndarray:
    """Returns the positions [b] of the candidates [n] that a rule keeps; all of them where there are no more than b.

    elite-1 keeps the smallest distances, elite-3 the least used, and of those the smallest distances. The other two
    divide the candidates by distance into b groups of about the same size, and keep one of each: elite-2 the smallest
    distance, elite-4 the least used.
    """
    if rule == "elite-3":
        return np.lexsort((distances, uses))[:num_kept]
    order = np.argsort(distances, kind="stable")
    if rule == "elite-1" or len(order) <= num_kept:
        return order[:num_kept]
    groups = np.array_split(order, num_kept)
    if rule == "elite-2":
        return np.array([group[0] for group in groups])
    return np.array([group[np.argmin(uses[group])] for group in groups])


def num_candidates(num_given: int, num_kept: int, num_updates: int, anneal_updates: int) -> int:
    """Returns how many of the candidates given count at an update: all at the first, b after `anneal_updates`."""
    if not anneal_updates:
        return num_given
    left = max(1 - num_updates / anneal_updates, 0.0)
    return num_kept + round(left * (num_given - num_kept))


class Findings:
    """Uses, distances and features of the newest unrolls, as updates found them, by unroll number."""

    def __init__(self, ring_unrolls: int):
        self._numbers = np.full(ring_unrolls, -1, np.int64)
        self._uses = np.zeros(ring_unrolls, np.int64)
        self._distances = np.zeros(ring_unrolls, np.float32)
        self._first = self._newest = np.zeros((0, 0), np.float32)  # [ring, n] features, where some came

    def add(self, numbers: np.ndarray, rows: Mapping[str, np.ndarray]) -> None:
        """Takes the results of an update for unrolls [M] that the ring held at one time, none of them twice.

        Args:
          rows: `distance` [M] from the policy, `feature` [M, n]: one of them or both.
        """
        numbers, rows = self._current(numbers, rows)
        positions = numbers % len(self._numbers)
        new = self._numbers[positions] != numbers
        self._numbers[positions] = numbers
        self._uses[positions] = np.where(new, 0, self._uses[positions]) + 1
        if "distance" in rows:
            self._distances[positions] = rows["distance"]
        if "feature" in rows:
            features = rows["feature"]
            if not self._first.size:
                self._first, self._newest = (
                    np.zeros((len(self._numbers), features.shape[1]), np.float32) for _ in "12"
                )
            self._first[positions[new]] = features[new]
            self._newest[positions] = features

    def uses(self, numbers: np.ndarray) -> np.ndarray:
        """Returns the updates [M] that used unrolls."""
        return np.where(self._is_known(numbers), self._uses[numbers % len(self._numbers)], 0)

    def distances(self, numbers: np.ndarray, measure: Distance, query: np.ndarray | None = None) -> np.ndarray:
        """Returns the distances [M] of unrolls, as they were at their last use.

        Args:
          measure: kl for those from the policy; others compare features.
          query: the feature [n] to compare with; None: that of each unroll at its first use.
        """
        positions = numbers % len(self._numbers)
        if measure == "kl":
            found = self._distances[positions]
        elif not self._newest.size:
            found = np.zeros(len(numbers), np.float32)
        else:
            others = self._first[positions] if query is None else query
            features = torch.from_numpy(self._newest[positions])
            found = feature_distances(features, torch.from_numpy(others), measure).numpy()
        return np.where(self._is_known(numbers), found, 0)

    def _is_known(self, numbers: np.ndarray) -> np.ndarray:
        return self._numbers[numbers % len(self._numbers)] == numbers

    def _current(self, numbers: np.ndarray, rows: Mapping[str, np.ndarray]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Returns the results without those whose place a newer unroll has taken."""
        current = self._numbers[numbers % len(self._numbers)] <= numbers
        return numbers[current], {name: values[current] for name, values in rows.items()}


class Selector:
    """Keeps some candidates of each batch. Owned by one thread.

    A program that learns from `apexrl.net` uses it as our learner does: `keep` what a batch offers, `add` the results.
    """

    def __init__(self, selections: Mapping[str, Selection], ring_unrolls: int):
        """Makes a selector without findings.

        Args:
          selections: by table.
          ring_unrolls: unrolls that the server can hold.
        Raises: ValueError where attentive replay is to compare anything but features.
        """
        for table, selection in selections.items():
            if selection.rule == "attentive" and selection.distance == "kl":
                raise ValueError(f"{table}: attentive replay compares features: the distance has to be l2 or cosine")
        self._selections = dict(selections)
        self._findings = Findings(ring_unrolls)
        self._queries: dict[str, np.ndarray] = {}  # by table: the mean feature [n] of its newest batch

    def keep(self, table: str, numbers: np.ndarray, num_updates: int) -> Kept:
        """Returns which of the candidates [n] of a table to learn from."""
        selection = self._selections[table]
        fewest = min(selection.num_kept, len(numbers))
        numbers = numbers[: num_candidates(len(numbers), fewest, num_updates, selection.anneal_updates)]
        uses, distances = self._findings.uses(numbers), self._distances(selection, numbers)
        rule = "elite-1" if selection.rule == "attentive" else selection.rule
        kept = elite(rule, selection.num_kept, distances, uses)
        metrics = {
            "candidates": float(len(numbers)),
            "distance_candidates": float(distances.mean()),
            "distance_kept": float(distances[kept].mean()),
            "uses_kept": float(uses[kept].mean()),
        }
        return Kept(kept, metrics)

    def add(self, results: Mapping[str, tuple[np.ndarray, Mapping[str, np.ndarray]]]) -> None:
        """Takes the numbers [M] of the unrolls of an update, and their results, by table; see `Findings.add`."""
        for table, (numbers, rows) in results.items():
            self._findings.add(numbers, rows)
            if "feature" in rows and len(numbers):
                self._queries[table] = rows["feature"].mean(axis=0)

    def _distances(self, selection: Selection, numbers: np.ndarray) -> np.ndarray:
        if selection.rule != "attentive":
            return self._findings.distances(numbers, selection.distance)
        query = self._queries.get(selection.queue)
        if query is None:
            return np.zeros(len(numbers), np.float32)
        return self._findings.distances(numbers, selection.distance, query)
