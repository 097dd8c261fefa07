"""DeepMind's control suite as Gymnasium's environments, and pictures of MuJoCo without a screen."""

import ctypes.util
import sys

import gymnasium
import numpy as np
import pytest

from apexrl.environments.actions import Actions
from apexrl.environments.dm_suite import SuiteTask, register
from apexrl.environments.off_screen import LIBRARIES, VARIABLE, why_no_pictures
from apexrl.environments.registry import registered
from apexrl.errors import ConfigError


def test_a_task_of_the_suite_is_an_environment_whose_seed_decides_it():
    assert registered("dm_control/cheetah-run-v0").kwargs == {"domain": "cheetah", "task": "run"}
    one, other = (gymnasium.make("dm_control/cheetah-run-v0") for _ in "12")
    assert np.array_equal(one.reset(seed=3)[0], other.reset(seed=3)[0])
    assert not np.array_equal(one.reset(seed=4)[0], other.reset(seed=5)[0])
    assert one.observation_space.shape == (17,) and one.action_space.shape == (6,)
    ends = [one.step(np.zeros(6, np.float32))[2:4] for _ in range(1000)]
    assert ends[-1] == (False, True) and set(ends[:-1]) == {(False, False)}  # by time: it is not terminal
    one.close()
    other.close()


def test_the_bounds_of_an_actuator_without_any_are_infinite():
    lqr = SuiteTask("lqr", "lqr_2_1")
    assert (lqr.action_space.low.item(), lqr.action_space.high.item()) == (-np.inf, np.inf)
    with pytest.raises(ConfigError, match=r"lqr_2_1-v0' has actions Box.* a Box needs finite bounds"):
        Actions("dm_control/lqr-lqr_2_1-v0", lqr.action_space)
    lqr.close()


def test_other_names_are_not_the_suites(monkeypatch):
    for name in ("dm_control/cheetah-v0", "dm_control/cheetah-run", "cheetah-run-v0"):
        register(name)
        assert name not in gymnasium.registry
    with pytest.raises(ConfigError, match="the suite has no cheetah-fly: tasks of cheetah are run"):
        SuiteTask("cheetah", "fly")
    with pytest.raises(ConfigError, match=r"the suite has no gnu-run: say dm_control/cheetah-run-v0"):
        SuiteTask("gnu", "run")
    monkeypatch.setitem(sys.modules, "dm_control", None)
    with pytest.raises(ConfigError, match=r"dm_control/: dm_control is not installed: say .*pip install .*mujoco"):
        SuiteTask("cheetah", "run")


@pytest.mark.parametrize(
    ("there", "chosen"),
    [(("EGL", "OSMesa"), "egl"), (("OSMesa",), "osmesa"), ((), None)],
    ids=["egl", "osmesa", "none"],
)
def test_pictures_are_drawn_by_what_is_there(monkeypatch, there, chosen):
    monkeypatch.setenv(VARIABLE, "")
    environ = {}
    monkeypatch.setattr("apexrl.environments.off_screen.os.environ", environ)
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: name if name in there else None)
    why = why_no_pictures(SuiteTask)
    assert environ.get(VARIABLE) == chosen and why.startswith("neither EGL nor OSMesa") == (chosen is None)
    environ.clear()
    assert why_no_pictures(gymnasium.envs.registration.load_env_creator("apexrl.environments.catch:Catch")) == ""
    cheetah = gymnasium.envs.registration.load_env_creator(gymnasium.spec("HalfCheetah-v5").entry_point)
    assert bool(why_no_pictures(cheetah)) == (chosen is None)
    environ[VARIABLE] = "glfw"
    assert why_no_pictures(cheetah) == "" and environ == {VARIABLE: "glfw"}


@pytest.mark.parametrize("env", ["HalfCheetah-v5", "dm_control/cheetah-run-v0"])
def test_a_game_is_filmed_without_a_screen(env):
    entry = registered(env)
    if why_no_pictures(gymnasium.envs.registration.load_env_creator(entry.entry_point)):
        assert not any(map(ctypes.util.find_library, LIBRARIES.values()))
        return
    game = gymnasium.make(env, render_mode="rgb_array")
    game.reset(seed=0)
    picture = game.render()
    assert picture.dtype == np.uint8 and picture.ndim == 3 and picture.std() > 5
    game.close()
