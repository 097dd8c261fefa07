import numpy as np
import pytest

from apexrl.agents.exploration import epsilon_greedy, epsilon_ladder
from apexrl.types import FORBIDDEN


def test_ladder_of_the_paper():
    ladder = epsilon_ladder(np.arange(360), 360)
    assert ladder[0] == pytest.approx(0.4)
    assert ladder[-1] == pytest.approx(0.4**8)
    assert np.allclose(ladder[1:] / ladder[:-1], 0.4 ** (7 / 359))


def test_one_slot_takes_the_middle_of_the_ladder():
    assert epsilon_ladder(np.array([0]), 1) == pytest.approx(0.4**4.5)


def test_a_slot_outside_the_ladder_is_an_error():
    with pytest.raises(ValueError, match=r"slots 3\.\.8"):
        epsilon_ladder(np.array([3, 8]), 8)


def test_forbidden_actions_are_never_drawn_and_the_others_equally_often():
    rng = np.random.default_rng(0)
    q_values = np.tile(np.float32([0.0, FORBIDDEN, -3.0, FORBIDDEN]), (40_000, 1))
    q_values[::2] = [FORBIDDEN, -1.0, -0.5, 0.2]
    actions = epsilon_greedy(q_values, np.full(40_000, 0.6), rng)
    few, more = np.bincount(actions[1::2], minlength=4) / 20_000, np.bincount(actions[::2], minlength=4) / 20_000
    assert few == pytest.approx([0.7, 0, 0.3, 0], abs=0.01) and few[1] == few[3] == more[0] == 0
    assert more == pytest.approx([0, 0.2, 0.2, 0.6], abs=0.01)


def test_epsilon_is_the_share_of_uniform_actions():
    rng = np.random.default_rng(0)
    q_values = np.tile([0.0, 1.0, 0.5, 0.2], (40_000, 1))
    for epsilon in (0.0, 0.3, 1.0):
        actions = epsilon_greedy(q_values, np.full(40_000, epsilon), rng)
        frequencies = np.bincount(actions, minlength=4) / 40_000
        expected = np.full(4, epsilon / 4) + np.array([0, 1 - epsilon, 0, 0])
        assert frequencies == pytest.approx(expected, abs=0.01)
