"""Observations, rewards and ends that are not those that an environment declares, and actions that it does not take."""

import json

import numpy as np
import pytest

from apexrl.config.sections import EnvConfig
from apexrl.environments.vector import make_environment, take_step
from apexrl.errors import ApexError
from tests.environments.unfit_envs import FIT, UNFIT

UNFIT_ENV = "tests.environments.unfit_envs:Unfit-v0"
ODD = "tests.environments.odd_envs"


def play(num_steps, **kwargs):
    """Takes steps in two copies; returns the frames of the last."""
    envs = make_environment(EnvConfig(UNFIT_ENV, env_kwargs=json.dumps(kwargs)), 2)
    try:
        frames = envs.reset(seed=0)
        for _ in range(num_steps):
            frames = take_step(envs, np.zeros(2, int)).frames
    finally:
        envs.close()
    return frames


@pytest.mark.parametrize("case", UNFIT)
def test_an_observation_that_would_be_changed_is_refused_with_its_step(case):
    play(1, case=case)
    with pytest.raises(ApexError, match=f"environment '{UNFIT_ENV}' gave .*{UNFIT[case][-1]}") as caught:
        play(2, case=case)
    assert "in step 2 of an episode" in str(caught.value)


@pytest.mark.parametrize(
    ("case", "wrapper"),
    [("floats as bytes", "Grayscale"), ("floats as bytes", "Flatten"), ("a picture in a dictionary", "Flatten")],
)
def test_a_wrapper_that_casts_is_given_no_other_numbers(case, wrapper):
    names = (f"gymnasium.wrappers:{wrapper}Observation",)
    envs = make_environment(EnvConfig(UNFIT_ENV, env_kwargs=json.dumps({"case": case}), wrapper=names), 1)
    envs.reset(seed=0)
    take_step(envs, np.zeros(1, int))
    with pytest.raises(ApexError, match=r"gave a wrong observation.*, in step 2 of an episode: 0\.[58]"):
        take_step(envs, np.zeros(1, int))
    envs.close()


@pytest.mark.parametrize("case", FIT)
def test_the_same_numbers_in_another_type_are_taken(case):
    frames = play(2, case=case)
    assert np.array_equal(frames, np.array([FIT[case][-1]] * 2, frames.dtype))


def test_a_first_observation_is_looked_at_too():
    envs = make_environment(EnvConfig(f"{ODD}:Mission-v0", env_kwargs='{"direction": 4}'), 1)
    with pytest.raises(ApexError, match=r"gave a wrong observation\['direction'\], in step 0 of an episode: 4, where"):
        envs.reset(seed=0)
    envs.close()


@pytest.mark.parametrize(
    ("results", "complaint"),
    [
        ((None, False, False), "a wrong reward, in step 2 of an episode: None, where numbers are needed"),
        (("1.5", False, False), "a wrong reward"),
        ((10**400, False, False), "a wrong reward"),
        (([1.0, 2.0], False, False), r"a wrong reward, .*: the shape \(2,\)"),
        ((0.0, 0.5, False), r"a wrong terminated, in step 2 of an episode: 0\.5, where truth values"),
        ((0.0, None, False), "a wrong terminated"),
        ((0.0, "False", False), "a wrong terminated"),
        ((0.0, False, 2), "a wrong truncated"),
        ((0.0, False, float("nan")), "a wrong truncated"),
    ],
)
def test_results_that_are_none_are_refused_with_their_step(results, complaint):
    with pytest.raises(ApexError, match=f"environment '{UNFIT_ENV}' gave {complaint}"):
        play(2, results=results)


@pytest.mark.parametrize("results", [(True, 0, 0), (2, 1, 0), ([1.5], [False], [True])])
def test_results_of_other_types_are_taken(results):
    play(2, results=results)


@pytest.mark.parametrize(
    ("actions", "complaint"),
    [
        ([0.0, 1.4], "actions of float64, such as 0.0: whole numbers from 0 to"),
        ([np.nan, 0.0], "actions of float64, such as nan: whole numbers from 0 to"),
        ([0, 1j], "actions of complex128"),
        (["0", "1"], "actions of <U1"),
        ([0, 9], "the action 9 in step 1 of an episode: whole numbers from 0 to"),
        ([-1, 0], "the action -1 in step 1"),
        ([2**32, 0], "the action 4294967296"),
        ([0], r"actions of shape \(1,\), not \(2,\)"),
        ([[0], [1]], "actions of shape"),
        (1, "actions of shape"),
    ],
)
@pytest.mark.parametrize("env", ["Catch-v0", "PongNoFrameskip-v4"])
def test_actions_that_a_discrete_space_does_not_have_are_refused(env, actions, complaint):
    envs = make_environment(EnvConfig(env), 2)
    envs.reset(seed=0)
    with pytest.raises(ApexError, match=f"the agent gives {complaint}"):
        envs.send(np.array(actions))
    envs.close()


@pytest.mark.parametrize("actions", [[1, 0], np.array([1, 0], np.uint8), np.array([True, False])])
def test_actions_are_returned_as_the_environments_take_them(actions):
    envs = make_environment(EnvConfig("Catch-v0"), 2)
    envs.reset(seed=0)
    found = envs.send(actions)
    assert found.dtype == np.int32 and found.tolist() == [1, 0]
    envs.close()


@pytest.mark.parametrize(
    ("actions", "complaint"),
    [
        ([[np.nan, 3], [0, 3]], "the action .*nan.* in step 1 of an episode: finite numbers are needed"),
        ([[0, 3], [np.inf, 3]], "finite"),
        ([0, 3], "shape"),
        ([[0], [3]], "shape"),
        ([[0, 3]], "shape"),
        ([[0, 3], [1j, 3]], "complex128"),
    ],
)
def test_vectors_of_actions_that_are_none_are_refused(actions, complaint):
    envs = make_environment(EnvConfig(f"{ODD}:Vector-actions-v0"), 2)
    envs.reset(seed=0)
    with pytest.raises(ApexError, match=f"the agent gives .*{complaint}"):
        envs.send(np.array(actions))
    envs.close()


def test_vectors_of_actions_are_returned_as_they_were_clipped():
    envs = make_environment(EnvConfig(f"{ODD}:Vector-actions-v0"), 2)
    envs.reset(seed=0)
    found = envs.send(np.array([[-9, 1e300], [-0.5, 3]]))
    assert found.dtype == np.float32 and found.tolist() == [[-1.0, 5.0], [-0.5, 3.0]]
    assert np.array_equal(envs.receive().frames, found)  # this environment shows its action
    envs.close()
