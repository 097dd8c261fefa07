"""DeepMind's control suite as Gymnasium's environments, and pictures of MuJoCo without a screen."""

import ctypes.util
import os
import subprocess
import sys

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.mujoco.half_cheetah_v5 import HalfCheetahEnv

from apexrl.config.sections import EnvConfig
from apexrl.environments import off_screen
from apexrl.environments.actions import Actions
from apexrl.environments.catch import Catch
from apexrl.environments.dm_suite import SuiteTask, register
from apexrl.environments.off_screen import LIBRARIES, VARIABLE, why_no_pictures
from apexrl.environments.registry import registered
from apexrl.environments.vector import make_environment, make_game
from apexrl.errors import ConfigError

gymnasium.register("OwnCheetah-v0", entry_point="tests.environments.test_mujoco:OwnCheetah")


@pytest.fixture
def drawn(monkeypatch):
    """MuJoCo draws on this machine, and nobody has said by which library."""
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.delenv(VARIABLE)  # it is as it was after the test, too
    if all(map(off_screen._fault_of, LIBRARIES)):
        pytest.skip("neither EGL nor OSMesa draws here")


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
    ("there", "broken", "chosen"),
    [
        (("EGL", "OSMesa"), "", "egl"),
        (("OSMesa",), "", "osmesa"),
        (("EGL", "OSMesa"), "egl", "osmesa"),
        (("EGL",), "egl", None),
        ((), "", None),
    ],
    ids=["egl", "osmesa", "broken, another", "broken", "none"],
)
def test_pictures_are_drawn_by_what_is_there_and_works(monkeypatch, there, broken, chosen):
    monkeypatch.setenv(VARIABLE, "")
    environ = {}
    monkeypatch.setattr("apexrl.environments.off_screen.os.environ", environ)
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: name if name in there else None)
    monkeypatch.setattr(off_screen, "_fault_of", lambda choice: "no driver" if choice == broken else "")
    why = why_no_pictures(SuiteTask)
    assert environ.get(VARIABLE) == chosen and why.startswith("neither EGL nor OSMesa") == (chosen is None)
    assert ("(EGL is there: no driver)" in why) == (chosen is None and "EGL" in there)
    environ.clear()
    assert why_no_pictures(Catch) == ""
    assert bool(why_no_pictures(HalfCheetahEnv)) == (chosen is None)
    environ[VARIABLE] = "glfw"
    assert why_no_pictures(HalfCheetahEnv) == "" and environ == {VARIABLE: "glfw"}


class OwnCheetah(HalfCheetahEnv):
    """A class of a user's own."""


def run_alone(program, **variables):
    """Runs a program in a process of its own: one that has drawn, or could not, keeps its library."""
    environment = {**os.environ, **variables}
    environment.pop(VARIABLE, None)
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, program + done.stderr


@pytest.mark.parametrize("env", ["HalfCheetah-v5", "dm_control/cheetah-run-v0"])
def test_without_a_driver_games_are_played_and_not_drawn(env):
    program = f"""
from apexrl.config.sections import EnvConfig
from apexrl.environments import off_screen
from apexrl.environments.vector import make_environment, make_game
from apexrl.errors import ConfigError
off_screen.LIBRARIES = {{"egl": "EGL"}}
envs = make_environment(EnvConfig("{env}"), 1, render=True)
assert envs.reset(0).shape[0] == 1 and envs.render() is None
try:
    make_game(EnvConfig("{env}"), "rgb_array")
    raise SystemExit("it draws")
except ConfigError as error:
    line = str(error)
assert line.startswith("render_mode 'rgb_array': neither EGL nor OSMesa draws") and "EGL" in line, line
"""
    run_alone(program, __EGL_VENDOR_LIBRARY_DIRS="/nonexistent")  # EGL is there as on many servers, without a driver


@pytest.mark.usefixtures("drawn")
def test_whoever_wants_pictures_gets_a_library_that_draws_them():
    pixels = ('EnvConfig("HalfCheetah-v5", env_kwargs=\'{"render_mode": "rgb_array"}\', '
              'wrapper=("gymnasium.wrappers:AddRenderObservation",), resize=(84,))')  # fmt: skip
    for made in (
        'make_game(EnvConfig("HalfCheetah-v5"), "rgb_array").unwrapped',
        f"make_environment({pixels}, 1)",
        'make_game(EnvConfig("tests.environments.test_mujoco:OwnCheetah-v0"), "rgb_array").unwrapped',
    ):
        run_alone(f"""
from apexrl.config.sections import EnvConfig
from apexrl.environments.vector import make_environment, make_game
game = {made}
seen = game.reset(seed=0)
picture = game.render() if hasattr(game, "action_space") else seen[0]
assert picture.std() > 5, picture
""")


@pytest.mark.usefixtures("drawn")
@pytest.mark.parametrize("env", ["HalfCheetah-v5", "dm_control/quadruped-escape-v0"])
def test_a_game_is_filmed_where_another_one_was_played_before(env):
    """The suite chose its library when it was imported, and on a server it chose the windows' one."""
    run_alone(f"""
from apexrl.config.sections import EnvConfig
from apexrl.environments.vector import make_game
make_game(EnvConfig("{env}")).reset(seed=0)
game = make_game(EnvConfig("{env}"), "rgb_array")
pictures = [game.reset(seed=seed) and game.render() for seed in (0, 1)]
assert pictures[0].std() > 5 and (pictures[0] != pictures[1]).any(), pictures
game.close()
""")


def test_films_of_the_suite_have_the_speed_of_their_task():
    speeds = {name: make_environment(EnvConfig(f"dm_control/{name}-v0"), 1).pictures_per_second
              for name in ("cheetah-run", "walker-run")}  # fmt: skip
    assert speeds == {"cheetah-run": 100, "walker-run": 40}


@pytest.mark.usefixtures("drawn")
@pytest.mark.parametrize("env", ["HalfCheetah-v5", "dm_control/cheetah-run-v0"])
def test_a_game_is_filmed_without_a_screen(env):
    game = make_game(EnvConfig(env), "rgb_array")
    game.reset(seed=0)
    picture = game.render()
    assert picture.dtype == np.uint8 and picture.ndim == 3 and picture.std() > 5
    game.close()
