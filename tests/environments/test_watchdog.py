"""A call of an environment that does not return."""

import re
import subprocess
import sys
import threading

import gymnasium
import numpy as np
import pytest

from apexrl.config.sections import EnvConfig
from apexrl.environments.vector import make_environment, take_step
from apexrl.environments.watchdog import Watchdog
from apexrl.errors import ApexError
from apexrl.running.last_words import last_line
from tests.system.processes import ROOT, is_gone, wait_for

HANG = """
import subprocess
import numpy as np
from apexrl.config.sections import EnvConfig
from apexrl.environments.vector import make_environment, take_step
from apexrl.lifecycle import run_role

def main(stop):
    config = EnvConfig("tests.environments.odd_envs:Given-v0", env_kwargs='{"hangs": true}', step_deadline_seconds=3.0)
    envs = make_environment(config, 2)
    envs.reset(seed=0)
    print(subprocess.Popen(["sleep", "600"], start_new_session=True).pid, flush=True)
    while True:
        take_step(envs, np.zeros(2, int))

run_role("actor", main)
"""


MAKING_HANGS = """
import time
import gymnasium
import numpy as np
from apexrl.config.sections import EnvConfig
from apexrl.environments.vector import make_environment, take_step
from apexrl.lifecycle import run_role

class Hanging(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    made = 0

    def __init__(self):
        Hanging.made += 1
        self.steps = 0
        if FIRST or Hanging.made > 1:
            time.sleep(600)

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        if self.steps == 3:
            raise RuntimeError("the simulator is gone")
        return np.zeros(2, np.float32), 0.0, False, False, {}

def main(stop):
    gymnasium.register("Hanging-v0", Hanging, disable_env_checker=True)
    envs = make_environment(EnvConfig("Hanging-v0", step_deadline_seconds=300.0), 1, making_seconds=2.0)
    envs.reset(seed=0)
    for _ in range(3):
        take_step(envs, np.zeros(1, int))
    print("made", flush=True)

run_role("actor", main)
"""


def test_a_step_that_hangs_is_named_and_ends_the_process():
    done = subprocess.run([sys.executable, "-c", HANG], cwd=ROOT, capture_output=True, timeout=300, check=False)
    assert done.returncode == 1
    output = done.stderr.decode()
    assert re.search(r"in step\n +time\.sleep", output)  # the place of the hang
    assert last_line(done.stderr).startswith(
        "environment 'tests.environments.odd_envs:Given-v0' has not returned from step for "
    )
    assert last_line(done.stderr).endswith("mend it, or give more --step-deadline-seconds")
    wait_for(lambda: is_gone(int(done.stdout)), 100, "the end of a program that the environment started")


def test_an_environment_that_does_not_close_is_named_and_ends_the_process():
    """As at the end of `apexrl watch`, where nobody else would."""
    program = MAKING_HANGS.replace("FIRST", "False").replace("step_deadline_seconds=300.0", "step_deadline_seconds=2.0")
    program = program.replace("    for _ in range(3):\n        take_step(envs, np.zeros(1, int))\n", "")
    program = program.replace(
        "    print(", "    Hanging.close = lambda self: time.sleep(600)\n    envs.close()\n    print("
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, timeout=300, check=False)
    assert done.returncode == 1 and b"made" not in done.stdout
    assert last_line(done.stderr).startswith("environment 'Hanging-v0' has not returned from close for ")


@pytest.mark.parametrize("is_first", [True, False])
def test_a_making_that_hangs_has_a_deadline_of_its_own(is_first):
    program = MAKING_HANGS.replace("FIRST", str(is_first))
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, timeout=300, check=False)
    assert done.returncode == 1 and b"made" not in done.stdout
    assert re.fullmatch(
        r"environment 'Hanging-v0' has not returned from its making for \d+ s: mend it, or give more "
        "--patience-seconds",
        last_line(done.stderr),
    )


def test_many_quick_calls_are_no_slow_one():
    watchdog = Watchdog("Quick-v0", 60)
    assert {watchdog.call("step", watchdog.look, 30) for _ in range(10)} == {0}
    assert watchdog.call("step", lambda: [watchdog.look(30) for _ in range(4)]) == [0, 30, 60, 90]
    assert watchdog.look(30) == 0


def test_environments_that_are_closed_leave_no_thread():
    before = set(threading.enumerate())  # some of earlier tests may be about to end
    envs = make_environment(EnvConfig("CartPole-v1"), 2)
    (thread,) = set(threading.enumerate()) - before
    assert thread.name == "watchdog"
    envs.reset(seed=0)
    take_step(envs, np.zeros(2, int))
    envs.close()
    thread.join(60)
    assert not thread.is_alive()


def test_a_deadline_of_zero_is_none():
    before = set(threading.enumerate())
    envs = make_environment(EnvConfig("CartPole-v1", step_deadline_seconds=0), 1)
    assert set(threading.enumerate()) <= before
    envs.close()


def test_an_error_is_passed_on():
    watchdog = Watchdog("Raising-v0", 1)

    def step():
        raise gymnasium.error.InvalidAction("the arm is stuck")

    try:
        watchdog.call("step", step)
    except gymnasium.error.InvalidAction as error:
        assert str(error) == "the arm is stuck"
    assert [watchdog.look(1.0) for _ in range(2)] == [0.0, 0.0], "no call goes on"


@pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt()])
def test_a_call_that_would_end_the_process_is_named(error):
    def quit_game():
        raise error

    complaint = (
        rf"environment 'Quit-v0' ended its process in a step \({type(error).__name__}: 0?\): it should end the ep"
    )
    with pytest.raises(ApexError, match=complaint):
        Watchdog("Quit-v0", 1).call("step", quit_game)
