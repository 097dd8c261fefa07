import re
import sys

import numpy as np
import pytest
from ale_py.vector_env import AtariVectorEnv

from apexrl.config.sections import EnvConfig
from apexrl.environments.vector import make_environment, take_step
from apexrl.errors import ConfigError
from apexrl.extras import PIP_INSTALL
from tests.streams import slow_stack

BREAKOUT = EnvConfig(env="BreakoutNoFrameskip-v4")


def play(envs, num_envs, num_steps, seed=0):
    rng = np.random.default_rng(seed)
    frames = [envs.reset(seed=seed)]
    steps = []
    for _ in range(num_steps):
        steps.append(take_step(envs, rng.integers(0, envs.spec.num_actions, num_envs)))
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


@pytest.mark.parametrize(
    ("max_episode_frames", "game_steps", "discount"),
    [(488, 122, 1), (480, 120, 0)],  # a life is lost with frame 480: eight frames before the limit, and right at it
)
def test_a_life_lost_near_the_frame_limit_does_not_end_the_game(max_episode_frames, game_steps, discount):
    config = EnvConfig(env="BreakoutNoFrameskip-v4", max_episode_frames=max_episode_frames)
    _, steps = play(make_environment(config, 1), 1, 130)
    assert steps[119].discounts[0] == 0
    ends = [(i + 1, int(s.episode_steps[0])) for i, s in enumerate(steps) if s.episode_steps[0]]
    assert ends == [(game_steps, game_steps)]
    assert steps[game_steps - 1].discounts[0] == discount
    assert [i for i, s in enumerate(steps) if s.starts[0]] == [game_steps]


@pytest.mark.parametrize("evaluate", [False, True])
def test_a_game_ends_although_the_emulator_still_counts_a_life(evaluate):
    envs = make_environment(EnvConfig(env="AdventureNoFrameskip-v4"), 1, evaluate=evaluate)
    _, steps = play(envs, 1, 580)
    end = next(i for i, s in enumerate(steps) if s.discounts[0] == 0)
    assert steps[end].episode_steps[0] == end + 1
    assert [i for i, s in enumerate(steps) if s.starts[0]] == [end + 1]


@pytest.mark.parametrize("game", ["Breakout", "Seaquest"])
def test_lost_lives_are_those_that_ale_reports(game):
    envs = make_environment(EnvConfig(env=f"{game}NoFrameskip-v4"), 2)
    theirs = AtariVectorEnv(game.lower(), 2, life_loss_info=True, reward_clipping=False, stack_num=1)
    envs.reset(seed=0)
    theirs.reset(seed=0)
    rng = np.random.default_rng(0)
    lost = 0
    for _ in range(600):
        actions = rng.integers(0, envs.spec.num_actions, 2).astype(np.int32)
        seen = take_step(envs, actions)
        _, _, terminated, _, _ = theirs.step(actions)
        assert np.array_equal(seen.discounts == 0, terminated)
        lost += terminated.sum()
    assert lost > 5
    envs.close()
    theirs.close()


def test_a_game_begins_with_fire_unless_it_is_told_not_to():
    def first_screens(**config):
        envs = make_environment(EnvConfig(env="BreakoutNoFrameskip-v4", **config), 2)
        screens = envs.reset(seed=0)
        envs.close()
        return screens

    theirs = AtariVectorEnv("breakout", 2, stack_num=1, use_fire_reset=False)
    without = first_screens(fire_at_reset=False)
    assert np.array_equal(without, theirs.reset(seed=0)[0][:, -1])
    assert not np.array_equal(without, first_screens())
    theirs.close()


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


@pytest.mark.parametrize("env", ["ALE/Pong-v5", "PongNoFrameskip-v4", "PongNoFrameskip-v0"])
def test_ids_that_users_type(env):
    envs = make_environment(EnvConfig(env=env), 1)
    assert envs.reset(seed=0).shape == (1, 84, 84) and envs.spec.num_actions == 6
    envs.close()


@pytest.mark.parametrize(
    ("env", "complaint"),
    [
        ("Pongg-v4", "unknown environment"),
        ("tests.environments.odd_envs:Unbounded-actions-v0", "finite bounds.*TransformAction"),
        ("tests.environments.odd_envs:Integer-actions-v0", "supported are Discrete, .* and Box of floats"),
        ("tests.environments.odd_envs:Switches-v0", "4,096 combinations, and 128 are the most .* --wrapper .* fewer"),
        ("Pong-v4", "frameskip \\(2, 5\\).*ALE/Pong-v5.*PongNoFrameskip-v4"),
        ("Pong-v0", "frameskip \\(2, 5\\).*ALE/Pong-v5.*PongNoFrameskip-v4"),
        ("tests.environments.odd_envs:Pong-skip-5-v0", "frameskip 5.*PongNoFrameskip-v4"),
        ("tests.environments.odd_envs:Pong-ram-v0", "is registered with obs_type: register it without"),
        ("tests.environments.odd_envs:NoSuchRom-v0", "cannot be made"),
        (
            "tests.environments.odd_envs:Fails-v0",
            "cannot be made: ZeroDivisionError: the board has no fields, so it is not one$",
        ),
        ("tests.environments.odd_envs:Nowhere-v0", "cannot be made: .*no_such_module"),
        ("tests.environments.odd_envs:Words-v0", "observations.*cannot be flattened: give a --wrapper module:name"),
        ("tests.environments.odd_envs:Words-in-dict-v0", "observations.*cannot be flattened: give a --wrapper"),
        (
            "tests.environments.odd_envs:Without-box2d-v0",
            r"made: Box2D is not installed: say `\S*/bin/python\S* -m pip install 'gymnasium\[box2d\]>=1.1,<2'`$",
        ),
        ("tests.environments.odd_envs:Without-jax-v0", r'/bin/python\S* -m pip install "gymnasium\[jax\]"`$'),
        ("no_such_module:Env-v0", "no_such_module cannot be imported: .*searched in .*, too"),
    ],
)
def test_an_environment_that_cannot_be_played_is_refused_in_one_line(env, complaint):
    with pytest.raises(ConfigError, match=complaint) as caught:
        make_environment(EnvConfig(env=env), 1, render=True)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("error", ["RuntimeError('no licence')", "SystemExit(3)"])
def test_a_module_that_fails_at_its_import_is_named(tmp_path, monkeypatch, error):
    (tmp_path / "failing_module.py").write_text(f"raise {error}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=f"failing_module:Any-v0.*{error.partition('(')[0]}"):
        make_environment(EnvConfig(env="failing_module:Any-v0"), 1)


def test_texts_are_left_out_by_name(caplog):
    envs = make_environment(EnvConfig(env="tests.environments.odd_envs:Text-in-dict-v0"), 1)
    assert envs.spec.frame_shape == (2,) and "observations without both, t, which cannot be flattened" in caplog.text
    envs.close()


def test_keys_that_cannot_be_flattened_are_left_out_by_name(caplog):
    envs = make_environment(EnvConfig(env="tests.environments.odd_envs:Mission-v0"), 3)
    assert envs.spec.frame_shape == (4 + 12,)
    assert envs.reset(seed=0).tolist() == [[0, 0, 1, 0] + [7] * 12] * 3
    assert [record.getMessage() for record in caplog.records] == [
        "tests.environments.odd_envs:Mission-v0: observations without mission, which cannot be flattened"
    ]
    envs.close()


@pytest.mark.parametrize("env", ["Channels-last-v0", "Board-v0"])
def test_pictures_with_their_channels_last_stay_as_they_are(env):
    envs = make_environment(EnvConfig(env=f"tests.environments.odd_envs:{env}"), 1)
    assert envs.spec.frame_shape in ((96, 96, 3), (8, 8, 111)) and envs.spec.frame_dtype == "uint8"
    envs.close()


def test_an_environment_without_pictures_says_why(caplog):
    envs = make_environment(EnvConfig(env="tests.environments.odd_envs:Function-v0"), 1, render=True)
    envs.reset(seed=0)
    assert envs.render() is None
    assert "render_modes" in caplog.text and "Function-v0" in caplog.text
    envs.close()


def test_a_function_that_names_its_render_modes_gives_pictures(caplog):
    envs = make_environment(EnvConfig(env="tests.environments.odd_envs:Function-with-pictures-v0"), 1, render=True)
    envs.reset(seed=0)
    assert envs.render().shape == (160, 112, 3)
    assert not caplog.records
    envs.close()


@pytest.mark.parametrize("pictures", ["no-screen", "no-display", "letters", "gray"])
def test_games_go_on_when_their_pictures_fail(pictures, caplog):
    envs = make_environment(EnvConfig(env=f"tests.environments.odd_envs:Filmed-{pictures}-v0"), 1, render=True)
    envs.reset(seed=0)
    for _ in range(3):
        assert envs.render() is None and take_step(envs, np.zeros(1, int)).frames.shape == (1, 2)
    (record,) = caplog.records
    assert record.getMessage().startswith("no pictures of this environment: ")
    envs.close()


def test_a_game_whose_drawing_lacks_a_package_says_the_command_that_installs_it_here(caplog, monkeypatch):
    monkeypatch.setitem(sys.modules, "pygame", None)
    envs = make_environment(EnvConfig(env="CartPole-v1"), 1, render=True)
    envs.reset(seed=0)
    assert envs.render() is None
    (record,) = caplog.records
    form = rf"no pictures of this environment: .*pygame is not installed.*`{re.escape(PIP_INSTALL)} \W?gymnasium\["
    assert re.match(form, record.getMessage())
    envs.close()


def test_infos_of_copies_may_differ():
    envs = make_environment(EnvConfig(env="tests.environments.odd_envs:Informed-v0"), 8)
    envs.reset(seed=0)
    steps = [take_step(envs, np.zeros(8, int)) for _ in range(40)]
    assert len({int(n) for step in steps for n in step.episode_steps}) > 3, "the copies end at different times"
    envs.close()


def test_another_game_with_an_argument_of_ataris_is_none():
    envs = make_environment(EnvConfig(env="tests.environments.odd_envs:Chess-v0"), 1)
    assert envs.spec.frame_shape == (10, 10, 4)
    envs.close()


@pytest.mark.parametrize(
    ("kwargs", "frames", "steps"),
    [("", 108_000, 200), ('{"max_episode_steps": 250}', 108_000, 250), ('{"max_episode_steps": 250}', 30, 30)],
)
def test_an_episode_ends_at_the_lower_of_two_limits(kwargs, frames, steps, caplog):
    envs = make_environment(EnvConfig("MountainCar-v0", env_kwargs=kwargs, max_episode_frames=frames), 1)
    envs.reset(seed=0)
    ended = [take_step(envs, np.ones(1, int)).episode_steps[0] for _ in range(steps)]
    assert ended[-1] == steps and not any(ended[:-1])
    envs.close()


def test_a_limit_that_cannot_be_had_by_its_flag_is_said(caplog):
    with caplog.at_level("INFO"):
        make_environment(EnvConfig("MountainCar-v0", max_episode_frames=1000), 1).close()
    assert """'{"max_episode_steps": 1000}' lets them last""" in caplog.text


def test_discrete_observations_become_vectors():
    envs = make_environment(EnvConfig(env="FrozenLake-v1"), 2)
    assert envs.spec.frame_shape == (16,) and envs.reset(seed=0).sum() == 2
    envs.close()


def test_vectors_of_actions_have_bounds_and_are_clipped_to_them():
    config = EnvConfig(env="Pendulum-v1")
    steps = []
    for scale in (1, 7):
        envs = make_environment(config, 3)
        spec = envs.spec
        assert (spec.num_actions, spec.action_bounds, spec.frame_shape) == (0, ((-2.0, 2.0),), (3,))
        assert (spec.action.dtype, spec.action.shape) == ("float32", (1,))
        envs.reset(seed=0)
        steps.append(take_step(envs, scale * np.array([[2], [-2], [0]], np.float32)))
        envs.close()
    assert steps[0].frames.dtype == np.float32
    assert np.array_equal(steps[0].frames, steps[1].frames) and np.array_equal(steps[0].rewards, steps[1].rewards)


def test_each_number_of_an_action_has_its_own_bounds():
    config = EnvConfig(env="tests.environments.odd_envs:Vector-actions-v0")
    envs = make_environment(config, 2)
    assert envs.spec.action_bounds == ((-1.0, 0.0), (2.0, 5.0))
    envs.reset(seed=0)
    step = take_step(envs, np.array([[-9, 9], [-0.5, 3]], np.float32))  # this environment shows its action
    assert step.frames.tolist() == [[-1.0, 5.0], [-0.5, 3.0]]
    envs.close()


ALL_ACTIONS = (
    "noop fire up right left down upright upleft downright downleft upfire rightfire leftfire downfire uprightfire "
    "upleftfire downrightfire downleftfire"
)


@pytest.mark.parametrize(
    ("env", "names"),
    [
        ("PongNoFrameskip-v4", "noop fire right left rightfire leftfire"),
        ("tests.environments.odd_envs:Pong-all-actions-v0", ALL_ACTIONS),
        ("Catch-v0", "left stay right"),
        ("Corridor-v0", "left right"),
        ("CartPole-v1", ""),
        ("Pendulum-v1", ""),
    ],
)
def test_actions_have_the_names_that_their_environment_gives(env, names):
    config = EnvConfig(env=env)
    envs = make_environment(config, 1)
    assert envs.spec.action_names == tuple(names.split())
    envs.close()


@pytest.mark.parametrize("env", ["CartPole-v1", "PongNoFrameskip-v4"])
def test_discrete_actions_have_no_bounds(env):
    config = EnvConfig(env=env)
    envs = make_environment(config, 1)
    spec = envs.spec
    assert spec.num_actions > 0 and spec.action_bounds == ()
    envs.close()
