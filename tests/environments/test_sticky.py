"""Sticky actions: --repeat-action-probability, by ale-py for games of Atari and by a wrapper for all others."""

import contextlib

import numpy as np
import pytest

from apexrl.config.sections import EnvConfig
from apexrl.environments.registry import registered
from apexrl.environments.single import make_single
from apexrl.environments.vector import make_environment, take_step
from apexrl.errors import ConfigError

GAME = "ALE/Breakout-v5"


def share_of_repeats(probability):
    """The share of steps of Catch on which the paddle goes on as before, though the other way was asked for."""
    env = make_single(EnvConfig("Catch-v0", repeat_action_probability=probability), registered("Catch-v0"))
    rng, repeats, asked = np.random.default_rng(0), 0, 0
    for seed in range(300):
        env.reset(seed=seed)
        before, last = 3, None
        while True:
            action = int(rng.integers(0, 2)) * 2
            frame, _, terminated, _, _ = env.step(action)
            now = int(frame[-1].argmax())
            if terminated or now == before:
                break  # the ball is there, too, or a wall, where both ways look alike
            taken, before = int(np.sign(now - before)) + 1, now
            if last is None:
                assert taken == action, "no action comes before the first one"
            elif action != last:
                asked, repeats = asked + 1, repeats + (taken == last)
            last = taken
    return repeats / asked


def test_an_environment_repeats_its_last_action_so_often():
    assert share_of_repeats(0.0) == 0
    assert share_of_repeats(0.25) == pytest.approx(0.25, abs=0.07)


def screens(config):
    with contextlib.closing(make_environment(config, 2)) as envs:
        envs.reset(seed=0)
        rng = np.random.default_rng(0)
        frames = [take_step(envs, rng.integers(0, 4, 2).astype(np.int32)).frames for _ in range(40)]
        return np.stack(frames), envs.spec


def test_a_game_of_atari_is_sticky_as_ale_has_it():
    sticky, spec = screens(EnvConfig(GAME, repeat_action_probability=0.5))
    np.testing.assert_array_equal(sticky, screens(EnvConfig(GAME, '{"repeat_action_probability": 0.5}'))[0])
    assert not np.array_equal(sticky, screens(EnvConfig(GAME, '{"repeat_action_probability": 0}'))[0])
    assert spec.variant == '{"repeat_action_probability": 0.5}'
    again = EnvConfig.of_variant(spec.env, spec.variant, 4)
    assert again.repeat_action_probability == 0.5 and again.variant == spec.variant
    with pytest.raises(ConfigError, match="both say it"):
        screens(EnvConfig(GAME, '{"repeat_action_probability": 0.5}', repeat_action_probability=0.5))


@pytest.mark.parametrize("value", ["25", "1", "1.0", "-0.1", "true", '"a"', "null", "[0.25]", "NaN"])
def test_a_probability_that_is_none_is_refused_before_a_game_is_played(value):
    """With 1, and with what is meant as percent, a game goes on without any action of ours."""
    with pytest.raises(ConfigError, match=r"repeat_action_probability is .*, and not a number from 0 to 0\.99$"):
        screens(EnvConfig(GAME, f'{{"repeat_action_probability": {value}}}'))


def test_whether_all_actions_are_offered_is_true_or_false():
    with pytest.raises(ConfigError, match="full_action_space is 1, and not true or false"):
        screens(EnvConfig(GAME, '{"full_action_space": 1}'))
