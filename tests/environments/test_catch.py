import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from apexrl.config.sections import EnvConfig
from apexrl.environments.catch import SWITCH_PERIOD_STEPS, Catch, MemoryCatch, SwitchingCatch
from apexrl.environments.vector import make_environment, take_step

LEFT, STAY, RIGHT = range(3)
STEPS = 9  # of an episode
MIDDLE = 3  # the paddle's first column


def first_frame(env, column):
    """Returns the first frame of an episode whose ball falls in a column."""
    for seed in range(1000):
        frame, _ = env.reset(seed=seed)
        if frame[0, column]:
            return frame
    raise AssertionError(f"no seed drops a ball in column {column}")


def play(env, column, actions):
    """Plays one episode with a ball in a column; returns its frames and its return."""
    frames, total = [first_frame(env, column)], 0.0
    for step, action in enumerate(actions):
        frame, reward, terminated, truncated, _ = env.step(action)
        assert terminated == (step == STEPS - 1) and not truncated
        frames.append(frame)
        total += reward
    return frames, total


def paddles(env, actions):
    """Takes actions through the ends of episodes; returns the paddle's column after each."""
    columns = []
    for action in actions:
        frame, _, terminated, _, _ = env.step(action)
        columns.append(frame[-1].argmax())
        if terminated:
            env.reset()
    return columns


def towards(column):
    """Returns the actions of an episode that catches a ball in a column."""
    way = column - MIDDLE
    return [LEFT if way < 0 else RIGHT] * abs(way) + [STAY] * (STEPS - abs(way))


@pytest.mark.parametrize("name", ["Catch-v0", "MemoryCatch-v0", "SwitchingCatch-v0"])
def test_gymnasium_finds_nothing_wrong_and_every_variant_looks_the_same(name):
    check_env(gymnasium.make(name).unwrapped, skip_render_check=True)
    envs = make_environment(EnvConfig(env=name), 2)
    spec = envs.spec
    envs.close()
    assert (spec.frame_shape, spec.frame_dtype, spec.stacked_frames, spec.num_actions) == ((10, 7), "uint8", 1, 3)


@pytest.mark.parametrize("make", [Catch, MemoryCatch])
@pytest.mark.parametrize("column", range(7))
def test_who_knows_the_column_catches_the_ball(make, column):
    assert play(make(), column, towards(column))[1] == 1
    assert play(make(), column, towards((column + 3) % 7))[1] == -1


def test_catch_shows_the_ball_in_every_frame():
    frames, _ = play(Catch(), 1, [STAY] * STEPS)
    assert [np.argwhere(frame).tolist() for frame in frames] == [
        *([[row, 1], [9, MIDDLE]] for row in range(STEPS)), [[9, 1], [9, MIDDLE]]
    ]  # fmt: skip


def test_memory_catch_shows_the_ball_in_the_first_frame_of_each_episode_only():
    env = MemoryCatch()
    for column in (1, 5, 3):
        frames, _ = play(env, column, [STAY] * STEPS)
        assert np.argwhere(frames[0]).tolist() == [[0, column], [9, MIDDLE]]
        assert all(np.argwhere(frame).tolist() == [[9, MIDDLE]] for frame in frames[1:])


def test_without_memory_three_balls_of_seven_are_caught_at_best():
    """After the first step nothing tells the balls apart, so each of its three actions leads to one column in the end.

    Here the way goes on with STAY, so the columns are those beside the middle.
    """
    wins = []
    for first in (LEFT, STAY, RIGHT):
        games = [play(MemoryCatch(), column, [first] + [STAY] * (STEPS - 1)) for column in range(7)]
        assert len({np.stack(frames[1:]).tobytes() for frames, _ in games}) == 1
        wins.append([column for column, (_, total) in enumerate(games) if total > 0])
    assert wins == [[2], [3], [4]]


def test_switching_catch_exchanges_left_and_right_through_episodes():
    env = SwitchingCatch(switch_period_steps=4)
    env.reset(seed=0)
    # Nine steps an episode: switches come after steps 4 and 8, and in the second episode after 12 and 16.
    assert paddles(env, [LEFT] * 18) == [2, 1, 0, 0, 1, 2, 3, 4, 3, *[2, 1, 0, 1, 2, 3, 4, 3, 2]]
    assert paddles(env, [STAY] * 3) == [3, 3, 3]
    assert play(env, 0, [STAY] * STEPS)[0][4][4, 0] == 255  # the ball falls as ever


def test_eight_environments_switch_every_30_000_steps_by_default():
    """A reset is an agent step that no environment counts, so that the period is one of transitions."""
    assert 8 * SWITCH_PERIOD_STEPS == 30_000
    envs = make_environment(EnvConfig(env="SwitchingCatch-v0"), 8)
    envs.reset(seed=0)
    before, transitions, switched_at = None, np.zeros(8, int), None
    while switched_at is None:
        step = take_step(envs, np.full(8, LEFT))
        transitions += ~step.starts
        paddle = step.frames[:, -1].argmax(axis=1)
        if before is not None and (paddle > before)[~step.starts].any():
            assert (paddle > before)[~step.starts].all()
            switched_at = transitions.sum()
        before = paddle
    envs.close()
    assert switched_at == 30_000 + 8  # the first step after the switch


def test_the_period_is_given_at_registration():
    gymnasium.register("OftenSwitchingCatch-v0", entry_point=SwitchingCatch, kwargs={"switch_period_steps": 1})
    envs = make_environment(EnvConfig(env="OftenSwitchingCatch-v0"), 1)
    envs.reset(seed=0)
    steps = [take_step(envs, np.array([LEFT])) for _ in range(4)]
    envs.close()
    gymnasium.registry.pop("OftenSwitchingCatch-v0")
    assert [step.frames[0, -1].argmax() for step in steps] == [2, 3, 2, 3]
