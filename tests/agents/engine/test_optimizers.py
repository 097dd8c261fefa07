"""Both kinds of RMSProp beside optax and beside float64; all optimizers where a gradient is lost or a rate changes."""

import dataclasses
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from apexrl.agents.apex_dqn_config import ApexUpdate
from apexrl.agents.engine import optimizers
from apexrl.agents.engine.optimizers import RMSProp, make_optimizer, set_rate
from apexrl.agents.engine.plain import RMSPropForm
from tests.learning.updates.test_updater import OnDevice
from tests.system.processes import ROOT

PAPER = ApexUpdate()
RATE, EPSILON = PAPER.learning_rate, PAPER.optimizer_epsilon
SCALES = [1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0]
CONSTANTS = [1e-6, 1e-3, 0.3, 7.0]
STEPS, FIRST_STEPS = 1000, 20
FORMS = {"centered": RMSPropForm(), "plain": RMSPropForm(0.99, centered=False)}
KINDS = {
    "adam": (ApexUpdate(optimizer="adam"), RMSPropForm()),
    "rmsprop": (ApexUpdate(optimizer="rmsprop"), FORMS["centered"]),
    "plain rmsprop": (ApexUpdate(optimizer="rmsprop"), FORMS["plain"]),
}


def of_scale(scale):
    return np.random.default_rng(0).normal(0, scale, (STEPS, 7)).astype(np.float32)


def constant(value):
    return np.tile(np.linspace(value, 2 * value, 200, dtype=np.float32), (STEPS, 1))


@pytest.fixture(scope="module", params=FORMS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def by_optax(kind, tmp_path_factory):
    """The sums of optax's float32 steps, by the scale of random gradients, and of the first steps, by a constant."""
    source, target = (tmp_path_factory.mktemp("optax") / f"{name}.npz" for name in ("gradients", "sums"))
    paths = {f"scale {scale}": of_scale(scale) for scale in SCALES}
    paths |= {f"constant {value}": constant(value)[:FIRST_STEPS] for value in CONSTANTS}
    np.savez(source, **paths)
    numbers = map(str, (RATE, FORMS[kind].decay, EPSILON))
    command = [sys.executable, "-m", "tests.agents.engine.optax_steps", source, target, *numbers, kind]
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    return np.load(target)


def stepped(gradients, kind, rate=RATE):
    """The sum of the steps of our optimizer."""
    parameter = torch.nn.Parameter(torch.zeros(gradients.shape[1:]))
    config = dataclasses.replace(PAPER, learning_rate=rate)
    optimizer = make_optimizer(config, parameter, FORMS[kind])
    for gradient in gradients:
        parameter.grad = torch.from_numpy(gradient)
        optimizer.step()
    return parameter.detach().numpy()


def exact(gradients, kind):
    """The sum of the steps in float64."""
    decay = FORMS[kind].decay
    square = mean = total = np.zeros(gradients.shape[1:])
    for gradient in gradients.astype(np.float64):
        square = decay * square + (1 - decay) * gradient**2
        mean = decay * mean + (1 - decay) * gradient
        total = total - RATE * gradient / np.sqrt(square - (mean**2 if kind == "centered" else 0) + EPSILON)
    return total


def tolerance_at(scale):
    return 1e-5 * RATE * np.abs(of_scale(scale) / np.sqrt(scale**2 + EPSILON)).sum(axis=0).max()


@pytest.mark.parametrize("scale", SCALES)
def test_rmsprop_has_epsilon_inside_the_root(kind, scale):
    gradients = of_scale(scale)
    found = stepped(gradients, kind)
    np.testing.assert_allclose(found, exact(gradients, kind), rtol=0, atol=tolerance_at(scale))
    np.testing.assert_allclose(found, stepped(gradients, kind, f"{RATE}:0"), rtol=0, atol=tolerance_at(scale))


@pytest.mark.long("JAX")
def test_rmsprops_steps_are_those_of_optax(by_optax, kind):
    for scale in SCALES:
        found = stepped(of_scale(scale), kind)
        np.testing.assert_allclose(found, by_optax[f"scale {scale}"], rtol=0, atol=tolerance_at(scale))
    for value in CONSTANTS:
        first = stepped(constant(value)[:FIRST_STEPS], kind)
        assert first == pytest.approx(by_optax[f"constant {value}"], rel=1e-3)


@pytest.mark.parametrize("value", CONSTANTS)
def test_a_constant_gradient_moves_a_weight_by_bounded_steps(kind, value):
    """In float32 the variance of a constant is below zero at times."""
    gradients = constant(value)
    first, last = stepped(gradients[:FIRST_STEPS], kind), stepped(gradients, kind)
    assert first == pytest.approx(exact(gradients[:FIRST_STEPS], kind), rel=1e-3)
    largest = 1.001 * RATE * gradients[0] / EPSILON**0.5
    assert (-largest * STEPS <= last).all() and (last < first).all()


def test_the_papers_numbers_are_those_of_the_configuration():
    optimizer = make_optimizer(PAPER, torch.nn.Parameter(torch.zeros(6)), RMSPropForm())
    assert isinstance(optimizer, RMSProp) and optimizer.param_groups[0]["centered"]
    assert optimizer.param_groups[0]["lr"] == 6.25e-5 and optimizer.param_groups[0]["eps"] == 1.5e-7
    assert optimizer.param_groups[0]["alpha"] == 0.95


def make_named(name, parameters, **changed):
    """The optimizer of a kind, with some numbers of its configuration changed."""
    config, form = KINDS[name]
    return make_optimizer(dataclasses.replace(config, **changed), parameters, form)


SLOTS = {"adam": ["exp_avg", "exp_avg_sq"], "rmsprop": ["square_avg", "grad_avg"], "plain rmsprop": ["square_avg"]}


def flat(size=7, device=None):
    """Parameters [P], which have a gradient."""
    parameters = torch.nn.Parameter(torch.linspace(-1, 1, size, device=device))
    parameters.grad = torch.ones_like(parameters)
    return parameters


def tensors_of(parameters, optimizer):
    return [parameters, *optimizer.state[parameters].values()]


@pytest.mark.parametrize("name", KINDS)
def test_state_is_made_with_the_optimizer_and_stays_where_it_is(name):
    parameters = flat()
    optimizer = make_named(name, parameters)
    slots = optimizer.state[parameters]
    places = {key: value.data_ptr() for key, value in slots.items()}
    assert list(places) == ["step", *SLOTS[name]]
    for _ in range(2):
        optimizer.step()
    assert places == {key: value.data_ptr() for key, value in slots.items()}
    assert slots["step"] == 2


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, 1.0])
def test_a_step_with_found_inf_changes_nothing(name, bad):
    plain, guarded = ((parameters, make_named(name, parameters, learning_rate=0.1)) for parameters in (flat(), flat()))
    rng = torch.Generator().manual_seed(1)
    for t in range(6):
        gradient = torch.randn(7, generator=rng)
        for (parameters, optimizer), found_inf in ((plain, None), (guarded, torch.tensor(0.0))):
            parameters.grad, optimizer.found_inf = gradient.clone(), found_inf
            optimizer.step()
        assert all(map(torch.equal, tensors_of(*plain), tensors_of(*guarded)))
        before = [tensor.clone() for tensor in tensors_of(*guarded)]
        if t % 2:
            guarded[0].grad, guarded[1].found_inf = torch.full_like(guarded[0], bad), torch.tensor(1.0)
            guarded[1].step()
        assert all(map(torch.equal, before, tensors_of(*guarded)))


@pytest.mark.parametrize("name", KINDS)
def test_a_step_divides_the_gradient_by_its_scale(name):
    plain, scaled = ((parameters, make_named(name, parameters, learning_rate=0.1)) for parameters in (flat(), flat()))
    for t in range(5):
        gradient = torch.randn(7, generator=torch.Generator().manual_seed(t))
        plain[0].grad, scaled[0].grad = gradient / 8, gradient.clone()
        scaled[1].grad_scale = torch.tensor(8.0)  # a power of two: exact
        plain[1].step()
        scaled[1].step()
        assert all(map(torch.equal, tensors_of(*plain), tensors_of(*scaled)))


@pytest.mark.parametrize("name", ["rmsprop", "plain rmsprop"])
def test_pieces_are_moved_as_the_whole(name, monkeypatch):
    whole, pieces = ((parameters, make_named(name, parameters)) for parameters in (flat(1000), flat(1000)))
    for t in range(5):
        gradient = torch.randn(1000, generator=torch.Generator().manual_seed(t))
        for size, (parameters, optimizer) in ((1000, whole), (96, pieces)):
            monkeypatch.setattr(optimizers, "PIECE", size)
            parameters.grad, optimizer.found_inf = gradient.clone(), torch.tensor(float(t == 3))
            optimizer.step()
        assert all(map(torch.equal, tensors_of(*whole), tensors_of(*pieces)))


@pytest.mark.parametrize("rate", [1e-3, "1e-3:0"])
@pytest.mark.parametrize("name", KINDS)
def test_a_step_needs_nothing_of_the_host(name, rate):
    meta = torch.device("meta")
    optimizer = make_named(name, flat(device=meta), learning_rate=rate)
    optimizer.found_inf = optimizer.grad_scale = torch.ones((), device=meta)
    with OnDevice():
        optimizer.step()


@pytest.mark.parametrize("name", KINDS)
def test_each_step_reads_the_rate_anew(name):
    """A step is proportional to its rate; the averages do not depend on it."""
    parameters, twins = flat(), flat()
    changing = make_named(name, parameters, learning_rate="1:0")
    still = make_named(name, twins, learning_rate=1.0)
    for t, value in enumerate((0.5, 0.0, 0.25)):
        set_rate(changing, value)
        set_rate(still, value)
        before = [numbers.detach().clone() for numbers in (parameters, twins)]
        for numbers, optimizer in ((parameters, changing), (twins, still)):
            numbers.grad = torch.randn(7, generator=torch.Generator().manual_seed(t))
            optimizer.step()
        move, unscaled = parameters.detach() - before[0], twins.detach() - before[1]
        torch.testing.assert_close(move, value * unscaled, rtol=1e-4, atol=1e-6)
        assert torch.equal(before[0], parameters.detach()) == (value == 0)
