"""Code of environments runs apart: in each of its first steps, and often enough later."""

import gymnasium
import numpy as np
import pytest
import torch

from apexrl.acting.foreign import FIRST_STEPS, LOOKED_STEPS, ForeignEnvironment
from apexrl.config.sections import EnvConfig
from apexrl.errors import ApexError
from apexrl.lifecycle import exit_status


class Late(gymnasium.Env):
    """Changes torch's number type in one step, wherever it is in it."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, at):
        self.at, self.steps = at, 0

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        if self.steps == self.at:
            torch.set_default_dtype(torch.float64)
        return np.zeros(2, np.float32), 0.0, False, False, {}


@pytest.fixture
def late():
    gymnasium.register("Late-v0", Late, disable_env_checker=True)
    yield lambda at: ForeignEnvironment(EnvConfig("Late-v0", f'{{"at": {at}}}', step_deadline_seconds=0.0), 1)
    torch.set_default_dtype(torch.float32)
    del gymnasium.registry["Late-v0"]


@pytest.mark.parametrize("call", ["render", "reset"])
def test_what_a_late_step_changes_is_put_back_by_the_next_call_too(late, call):
    envs = late(FIRST_STEPS + 3)
    envs.reset(0)
    for _ in range(FIRST_STEPS + 3):
        envs.send(np.zeros(1, np.int64))
        envs.receive()
    assert torch.get_default_dtype() == torch.float64  # for a moment
    envs.render() if call == "render" else envs.reset(1)
    assert torch.get_default_dtype() == torch.float32
    envs.close()


class Busy(gymnasium.Env):
    """A simulator that is not there at its first making."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, wrong=None):
        raise ConnectionRefusedError(111, "Connection refused") if wrong is None else TypeError(wrong)


@pytest.mark.parametrize(("arguments", "status"), [("{}", 1), ('{"wrong": "argument"}', 2)])
def test_an_environment_that_may_come_up_later_lets_its_role_begin_again(arguments, status):
    gymnasium.register("Busy-v0", Busy, disable_env_checker=True)
    try:
        with pytest.raises(ApexError, match="environment 'Busy-v0' cannot be made") as found:
            ForeignEnvironment(EnvConfig("Busy-v0", arguments), 1)
        assert exit_status(found.value) == status
    finally:
        del gymnasium.registry["Busy-v0"]


@pytest.mark.parametrize(("at", "most"), [(1, 0), (FIRST_STEPS, 0), (FIRST_STEPS + 1, LOOKED_STEPS)])
def test_what_a_step_changes_is_put_back_at_once_or_soon(late, at, most):
    envs, wrong = late(at), 0
    envs.reset(0)
    for _ in range(FIRST_STEPS + 4 * LOOKED_STEPS):
        envs.send(np.zeros(1, np.int64))
        envs.receive()
        wrong += torch.get_default_dtype() != torch.float32
    envs.close()
    assert wrong <= most
