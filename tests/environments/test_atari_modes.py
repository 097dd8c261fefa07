"""Games of Atari in modes and difficulties, against ale-py's vector environment, which has only the usual ones."""

import contextlib

import numpy as np
import pytest
from ale_py.vector_env import AtariVectorEnv

from apexrl.config.sections import EnvConfig
from apexrl.environments.atari_modes import ModeGames
from apexrl.environments.vector import make_environment, take_step

OPTIONS = {
    "max_num_frames_per_episode": 1100, "repeat_action_probability": 0.0, "full_action_space": False, "noop_max": 1,
    "use_fire_reset": True,
}  # fmt: skip
COLOURS = {"img_height": 210, "img_width": 160, "grayscale": False}


@pytest.mark.parametrize(
    ("game", "options"), [("pong", OPTIONS), ("breakout", OPTIONS), ("breakout", OPTIONS | COLOURS)]
)
def test_the_usual_mode_is_played_as_ale_plays_it(game, options):
    """Frames, rewards, lives and both kinds of ends, over several games."""
    ours = ModeGames(game, 1, mode=0, difficulty=0, **options)
    theirs = AtariVectorEnv(game, 1, stack_num=1, reward_clipping=False, num_threads=1, **options)
    np.testing.assert_array_equal(ours.reset(3)[0], theirs.reset(seed=3)[0])
    assert ours.ale.get_action_set() == theirs.ale.get_action_set()
    rng, ends = np.random.default_rng(0), np.zeros(2, int)
    for _ in range(600):
        actions = rng.integers(0, len(ours.get_action_set()), 1).astype(np.int32)
        ours.send(actions)
        theirs.send(actions)
        (*found, info), (*expected, their_info) = ours.recv(), theirs.recv()
        for one, other in zip([*found, info["lives"]], [*expected, their_info["lives"]], strict=True):
            np.testing.assert_array_equal(one, other)
        ends += [int(found[2][0]), int(found[3][0])]
    assert ends.sum() >= 2
    theirs.close()


def first_frames(kwargs, env="ALE/Breakout-v5", num_envs=2, **options):
    config = EnvConfig(env, kwargs, noop_max=1)
    with contextlib.closing(make_environment(config, num_envs, **options)) as envs:
        frames = envs.reset(seed=0)
        for _ in range(30):
            steps = take_step(envs, np.zeros(num_envs, np.int32))
        assert frames.shape == (num_envs, 84, 84) and steps.frames.dtype == np.uint8
        return steps.frames, envs.render(), envs.spec


def test_a_mode_and_a_difficulty_are_played_and_filmed_and_are_part_of_the_environment():
    usual, _, _ = first_frames("")
    frames, picture, spec = first_frames('{"mode": 12}', render=True)
    assert not np.array_equal(frames, usual), "the bricks cannot be seen"
    assert picture.shape == (210, 160, 3) and spec.variant == '{"env_kwargs": {"mode": 12}}'
    hard, _, spec = first_frames('{"difficulty": 1, "full_action_space": true}')
    assert spec.num_actions == 18 and not np.array_equal(hard, usual), "the paddle is smaller"
    np.testing.assert_array_equal(first_frames('{"mode": 0}')[0], usual)


def test_an_id_that_is_registered_with_a_mode_is_played_in_it():
    frames, _, _ = first_frames("", "tests.environments.odd_envs:Pong-mode-1-v0")
    assert not np.array_equal(frames, first_frames('{"mode": 0}', "ALE/Pong-v5")[0])


def test_neighbours_play_games_of_their_own():
    games = ModeGames("breakout", 2, mode=4, difficulty=None, **OPTIONS | {"noop_max": 30})
    screens, info = games.reset(0)
    assert info["lives"].tolist() == [5, 5] and not np.array_equal(screens[0], screens[1])
