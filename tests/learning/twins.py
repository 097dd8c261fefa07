"""Two worlds that make the same updates, each in its own way: every update is compared."""

from typing import Literal

import numpy as np
import pytest
import torch

from tests.devices import CPU

How = Literal["exactly", "closely", "loosely"]


def update_both(first, second, one, other, how: How = "exactly"):
    """Makes an update in each of two worlds, and compares priorities, metrics and states.

    On a GPU the comparison is loose: libraries choose other convolutions for a graph, whose sums round otherwise, and
    optimizers make small differences large. So each update begins from the same state there.

    Args:
      one, other: make the updates; they return the priorities, or nothing, and the metrics.
    """
    if first.device != CPU:
        how = "loosely"
    if how == "loosely":
        second.updater.load_state_dict(state_of(first), first.updater.num_updates)
    before = state_of(first)
    (priorities, metrics), (expected, expected_metrics) = one(), other()
    after, expected_after = state_of(first), state_of(second)
    assert after.keys() == expected_after.keys() and metrics.keys() == expected_metrics.keys()
    if how == "loosely":
        assert distance(priorities, expected) < 0.02
        for name, value in expected_metrics.items():
            assert metrics[name] == pytest.approx(value, rel=0.05, abs=0.02), f"{name}: {metrics[name]}, not {value}"
        moves = (
            np.concatenate([(state[name] - before[name]).flatten() for name in before if name.startswith("acting.")])
            for state in (after, expected_after)
        )
        assert distance(*moves) < 0.3
        return
    error = 0.0 if how == "exactly" else 1e-4
    assert priorities == pytest.approx(expected, rel=error, abs=error / 10)
    assert metrics == pytest.approx(expected_metrics, rel=error, abs=error / 10)
    for name in after:
        assert torch.allclose(after[name], expected_after[name], rtol=error, atol=error / 10), name


def state_of(world):
    return {name: tensor.detach().cpu().clone() for name, tensor in world.updater.state_dict().items()}


def distance(found, expected):
    """The length of the difference of two vectors, as a share of the second's."""
    found, expected = np.asarray(found), np.asarray(expected)
    return np.linalg.norm(found - expected) / max(np.linalg.norm(expected), 1e-12)
