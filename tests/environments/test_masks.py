"""Masks of actions at the environment: where they lie in a frame, where they come from, and which are refused."""

import contextlib

import numpy as np
import pytest

from apexrl.agents import apex_dqn_config, impact_config, impala_config, pqn_config, r2d2_config
from apexrl.agents.contract import check_discrete
from apexrl.config.sections import EnvConfig
from apexrl.environments.observations import parts_of, presented
from apexrl.environments.vector import make_environment, make_game, take_step
from apexrl.errors import ApexError, ConfigError
from apexrl.running.environment_look import look_at
from apexrl.types import EnvironmentSpec
from tests.environments.masked_envs import DOORS, ROOMS

ENVS = "tests.environments.masked_envs"
IN_INFO = EnvConfig(f"{ENVS}:Doors-v0", '{"in_info": true}', action_mask="info:action_mask")
IN_DICT = EnvConfig(f"{ENVS}:Doors-v0", action_mask="action_mask")


def allowed_actions(frames):
    """The first allowed action of each frame; 0 where nothing is."""
    return frames[:, -DOORS:].argmax(axis=1)


@pytest.mark.parametrize("config", [IN_DICT, IN_INFO], ids=["dictionary", "info"])
def test_the_mask_is_the_end_of_a_frame_and_may_be_empty_where_a_game_ends(config):
    with contextlib.closing(make_environment(config, 2)) as envs:
        frames, spec = envs.reset(seed=3), envs.spec
        assert spec.mask_size == DOORS and spec.frame_shape == (2 * DOORS,)
        assert EnvConfig.of_variant(spec.env, spec.variant, spec.stacked_frames) == EnvConfig(
            config.env, config.env_kwargs, frame_stack=1, action_mask=config.action_mask
        )
        for number in range(1, 3 * ROOMS):
            seen = take_step(envs, allowed_actions(frames))
            frames = seen.frames
            assert set(np.unique(frames[:, -DOORS:])) <= {0, 1}
            assert frames[:, -DOORS:].any() != (number % (ROOMS + 1) == ROOMS)
            prices = np.sort(frames[:, :DOORS], axis=1)
            assert np.allclose(prices, np.arange(DOORS) / (DOORS - 1))


def test_parts_and_the_games_of_the_library_have_the_mask_last():
    for config, others in ((IN_DICT, "prices=4"), (IN_INFO, "observation=4")):
        with contextlib.closing(make_game(config)) as env:
            assert "action_mask" in env.reset(seed=0)[0]
            assert parts_of(presented(env, config, set())) == (others, "action_mask=4")
    config = EnvConfig(IN_DICT.env, '{"has_picture": true}', action_mask="action_mask")
    with contextlib.closing(make_game(config)) as env:
        assert parts_of(presented(env, config, set())) == ("prices=4", "screen=16x16x3", "action_mask=4")


def test_the_look_takes_no_forbidden_action(tmp_path):
    notes = tmp_path / "notes"
    look_at(EnvConfig(IN_DICT.env, f'{{"notes": "{notes}"}}', action_mask="action_mask"), 600.0)
    assert not notes.exists()


@pytest.mark.parametrize(
    ("kwargs", "flags", "complaint"),
    [
        ("", {"action_mask": "mask"}, "mask: observations of .* have the keys action_mask, place; info:KEY takes"),
        ('{"size": 3, "mask": [1, 1, 1]}', {}, r"Box.* \(3,\).*: a number for each of 4 actions is needed"),
        ('{"actions": "vector"}', {}, "are vectors"),
        ("", {"repeat_action_probability": 0.25}, "--repeat-action-probability repeats actions"),
    ],
)
def test_what_cannot_be_a_mask_is_refused(kwargs, flags, complaint):
    with pytest.raises(ConfigError, match=complaint):
        make_environment(EnvConfig(f"{ENVS}:Wrong-v0", kwargs, **{"action_mask": "action_mask", **flags}), 1)


@pytest.mark.filterwarnings("ignore:.*not within the observation space")  # gymnasium's own, of the first step
@pytest.mark.parametrize(
    ("kwargs", "mask", "complaint"),
    [
        ('{"mask": [0, 0, 0, 0]}', "action_mask", r"wrong observation\['action_mask'\], in step 0 .*no action is"),
        ('{"after": [0, 0, 0, 0], "truncates": true}', "action_mask", "in step 1 .*no action is allowed, and the epi"),
        ('{"after": [1, 2, 1, 1]}', "action_mask", "in step 1 of an episode: 2 at 1, where whole numbers from 0 to 1"),
        ('{"after": [1, 0.5, 1, 1]}', "action_mask", "in step 1 of an episode"),
        ("", "info:legal", r"wrong info\['legal'\], in step 0 of an episode: it is missing"),
    ],
)  # fmt: skip
def test_a_mask_that_is_none_is_named_with_its_step(kwargs, mask, complaint):
    envs = make_environment(EnvConfig(f"{ENVS}:Wrong-v0", kwargs, action_mask=mask), 1)
    with contextlib.closing(envs), pytest.raises(ApexError, match=complaint):
        envs.reset(seed=0)
        take_step(envs, np.zeros(1, int))


def test_observations_without_parts_have_no_mask_and_atari_refuses_one():
    with pytest.raises(ConfigError, match="--action-mask mask: observations of CartPole-v1 have no keys"):
        make_environment(EnvConfig("CartPole-v1", action_mask="mask"), 1)
    with pytest.raises(ConfigError, match="--action-mask: games of Atari"):
        make_environment(EnvConfig("ALE/Pong-v5", action_mask="mask"), 1)


def test_a_family_that_does_not_keep_to_masks_refuses_them():
    masked = EnvironmentSpec("Doors-v0", (8,), "float32", 1, 4, 1, variant='{"action_mask": "mask"}')
    for family in (apex_dqn_config, pqn_config, r2d2_config, impala_config, impact_config):
        assert family.FAMILY.stream(family.FAMILY.algorithm, masked).mask_size == 4
    with pytest.raises(ConfigError, match="does not keep to --action-mask"):
        check_discrete(masked)


@pytest.mark.parametrize(
    ("shape", "actions", "variant", "size"),
    [((8,), 4, '{"action_mask": "mask"}', 4), ((3,), 4, '{"action_mask": "mask"}', 0), ((8,), 4, "", 0),
     ((8,), 0, '{"action_mask": "mask"}', 0), ((8,), 4, '{"env_kwargs": {"action_mask": 1}}', 0),
     ((8,), 4, '{"other": ' + "[" * 1980, 0), ((8,), 4, '[["action_mask", "int32", []]]', 0),
     ((), 4, '{"action_mask": "mask"}', 0)],
)  # fmt: skip
def test_a_spec_has_a_mask_where_its_settings_name_one(shape, actions, variant, size):
    assert EnvironmentSpec("Doors-v0", shape, "float32", 1, actions, 1, variant=variant).mask_size == size
