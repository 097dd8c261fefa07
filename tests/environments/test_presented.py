"""The flags that say how an environment is presented: its arguments, wrappers, pictures and stacks."""

import numpy as np
import pytest

from apexrl.config.sections import EnvConfig
from apexrl.environments.vector import make_environment, take_step
from apexrl.errors import ApexError, ConfigError

ODD = "tests.environments.odd_envs"
PAINTED = f"{ODD}:Painted-v0"
BOTH = (f"{ODD}:in_a_dictionary", f"{ODD}:only_the_picture")
FIRST = '{"is_first": true}'


def first_frame(config):
    """The first observation, and the spec."""
    envs = make_environment(config, 2)
    frames, spec = envs.reset(seed=0), envs.spec
    assert frames.shape == (2, *spec.frame_shape) and frames.dtype == spec.frame_dtype
    assert take_step(envs, np.zeros(2, int)).frames.shape == frames.shape
    envs.close()
    return frames[0], spec


def test_arguments_reach_the_environment_and_are_part_of_its_spec():
    frame, spec = first_frame(EnvConfig(PAINTED, env_kwargs='{"width": 64,   "channels": 4}'))
    assert frame.shape == (48, 64, 4)
    assert spec.env == PAINTED and spec.variant == '{"env_kwargs": {"channels": 4, "width": 64}}'
    assert first_frame(EnvConfig(PAINTED))[1].variant == ""


def test_a_spec_gives_its_environment_back():
    config = EnvConfig(PAINTED, '{"width": 64}', BOTH, True, (20, 30), 3)
    spec = first_frame(config)[1]
    assert EnvConfig.of_variant(spec.env, spec.variant, spec.stacked_frames) == config
    with pytest.raises(ConfigError, match="are no settings of Some-v0"):
        EnvConfig.of_variant("Some-v0", "[]", 1)


@pytest.mark.parametrize("channels", [3, 4, 8])
@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_pictures_with_their_channels_first_are_turned(channels, dtype):
    arguments = f'{{"channels": {channels}, "dtype": "{dtype}"'
    first, _ = first_frame(EnvConfig(PAINTED, env_kwargs=arguments + ', "is_first": true}'))
    last, _ = first_frame(EnvConfig(PAINTED, env_kwargs=arguments + "}"))
    assert first.shape[:2] == (48, 40) and np.array_equal(first, last)


def test_wrappers_are_put_on_in_their_order():
    wrapped, spec = first_frame(EnvConfig(PAINTED, wrapper=BOTH))
    assert np.array_equal(wrapped, first_frame(EnvConfig(PAINTED))[0])
    assert spec.variant == f'{{"wrapper": ["{ODD}:in_a_dictionary", "{ODD}:only_the_picture"]}}'


def test_a_picture_in_a_dictionary_becomes_a_vector_with_a_warning(caplog):
    frame, _ = first_frame(EnvConfig(PAINTED, wrapper=BOTH[:1]))
    assert frame.shape == (48 * 40 * 3,)
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        "observations without words, which cannot be flattened",
        "picture becomes part of a vector; a --wrapper that shows it alone keeps it a picture, "
        "and a --network sees both",
    ]


@pytest.mark.parametrize("kwargs", ["", FIRST])
def test_pictures_become_gray_and_small(kwargs):
    gray, spec = first_frame(EnvConfig(PAINTED, env_kwargs=kwargs, grayscale=True, resize=(24, 20)))
    assert gray.shape == (24, 20) and spec.variant.endswith('"grayscale": true, "resize": [24, 20]}')
    assert (gray[:12, :10] > gray[:12, 10:]).all() and (gray[:12, :10] > gray[12:, :10]).all()
    assert first_frame(EnvConfig(PAINTED, resize=(24,)))[0].shape == (24, 24, 3)
    assert first_frame(EnvConfig(PAINTED, wrapper=(f"{ODD}:only_the_green",), resize=(24, 20)))[0].shape == (24, 20, 1)


@pytest.mark.parametrize(
    ("env", "expected"), [("CartPole-v1", 50), ("Catch-v0", 10), (PAINTED, 60), ("ALE/Pong-v5", 15)]
)
def test_a_video_is_as_fast_as_the_game(env, expected):
    envs = make_environment(EnvConfig(env), 1)
    assert envs.pictures_per_second == expected
    envs.close()


def test_a_dictionary_may_have_keys_that_are_no_words(caplog):
    frame, _ = first_frame(EnvConfig(f"{ODD}:Numbered-keys-v0"))
    assert frame.shape == (2 + 20 * 20 * 3,)
    assert "without 2, which cannot be flattened" in caplog.text and "3 becomes part of a vector" in caplog.text


def test_names_of_actions_that_a_wrapper_takes_away_are_left_out():
    assert first_frame(EnvConfig("Catch-v0"))[1].action_names == ("left", "stay", "right")
    spec = first_frame(EnvConfig("Catch-v0", wrapper=(f"{ODD}:without_the_last_action",)))[1]
    assert (spec.num_actions, spec.action_names) == (2, ())


@pytest.mark.parametrize(("env", "usual"), [("CartPole-v1", 1), ("PongNoFrameskip-v4", 4)])
def test_frames_are_stacked_as_many_as_told(env, usual):
    for frame_stack, stacked in ((0, usual), (2, 2)):
        assert first_frame(EnvConfig(env, frame_stack=frame_stack))[1].stacked_frames == stacked


def test_a_game_of_atari_takes_its_own_arguments():
    config = EnvConfig("PongNoFrameskip-v4", env_kwargs='{"full_action_space": true}')
    assert first_frame(config)[1].num_actions == 18


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (
            EnvConfig("CartPole-v1", env_kwargs="continuous=no"),
            r"--env-kwargs continuous=no: this is no JSON \(.*give e.g.",
        ),
        (EnvConfig("CartPole-v1", env_kwargs="[1]"), r"--env-kwargs \[1\]: this is no JSON object"),
        (EnvConfig("CartPole-v1", env_kwargs='{"mass": 3}'), "unexpected keyword argument 'mass'"),
        (EnvConfig("CartPole-v1", env_kwargs='{"max_episode_steps": -1}'), "max_episode_steps is -1, and should be"),
        (EnvConfig("CartPole-v1", env_kwargs='{"render_mode": "human"}'), "render_mode is 'human': give rgb_array"),
        (EnvConfig(PAINTED, wrapper=BOTH * 30), "[0-9]{4} characters, 2000 are the most: register an id"),
        (EnvConfig("CartPole-v1", grayscale=True), "--grayscale: these are for pictures of bytes"),
        (EnvConfig("FrozenLake-v1", resize=(84,)), "--resize: these are for pictures, and FrozenLake-v1 has"),
        (EnvConfig("Catch-v0", grayscale=True), "--grayscale: this is for pictures with 3 channels"),
        (EnvConfig(PAINTED, resize=(84, 84, 3)), "--resize 84 84 3: give one side, or height and width"),
        (EnvConfig(PAINTED, wrapper=("no_colon",)), "--wrapper no_colon: no_colon has no colon"),
        (EnvConfig(PAINTED, wrapper=("no_such_module:f",)), "--wrapper no_such_module:f: .*searched in .*, too"),
        (EnvConfig(PAINTED, wrapper=(f"{ODD}:nothing",)), "has no nothing: give the name"),
        (EnvConfig(PAINTED, wrapper=(f"{ODD}:make_failing",)), "make_failing fails: TypeError"),
        (EnvConfig(PAINTED, wrapper=(f"{ODD}:no_environment",)), "it has to return an environment of gymnasium"),
        (
            EnvConfig("PongNoFrameskip-v4", grayscale=True, resize=(42,)),
            "--grayscale and --resize: games of Atari keep",
        ),
        (EnvConfig("PongNoFrameskip-v4", wrapper=(f"{ODD}:nothing",)), "--wrapper: games of Atari keep"),
        (EnvConfig("PongNoFrameskip-v4", env_kwargs='{"game": "breakout"}'), "full_action_space.*, and not game"),
        (EnvConfig("ALE/Pong-v5", env_kwargs='{"obs_type": "ram"}'), "not obs_type; agents see its screen, never"),
        (EnvConfig("ALE/Pong-v5", env_kwargs='{"mode": 7}'), "mode is 7, and pong has 0, 1$"),
        (EnvConfig("ALE/Pong-v5", env_kwargs='{"difficulty": "1"}'), "difficulty is '1', and pong has 0, 1, 2, 3$"),
    ],
)
def test_what_cannot_be_presented_is_refused_in_one_line(config, complaint):
    with pytest.raises(ConfigError, match=complaint) as caught:
        make_environment(config, 1)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("env", "meant"),
    [
        ("Pong", "ALE/Pong-v5"),
        ("pong-v4", "ALE/Pong-v5"),
        ("ALE/Pong", "ALE/Pong-v5"),
        ("ALE/pong-v5", "ALE/Pong-v5"),
        ("PongNoFrameskip", "PongNoFrameskip-v4"),
        ("BreakoutNoFrameskip-v5", "BreakoutNoFrameskip-v4"),
        ("CartPole", "CartPole-v1"),
        ("cartpole-v1", "CartPole-v1"),
        ("CartPole-v7", "CartPole-v1"),
        ("MountainCra-v0", "MountainCar-v0"),
        ("catch", "Catch-v0"),
        (f"{ODD}:versioned", f"{ODD}:Versioned-v1"),
    ],
)
def test_the_id_that_was_meant_is_named(env, meant):
    with pytest.raises(ConfigError) as caught:
        make_environment(EnvConfig(env), 1)
    assert str(caught.value) == f"unknown environment {env!r}: did you mean {meant}?"


def test_an_id_like_no_other_gets_an_example():
    with pytest.raises(
        ConfigError, match=r"say e\.g\. CartPole-v1 or ALE/Breakout-v5, or module:Id for one of your own$"
    ):
        make_environment(EnvConfig("xyzzy"), 1)


@pytest.mark.parametrize(
    ("kwargs", "complaint"),
    [
        ('{"observation": NaN}', "gave nan at 1 of an observation, in step 3 of an episode"),
        ('{"observation": -Infinity}', "gave -inf at 1 of an observation, in step 3"),
        ('{"observation": 1e39}', "gave 1e.39 at 1 of an observation"),
        ('{"observation": Infinity, "dtype": "float16"}', "gave inf at 1 of an observation"),
        ('{"observation": -9223372036854775808, "dtype": "int64"}', "gave -9223372036854775808 at 1 of an observation"),
        ('{"reward": NaN}', "gave nan as a reward, in step 3 of an episode: a finite number up to 1e.12 is needed"),
        ('{"reward": Infinity}', "gave inf as a reward"),
    ],
)
@pytest.mark.parametrize("clip_rewards", ["yes", "no"])
def test_a_number_that_is_none_is_named(kwargs, complaint, clip_rewards):
    envs = make_environment(EnvConfig(f"{ODD}:Given-v0", env_kwargs=kwargs, clip_rewards=clip_rewards), 2)
    envs.reset(seed=0)
    for _ in range(2):
        take_step(envs, np.zeros(2, int))
    with pytest.raises(ApexError, match=f"environment '{ODD}:Given-v0' {complaint}"):
        take_step(envs, np.zeros(2, int))
    envs.close()
