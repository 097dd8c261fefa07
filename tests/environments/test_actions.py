"""The actions of an environment as an agent has them, and on their way back."""

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete

from apexrl.bounds import clipped
from apexrl.config.sections import EnvConfig
from apexrl.environments.actions import Actions
from apexrl.environments.vector import make_environment
from apexrl.errors import ConfigError

FLOAT32 = np.finfo(np.float32)


@pytest.mark.parametrize(
    ("space", "bounds", "own", "taken"),
    [
        (Box(-1, 1, (2, 2), np.float32), ((-1.0, 1.0),) * 4, [[0, 9, -9, 0.5]], [[[0, 1], [-1, 0.5]]]),
        (Box(-2.0, 2.0, (), np.float64), ((-2.0, 2.0),), [[3.0], [-1.0]], [2, -1]),
        (MultiDiscrete([2, 3], start=[1, 0]), (), [0, 1, 3, 5], [[1, 0], [1, 1], [2, 0], [2, 2]]),
        (MultiDiscrete([[2], [2]]), (), [2], [[[1], [0]]]),
        (MultiBinary(3), (), [0, 6, 7], [[0, 0, 0], [1, 1, 0], [1, 1, 1]]),
        (Discrete(3, start=-1), (), [0, 2], [-1, 1]),
        (Discrete(3, start=2**40), (), [0, 2], [2**40, 2**40 + 2]),
    ],
)
def test_actions_of_every_shape_are_given_back(space, bounds, own, taken):
    actions, own = Actions("Any-v0", space), np.array(own)
    own = clipped(own, bounds) if bounds else own
    assert actions.bounds == bounds and actions.taken(own).tolist() == taken
    back = actions.had(actions.taken(own))
    assert back.dtype == (np.float32 if bounds else np.int32) and back.tolist() == own.tolist()
    assert all(space.contains(np.asarray(action)) for action in gymnasium.vector.utils.iterate(
        gymnasium.vector.utils.batch_space(space, len(own)), actions.taken(own)))  # fmt: skip


@pytest.mark.parametrize("env", ["Halves-v0", "Vector-actions-v0"])
def test_what_an_environment_gets_is_what_the_log_has(env):
    """An environment whose actions are less precise than float32, too."""
    envs = make_environment(EnvConfig(f"tests.environments.odd_envs:{env}"), 1)
    envs.reset(seed=0)
    logged = envs.send(np.float32([[-0.0726944, 2.242228]]))
    assert logged.dtype == np.float32 and envs.receive().frames.tolist() == logged.tolist()
    envs.close()


def test_several_discrete_numbers_are_one_with_each_combination_once():
    actions = Actions("Any-v0", MultiDiscrete([2, 3, 4]), ["a", "b"])
    assert actions.num == 24 == len({tuple(action) for action in actions.taken(np.arange(24)).tolist()})
    assert actions.names == () and Actions("Any-v0", MultiBinary(1), ["off", "on"]).names == ("off", "on")


@pytest.mark.parametrize(
    ("space", "complaint"),
    [
        (Box(-np.inf, np.inf, (2,), np.float32), "a Box needs finite bounds, the least below the greatest: give"),
        (Box(-FLOAT32.max, FLOAT32.max, (2,), np.float32), r"a Box needs bounds from -1e\+12 to 1e\+12: give"),
        (Box(np.array([-1, -1e13]), np.array([1, 1]), dtype=np.float64), r"a Box needs bounds from -1e\+12 to 1e\+12"),
        (Box(1e8, 1e8 + 1, (1,), np.float64), "a Box needs bounds that differ as floats of 32 bits, too: give"),
        (Box(0, FLOAT32.smallest_subnormal, (1,), np.float32), "a Box needs bounds that differ as floats of 32 bits"),
        (MultiBinary(15_000), r"these have more than 10\*\*4515 combinations, and 128 are the most"),
        (MultiDiscrete([10] * 20), r"these have more than 10\*\*19 combinations"),
        (MultiDiscrete([10] * 17), "these have 100,000,000,000,000,000 combinations"),
        (MultiDiscrete([129]), "these have 129 combinations"),
        (MultiDiscrete([]), "these are no numbers at all"),
    ],
)
def test_spaces_that_no_network_or_log_can_use_are_refused_with_a_line(space, complaint):
    with pytest.raises(ConfigError, match=complaint):
        Actions("Any-v0", space)
    if isinstance(space, Box):
        Actions("Any-v0", Box(-1e12, 1e12, (1,), np.float64))


@pytest.mark.parametrize("bound", [0.1, 0.3, 0.7, 1 / 3])
def test_actions_lie_within_bounds_that_float32_does_not_have(bound):
    space = Box(-bound, bound, (2,), np.float64)
    actions = Actions("Any-v0", space)
    taken = actions.taken(clipped(np.array([[9.0, -9.0]]), actions.bounds))
    assert (
        taken.dtype == np.float64 and space.contains(taken[0]) and taken[0].tolist() == pytest.approx([bound, -bound])
    )
