"""The look at an environment: by a process of its own, in time, and what it says of one that cannot be played."""

import contextlib
import json
import logging
import os
import re
import signal
import tempfile
import time

import gymnasium
import msgspec
import numpy as np
import psutil
import pytest

from apexrl.config.sections import EnvConfig
from apexrl.environments.vector import make_environment
from apexrl.errors import ConfigError
from apexrl.running import environment_play
from apexrl.running.environment_look import CLOSING, Line, Look, look_at
from apexrl.running.environment_play import STEPS, Teller, play, random_action
from apexrl.types import EnvironmentSpec
from tests.system.processes import is_gone, wait_for

ODD = "tests.environments.odd_envs"
WAIT = 600.0


def own_threads():
    return {thread.id for thread in psutil.Process().threads()}


def test_an_environment_that_takes_its_process_over_leaves_ours_alone():
    before, threads = (os.getcwd(), signal.getsignal(signal.SIGTERM)), own_threads()
    spec, _ = look_at(EnvConfig("tests.system.rude_env:Rude-v0"), WAIT)
    assert (spec.frame_shape, spec.num_actions) == ((2,), 2)
    assert (os.getcwd(), signal.getsignal(signal.SIGTERM)) == before
    assert own_threads() <= threads  # some of earlier tests may have been about to end
    assert not [child for child in psutil.Process().children() if "apexrl.running" in " ".join(child.cmdline())]


@pytest.mark.parametrize(
    ("env", "kwargs", "deadline", "patience", "complaint"),
    [
        ("Given-v0", '{"hangs": true}', 2.5, WAIT, r"not returned from step 3 for 2\.5 s: .* --step-deadline-seconds"),
        ("Slow-v0", '{"seconds": 600}', WAIT, 0.5, r"not returned from its making for 0\.5 s: .* --patience-seconds"),
        ("Dying-v0", '{"at": "reset"}', WAIT, WAIT, "ended its process with status 3 in reset"),
        ("Dying-v0", '{"at": "make"}', WAIT, WAIT, "ended its process with signal SIGSEGV in its making"),
    ],
)
def test_an_environment_that_never_answers_or_dies_is_named(env, kwargs, deadline, patience, complaint):
    config = EnvConfig(f"{ODD}:{env}", kwargs, step_deadline_seconds=deadline)
    with pytest.raises(ConfigError, match=f"^environment '{ODD}:{env}' .*{complaint}"):
        look_at(config, patience)


def test_wrappers_of_an_environment_that_is_there_once_are_tried(tmp_path):
    kwargs = json.dumps({"path": str(tmp_path / "lock")})
    look_at(EnvConfig(f"{ODD}:Single-v0", kwargs, wrapper=(f"{ODD}:unchanged",)), WAIT)
    with pytest.raises(ConfigError, match=f"--wrapper {ODD}:Forgetful makes other observations of the same ones"):
        look_at(EnvConfig(f"{ODD}:Single-v0", kwargs, wrapper=(f"{ODD}:Forgetful",)), WAIT)


def test_a_death_after_the_first_step_is_told_and_the_run_begins(caplog):
    assert look_at(EnvConfig(f"{ODD}:Dying-v0", '{"at": "step"}'), WAIT)[0].num_actions == 2
    assert "signal SIGSEGV in step 5; the run begins all the same" in caplog.text


@pytest.mark.parametrize("at", ["never", "step", "reset"])
def test_a_simulator_in_a_session_of_its_own_ends_with_the_look(tmp_path, at):
    kwargs = {"at": at, "simulator": str(tmp_path / "simulator")}
    with pytest.raises(ConfigError) if at == "reset" else contextlib.nullcontext():
        look_at(EnvConfig(f"{ODD}:Dying-v0", json.dumps(kwargs)), WAIT)
    number = int((tmp_path / "simulator").read_text())
    wait_for(lambda: is_gone(number), 100, "the end of a simulator")


def test_what_an_environment_makes_us_log_is_said_by_us(caplog):
    assert look_at(EnvConfig(f"{ODD}:Painted-v0", '{"is_first": true}'), WAIT)[0].frame_shape == (48, 40, 3)
    assert "have their channels first, and are turned to (48, 40, 3)" in caplog.text


def told_by(make):
    """Returns the lines in which `play` tells of an environment."""
    gymnasium.register("Played-v0", make, disable_env_checker=True)
    try:
        with tempfile.TemporaryFile() as told:
            teller = Teller(told.fileno())
            logging.getLogger("apexrl").addHandler(teller)
            config = EnvConfig("Played-v0", step_deadline_seconds=0)
            envs = make_environment(config, 1)
            play(envs, teller)
            look = Look(config, WAIT, told)
            look.read()
            return look
    finally:
        logging.getLogger("apexrl").removeHandler(teller)
        del gymnasium.registry["Played-v0"]


class Failing(gymnasium.Env):
    """Fails in a step."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    fails_at, error = 0, RuntimeError("the arm is stuck")

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        if self.steps == self.fails_at:
            raise self.error
        return np.zeros(2, np.float32), 0.0, False, False, {}


def test_a_sound_environment_takes_a_hundred_steps(monkeypatch):
    monkeypatch.setattr(environment_play, "PLAYING_SECONDS", WAIT)
    look = told_by(Failing)
    assert look.found.spec is not None and look.found.doing == f"step {STEPS}" and not look.said


def test_a_slow_step_is_told_with_what_helps():
    class Sleeping(Failing):
        def step(self, action):
            time.sleep(0.1)
            return super().step(action)

    ((_, _, text),) = told_by(Sleeping).said
    assert re.search(r"^Played-v0: a step takes \d+ ms: .* give more --num-workers", text)


def test_an_error_of_the_first_step_is_passed_on():
    with pytest.raises(RuntimeError, match="the arm is stuck"):
        told_by(type("First", (Failing,), {"fails_at": 1}))


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            RuntimeError("stuck"),
            "'Played-v0' failed in step 7 of an episode: RuntimeError: stuck; that copy is made anew",
        ),
        (SystemExit(0), r"ended its process in a step \(SystemExit: 0\): .*; that copy is made anew"),
    ],
)
def test_a_later_error_is_told(error, told):
    """Some simulators fail now and then."""
    look = told_by(type("Later", (Failing,), {"fails_at": 7, "error": error}))
    ((_, _, text),) = look.said
    assert look.found.spec is not None and int(look.found.doing.removeprefix("step ")) > 7 and re.search(told, text)


@pytest.mark.parametrize("num_actions", [0, 3])
def test_actions_are_those_of_the_space(num_actions):
    bounds = () if num_actions else ((-1.0, 0.0), (5.0, 7.0))
    spec = EnvironmentSpec("x", (2,), "float32", 1, num_actions, 1, bounds)
    rng = np.random.default_rng(0)
    actions = np.concatenate([random_action(rng, spec, np.zeros(2)) for _ in range(100)])
    if num_actions:
        assert set(actions) == {0, 1, 2}
    else:
        assert actions.shape == (100, 2) and (np.abs(actions - [-0.5, 6]) <= [0.5, 1]).all()


def test_a_name_that_no_log_takes_is_named(tmp_path):
    spec = EnvironmentSpec("Long-v0", (2,), "float32", 1, 2, 1, action_names=("x" * 300, "y"))
    with (tmp_path / "told").open("w+b") as told:
        told.write(msgspec.json.encode(Line(spec=spec)) + b"\n" + msgspec.json.encode(Line(doing=CLOSING)))
        told.flush()
        with pytest.raises(ConfigError, match=r"environment 'Long-v0' has a size or a name that no log takes: .*200"):
            Look(EnvConfig("Long-v0"), WAIT, told).read()
