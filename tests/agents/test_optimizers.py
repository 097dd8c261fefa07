"""Both kinds of RMSProp beside optax and beside float64; all optimizers where a gradient is lost or a rate changes."""

import dataclasses
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from apexrl.agents.apex_dqn_config import ApexUpdate
from apexrl.agents.optimizers import DECAY, RMSProp, make_optimizer, schedule_rate
from tests.learning.test_updater import OnDevice
from tests.system.processes import ROOT

PAPER = ApexUpdate()
RATE, EPSILON = PAPER.learning_rate, PAPER.optimizer_epsilon
SCALES = [1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0]
CONSTANTS = [1e-6, 1e-3, 0.3, 7.0]
STEPS, FIRST_STEPS = 1000, 20
DECAYS = {"centered": DECAY, "plain": 0.99}
KINDS = {  # configurations, and the arguments of make_optimizer
    "adam": (ApexUpdate(optimizer="adam"), {}),
    "rmsprop": (ApexUpdate(optimizer="rmsprop"), {}),
    "plain rmsprop": (ApexUpdate(optimizer="rmsprop"), {"decay": 0.99, "centered": False}),
}


def of_scale(scale):
    return np.random.default_rng(0).normal(0, scale, (STEPS, 7)).astype(np.float32)


def constant(value):
    return np.tile(np.linspace(value, 2 * value, 200, dtype=np.float32), (STEPS, 1))


@pytest.fixture(scope="module", params=DECAYS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def by_optax(kind, tmp_path_factory):
    """The sums of optax's float32 steps, by the scale of random gradients, and of the first steps, by a constant."""
    source, target = (tmp_path_factory.mktemp("optax") / f"{name}.npz" for name in ("gradients", "sums"))
    paths = {f"scale {scale}": of_scale(scale) for scale in SCALES}
    paths |= {f"constant {value}": constant(value)[:FIRST_STEPS] for value in CONSTANTS}
    np.savez(source, **paths)
    numbers = map(str, (RATE, DECAYS[kind], EPSILON))
    command = [sys.executable, "-m", "tests.agents.optax_steps", source, target, *numbers, kind]
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    return np.load(target)


def stepped(gradients, kind, schedule="constant"):
    """The sum of the steps of our optimizer."""
    parameter = torch.nn.Parameter(torch.zeros(gradients.shape[1:]))
    network = torch.nn.ParameterList([parameter])
    optimizer = make_optimizer(
        dataclasses.replace(PAPER, learning_rate_schedule=schedule), network, DECAYS[kind], kind == "centered"
    )
    for gradient in gradients:
        parameter.grad = torch.from_numpy(gradient)
        optimizer.step()
    return parameter.detach().numpy()


def exact(gradients, kind):
    """The sum of the steps in float64."""
    decay = DECAYS[kind]
    square = mean = total = np.zeros(gradients.shape[1:])
    for gradient in gradients.astype(np.float64):
        square = decay * square + (1 - decay) * gradient**2
        mean = decay * mean + (1 - decay) * gradient
        total = total - RATE * gradient / np.sqrt(square - (mean**2 if kind == "centered" else 0) + EPSILON)
    return total


@pytest.mark.parametrize("scale", SCALES)
def test_rmsprop_has_epsilon_inside_the_root(by_optax, kind, scale):
    gradients = of_scale(scale)
    found = stepped(gradients, kind)
    tolerance = 1e-5 * RATE * np.abs(gradients / np.sqrt(scale**2 + EPSILON)).sum(axis=0).max()
    np.testing.assert_allclose(found, exact(gradients, kind), rtol=0, atol=tolerance)
    np.testing.assert_allclose(found, by_optax[f"scale {scale}"], rtol=0, atol=tolerance)
    np.testing.assert_allclose(found, stepped(gradients, kind, "linear"), rtol=0, atol=tolerance)


@pytest.mark.parametrize("value", CONSTANTS)
def test_a_constant_gradient_moves_a_weight_by_bounded_steps(by_optax, kind, value):
    """In float32 the variance of a constant is below zero at times."""
    gradients = constant(value)
    first, last = stepped(gradients[:FIRST_STEPS], kind), stepped(gradients, kind)
    assert first == pytest.approx(exact(gradients[:FIRST_STEPS], kind), rel=1e-3)
    assert first == pytest.approx(by_optax[f"constant {value}"], rel=1e-3)
    largest = 1.001 * RATE * gradients[0] / EPSILON**0.5
    assert (-largest * STEPS <= last).all() and (last < first).all()


def test_the_papers_numbers_are_those_of_the_configuration():
    optimizer = make_optimizer(PAPER, torch.nn.Linear(2, 2))
    assert isinstance(optimizer, RMSProp) and optimizer.param_groups[0]["centered"]
    assert optimizer.param_groups[0]["lr"] == 6.25e-5 and optimizer.param_groups[0]["eps"] == 1.5e-7
    assert optimizer.param_groups[0]["alpha"] == 0.95


def make_named(name, network, **changed):
    """The optimizer of a kind, with some numbers of its configuration changed."""
    config, arguments = KINDS[name]
    return make_optimizer(dataclasses.replace(config, **changed), network, **arguments)


SLOTS = {"adam": ["exp_avg", "exp_avg_sq"], "rmsprop": ["square_avg", "grad_avg"], "plain rmsprop": ["square_avg"]}


@pytest.mark.parametrize("name", KINDS)
def test_state_is_made_with_the_optimizer_and_stays_where_it_is(name):
    network = torch.nn.Linear(3, 2)
    optimizer = make_named(name, network)
    places = {key: value.data_ptr() for slots in optimizer.state.values() for key, value in slots.items()}
    assert list(places) == ["step", *SLOTS[name]]
    for _ in range(2):
        network(torch.ones(3)).sum().backward()
        optimizer.step()
    assert places == {key: value.data_ptr() for slots in optimizer.state.values() for key, value in slots.items()}
    assert all(slots["step"] == 2 for slots in optimizer.state.values())


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, 1.0])
def test_a_step_with_found_inf_changes_nothing(name, bad):
    def world():
        torch.manual_seed(0)
        network = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3).to(memory_format=torch.channels_last))
        optimizer = make_named(name, network, learning_rate=0.1)
        return network, optimizer, torch.Generator().manual_seed(1)

    def step(network, optimizer, rng, found_inf=None):
        for parameter in network.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=rng)
            if found_inf:
                parameter.grad = torch.full_like(parameter, bad)
        if found_inf is not None:
            optimizer.found_inf = torch.tensor(float(found_inf))
        optimizer.step()

    def tensors(network, optimizer, _):
        return [*network.parameters(), *(slot for slots in optimizer.state.values() for slot in slots.values())]

    plain, guarded = world(), world()
    for t in range(6):
        step(*plain)
        step(*guarded, found_inf=False)
        assert all(map(torch.equal, tensors(*plain), tensors(*guarded)))
        before = [tensor.clone() for tensor in tensors(*guarded)]
        if t % 2:
            state = guarded[2].get_state()
            step(*guarded, found_inf=True)
            guarded[2].set_state(state)
        assert all(map(torch.equal, before, tensors(*guarded)))


@pytest.mark.parametrize("schedule", ["constant", "linear"])
@pytest.mark.parametrize("name", KINDS)
def test_a_step_needs_nothing_of_the_host(name, schedule):
    meta = torch.device("meta")
    network = torch.nn.Linear(3, 2, device=meta)
    optimizer = make_named(name, network, learning_rate_schedule=schedule)
    optimizer.found_inf = torch.zeros((), device=meta)
    network(torch.ones(1, 3, device=meta)).sum().backward()
    with OnDevice():
        optimizer.step()


@pytest.mark.parametrize("name", KINDS)
def test_each_step_reads_the_rate_anew(name):
    """A step is proportional to its rate; the averages do not depend on it."""
    torch.manual_seed(0)
    network, twin = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    config = dataclasses.replace(KINDS[name][0], learning_rate=1.0)
    optimizer = make_named(name, network, learning_rate=1.0, learning_rate_schedule="linear")
    still = make_named(name, twin, learning_rate=1.0)
    for value in (0.5, 0.0, 0.25):
        schedule_rate(optimizer, config, 1 - value)
        schedule_rate(still, config, 1 - value)
        before, twins = ([p.detach().clone() for p in module.parameters()] for module in (network, twin))
        for parameter, other in zip(network.parameters(), twin.parameters(), strict=True):
            parameter.grad = torch.randn(parameter.shape)
            other.grad = parameter.grad.clone()
        optimizer.step()
        still.step()
        for old, new, was, now in zip(before, network.parameters(), twins, twin.parameters(), strict=True):
            torch.testing.assert_close(new - old, value * (now - was), rtol=1e-4, atol=1e-6)
            assert torch.equal(old, new) == (value == 0)
