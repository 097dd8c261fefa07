import math

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from apexrl.config.sections import EnvConfig
from apexrl.environments.corridor import LEFT, MAX_EPISODE_STEPS, RIGHT, Corridor
from apexrl.environments.vector import make_environment, take_step
from tests.environments.corridor_exact import (
    actor_critic_right,
    best_return_with_memory,
    best_right,
    mean_return,
    values,
    visits,
)

CONFIG = EnvConfig(env="Corridor-v0")
ROUTES = {0: [], 1: [RIGHT], 2: [RIGHT, LEFT]}  # by state: the actions that lead there


def rewards_until_the_goal(actions):
    """Returns the rewards of an episode up to its end, and whether the goal was reached."""
    env = Corridor()
    env.reset(seed=0)
    rewards = []
    for action in actions:
        observation, reward, terminated, truncated, _ = env.step(action)
        assert observation.tolist() == [1.0] and not truncated
        rewards.append(reward)
        if terminated:
            return rewards, True
    return rewards, False


def random_steps(right, num_envs, num_steps, seed):
    """Returns the time steps of a blind policy."""
    rng = np.random.default_rng(seed)
    envs = make_environment(CONFIG, num_envs)
    envs.reset(seed=seed)
    steps = [take_step(envs, (rng.random(num_envs) < right).astype(int)) for _ in range(num_steps)]
    envs.close()
    return steps


def test_gymnasium_finds_nothing_wrong():
    check_env(gymnasium.make("Corridor-v0").unwrapped, skip_render_check=True)


@pytest.mark.parametrize(
    ("state", "action", "steps_left"),
    [(0, LEFT, 3), (0, RIGHT, 2), (1, LEFT, 1), (1, RIGHT, 3), (2, LEFT, 2), (2, RIGHT, 0)],
)
def test_each_action_leads_where_the_book_says(state, action, steps_left):
    """A blind observer tells the states apart by the shortest way from there to the goal."""
    before = [*ROUTES[state], action]
    shortest = [RIGHT, LEFT, RIGHT][3 - steps_left :]
    rewards, is_at_goal = rewards_until_the_goal([*before, *shortest])
    assert is_at_goal and rewards == [-1.0] * (len(before) + steps_left)
    if steps_left:
        assert not rewards_until_the_goal([*before, *shortest[:-1]])[1]


def test_its_spec_is_of_one_number_and_two_actions():
    envs = make_environment(CONFIG, 2)
    spec = envs.spec
    assert (spec.frame_shape, spec.frame_dtype, spec.stacked_frames) == ((1,), "float32", 1)
    assert (spec.num_actions, spec.frames_per_step, spec.action_bounds) == (2, 1, ())
    assert envs.reset(seed=0).tolist() == [[1.0], [1.0]]
    envs.close()


def test_an_episode_that_reaches_the_goal_is_followed_by_a_reset_step():
    envs = make_environment(CONFIG, 2)
    envs.reset(seed=0)
    # The second environment goes right as the first, but left once more before it.
    actions = [[RIGHT, LEFT], [LEFT, RIGHT], [RIGHT, LEFT], [RIGHT, RIGHT], [RIGHT, RIGHT], [LEFT, RIGHT]]
    steps = [take_step(envs, np.array(action)) for action in actions]
    envs.close()
    assert [s.discounts.tolist() for s in steps] == [[1, 1], [1, 1], [0, 1], [1, 0], [1, 1], [1, 1]]
    assert [s.starts.tolist() for s in steps] == [[0, 0], [0, 0], [0, 0], [1, 0], [0, 1], [0, 0]]
    assert [s.rewards.tolist() for s in steps] == [[-1, -1], [-1, -1], [-1, -1], [0, -1], [-1, 0], [-1, -1]]
    assert [s.episode_steps.tolist() for s in steps] == [[0, 0], [0, 0], [3, 0], [0, 4], [0, 0], [0, 0]]
    assert (steps[2].episode_returns[0], steps[3].episode_returns[1]) == (-3, -4)


def test_the_time_limit_truncates_and_keeps_the_discount():
    envs = make_environment(CONFIG, 1)
    envs.reset(seed=0)
    steps = [take_step(envs, np.array([LEFT])) for _ in range(MAX_EPISODE_STEPS + 2)]
    envs.close()
    assert [i for i, s in enumerate(steps) if s.episode_steps[0]] == [MAX_EPISODE_STEPS - 1]
    assert steps[MAX_EPISODE_STEPS - 1].episode_returns[0] == -MAX_EPISODE_STEPS
    assert [i for i, s in enumerate(steps) if s.starts[0]] == [MAX_EPISODE_STEPS]
    assert all(s.discounts[0] == 1 for s in steps)


def test_the_book_s_numbers():
    assert best_right() == pytest.approx(2 - math.sqrt(2), abs=1e-6)
    assert mean_return(best_right()) == pytest.approx(-11.66, abs=0.005)
    assert [mean_return(0.05), mean_return(0.95)] == pytest.approx([-82, -44], abs=0.5)  # epsilon-greedy
    assert best_return_with_memory() == -3


@pytest.mark.parametrize(
    ("gamma", "rights"),
    [
        (1.0, [0.620, 0.601, 0.593, 0.589, 0.588, 0.586]),
        (0.99, [0.622, 0.603, 0.595, 0.591, 0.589, 0.587]),
        (0.95, [0.628, 0.609, 0.601, 0.597, 0.595, 0.593]),
        (0.9, [0.636, 0.618, 0.609, 0.605, 0.603, 0.602]),
    ],
)
def test_where_actor_critic_stands_still(gamma, rights):
    """The last column is of returns up to the end of the episode."""
    ours = [actor_critic_right(gamma, unroll_steps) for unroll_steps in (5, 10, 20, 40, 80, math.inf)]
    assert ours == pytest.approx(rights, abs=1e-3)


@pytest.mark.parametrize("right", [0.4, 0.595])
def test_the_chain_is_the_environment(right):
    steps = random_steps(right, num_envs=8, num_steps=4000, seed=1)
    returns = np.array([s.episode_returns for s in steps])
    returns = returns[np.isfinite(returns)]
    error = returns.std() / math.sqrt(len(returns))
    assert abs(returns.mean() - mean_return(right)) < 4 * error < 2
    assert mean_return(right) == pytest.approx(-1 / (visits(right)[2] * right))  # one of its steps reaches the goal


def test_discounted_values_are_those_of_played_episodes():
    gamma, right = 0.9, 0.5
    steps = random_steps(right, num_envs=8, num_steps=2000, seed=2)
    lengths = np.concatenate([s.episode_steps[s.episode_steps > 0] for s in steps])
    returns = -(1 - gamma**lengths) / (1 - gamma)
    error = returns.std() / math.sqrt(len(returns))
    assert abs(returns.mean() - values(right, gamma)[0]) < 4 * error
