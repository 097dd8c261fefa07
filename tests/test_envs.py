import numpy as np
import pytest
from ale_py.vector_env import AtariVectorEnv

from apexrl.config import EnvConfig
from apexrl.envs import make_environment, take_step
from apexrl.errors import ConfigError
from tests.streams import slow_stack

BREAKOUT = EnvConfig(env="BreakoutNoFrameskip-v4")


def play(envs, num_envs, num_steps, seed=0):
    rng = np.random.default_rng(seed)
    frames = [envs.reset(seed=seed)]
    steps = []
    for _ in range(num_steps):
        steps.append(take_step(envs, rng.integers(0, envs.num_actions, num_envs)))
        frames.append(steps[-1].frames)
    envs.close()
    return frames, steps


def test_a_lost_life_is_terminal_for_learning_but_the_game_goes_on():
    _, steps = play(make_environment(BREAKOUT, 1), 1, 400)
    lost = [i for i, s in enumerate(steps) if s.discounts[0] == 0]
    ends = [i for i, s in enumerate(steps) if s.episode_steps[0]]
    resets = [i for i, s in enumerate(steps) if s.starts[0]]
    assert len(lost) >= 5 * len(ends) and len(ends) >= 1  # five lives a game
    assert resets == [i + 1 for i in ends if i + 1 < len(steps)]
    assert set(ends) <= set(lost)


def test_evaluation_sees_whole_games():
    _, steps = play(make_environment(BREAKOUT, 1, evaluate=True), 1, 400)
    ends = [i for i, s in enumerate(steps) if s.episode_steps[0]]
    assert [i for i, s in enumerate(steps) if s.discounts[0] == 0] == ends
    assert steps[ends[0]].episode_steps[0] == ends[0] + 1


def test_a_truncated_game_keeps_its_discount_and_shows_its_last_frame():
    config = EnvConfig(env="PongNoFrameskip-v4", max_episode_frames=400)
    frames, steps = play(make_environment(config, 1), 1, 150)
    end = next(i for i, s in enumerate(steps) if s.episode_steps[0])
    assert steps[end].discounts[0] == 1
    assert steps[end + 1].starts[0]
    assert not np.array_equal(frames[end + 1], frames[end + 2])  # the final one, and the first of the next game


def test_our_stacks_are_those_that_ale_makes():
    config = EnvConfig(env="PongNoFrameskip-v4", max_episode_frames=400)
    envs = make_environment(config, 3)
    theirs = AtariVectorEnv("pong", 3, max_num_frames_per_episode=400, reward_clipping=False, stack_num=4)
    observations = np.zeros((3, 4, 84, 84), np.uint8)
    observations[:, -1] = envs.reset(seed=7)
    assert np.array_equal(observations, theirs.reset(seed=7)[0])
    rng = np.random.default_rng(0)
    num_starts = 0
    for _ in range(250):
        actions = rng.integers(0, 6, 3).astype(np.int32)
        seen = take_step(envs, actions)
        observations = slow_stack(observations, seen)
        num_starts += seen.starts.sum()
        assert np.array_equal(observations, theirs.step(actions)[0])
    assert num_starts >= 6
    envs.close()
    theirs.close()


def test_rewards_are_clipped_for_training_and_returns_are_not():
    config = EnvConfig(env="SeaquestNoFrameskip-v4", max_episode_frames=4000)
    _, steps = play(make_environment(config, 2), 2, 1000)
    rewards = np.array([s.rewards for s in steps])
    returns = np.array([s.episode_returns for s in steps])
    assert set(np.unique(rewards)) == {0.0, 1.0}
    assert np.nanmax(returns) >= 20


@pytest.mark.parametrize("env", ["CartPole-v1", "PongNoFrameskip-v4"])
def test_a_second_reset_starts_new_games(env):
    envs = make_environment(EnvConfig(env=env, max_episode_frames=60), 2)
    lengths = []
    for _ in range(2):
        envs.reset(seed=3)
        steps = [take_step(envs, np.zeros(2, int)) for _ in range(40)]
        assert not steps[0].starts.any()
        lengths.append([s.episode_steps.tolist() for s in steps])
    envs.close()
    assert lengths[0] == lengths[1] and np.any(lengths[0])


def test_cartpole_returns_what_its_rules_say():
    _, steps = play(make_environment(EnvConfig(env="CartPole-v1"), 3), 3, 200)
    for s in steps:
        ended = s.episode_steps > 0
        assert (s.episode_returns[ended] == s.episode_steps[ended]).all()
        assert np.isnan(s.episode_returns[~ended]).all()


def test_the_picture_is_of_the_game_that_is_played():
    envs = make_environment(EnvConfig(env="PongNoFrameskip-v4"), 2, evaluate=True, render=True)
    frames = envs.reset(seed=5)
    rng = np.random.default_rng(0)
    for _ in range(60):
        picture = envs.render()
        assert picture.shape == (210, 160, 3) and picture.dtype == np.uint8
        gray = picture.astype(float).mean(axis=2)
        small = gray[: 210 // 5 * 5].reshape(42, 5, 40, 4).mean(axis=(1, 3))
        seen = frames[0].astype(float).reshape(42, 2, 42, 2).mean(axis=(1, 3))[:, :40]
        assert np.corrcoef(small[8:].ravel(), seen[8:].ravel())[0, 1] > 0.5
        frames = take_step(envs, rng.integers(0, 6, 2)).frames
    envs.close()


@pytest.mark.parametrize("env", ["ALE/Pong-v5", "PongNoFrameskip-v4", "Pong-v4"])
def test_ids_that_users_type(env):
    envs = make_environment(EnvConfig(env=env), 1)
    assert envs.reset(seed=0).shape == (1, 84, 84) and envs.num_actions == 6
    envs.close()


@pytest.mark.parametrize(
    ("env", "complaint"), [("Pongg-v4", "unknown environment"), ("Pendulum-v1", "discrete actions")]
)
def test_what_cannot_be_played_is_named(env, complaint):
    with pytest.raises(ConfigError, match=complaint):
        make_environment(EnvConfig(env=env), 1)


def test_discrete_observations_become_vectors():
    envs = make_environment(EnvConfig(env="FrozenLake-v1"), 2)
    assert envs.frame_shape == (16,) and envs.reset(seed=0).sum() == 2
    envs.close()
