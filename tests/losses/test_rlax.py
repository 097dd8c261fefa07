"""V-trace, losses of policies, quantiles and atoms next to rlax. It knows no resets: an episode has a column."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from apexrl.losses import gaussian
from apexrl.losses.categorical import entropy
from apexrl.losses.categorical_returns import projected
from apexrl.losses.policy_gradient import clipped_surrogate_loss, policy_gradient_loss
from apexrl.losses.quantiles import quantile_huber, quantile_huber_gradient
from apexrl.losses.value_learning import n_step_targets
from apexrl.losses.vtrace import vtrace
from apexrl.losses.windows import n_step_windows
from tests.losses.unrolls import T, random_unrolls
from tests.system.processes import ROOT

pytestmark = pytest.mark.long("JAX")

SETTINGS = [(1.0, 1.0, 1.0), (0.9, 2.0, 1.5), (0.0, 1.0, 3.0)]  # lambda, rho_bar, pg_rho_bar; rlax has a c_bar of 1
NUM_ACTIONS = 5


def episodes(learned):
    """Yields column, first step and end of each run of steps that are learned."""
    for b in range(learned.shape[1]):
        t = 0
        while t < T:
            end = t
            while end < T and learned[end, b]:
                end += 1
            if end > t:
                yield b, t, end
            t = end + 1


def columns_of(unrolls):
    """The arguments of rlax: a column for each episode, whose padding has the ratio 0."""
    values = torch.cat([unrolls.values, unrolls.bootstrap_value[None]]).numpy()
    places = list(episodes((unrolls.valid & unrolls.accept).numpy()))
    names = ("v_tm1", "v_t", "r_t", "discount_t", "rho_tm1")
    arrays = {name: np.zeros((T, len(places)), np.float32) for name in names}
    for column, (b, start, end) in enumerate(places):
        inside = slice(0, end - start)
        arrays["v_tm1"][:, column] = values[end, b]  # the bootstrap, where the padding begins
        arrays["v_tm1"][inside, column] = values[start:end, b]
        arrays["v_t"][inside, column] = values[start + 1 : end + 1, b]
        arrays["r_t"][inside, column] = unrolls.rewards[start:end, b]
        arrays["discount_t"][inside, column] = unrolls.discounts[start:end, b]
        arrays["rho_tm1"][inside, column] = unrolls.log_rhos[start:end, b].exp()
    return places, arrays


def policies():
    rng = np.random.default_rng(1)
    shape = (T, 6)
    return {
        "logits": rng.normal(0, 3, (*shape, NUM_ACTIONS)).astype(np.float32),
        "actions": rng.integers(NUM_ACTIONS, size=shape),
        "advantages": rng.normal(size=shape).astype(np.float32),
        "weights": (rng.random(shape) < 0.7).astype(np.float32),
    }


def returns():
    rng = np.random.default_rng(2)
    return {
        "quantiles": rng.normal(0, 2, (9, 5)).astype(np.float32),
        "targets": rng.normal(0, 2, (9, 7)).astype(np.float32),
    }


def sequence():
    """Values of 20 steps, whose discounts are 0 at some, in the order of rlax's arguments."""
    rng = np.random.default_rng(3)
    q, q_target = rng.normal(0, 3, (2, 21, NUM_ACTIONS)).astype(np.float32)
    numbers = {"q": q, "q_target": q_target, "action": rng.integers(NUM_ACTIONS, size=20), "best": q.argmax(axis=1)}
    numbers["reward"] = rng.normal(0, 10, 20).astype(np.float32)
    numbers["discount"] = np.where(rng.random(20) < 0.1, 0, 0.97).astype(np.float32)
    return {f"sequence {name}": array for name, array in numbers.items()}


def gaussians():
    """Actions inside their bounds: rlax clips none."""
    rng = np.random.default_rng(4)
    numbers = {"means": rng.normal(size=(20, 3)), "deviations": rng.random((20, 3)) + 0.1}
    numbers["actions"] = rng.uniform(-0.99, 0.99, (20, 3))
    return {f"gaussian {name}": array.astype(np.float32) for name, array in numbers.items()}


def distributions():
    rng = np.random.default_rng(3)
    support, rewards = np.linspace(-3, 3, 7, dtype=np.float32), rng.normal(0, 2, 20).astype(np.float32)
    discounts = rng.random(20).astype(np.float32)
    return {
        "support": support,
        "rewards": rewards,
        "discounts": discounts,
        "moved": rewards[:, None] + discounts[:, None] * support,
        "probabilities": rng.dirichlet(np.ones(7), 20).astype(np.float32),
    }


@pytest.fixture(scope="module")
def unrolls():
    return random_unrolls(np.random.default_rng(0), accepted=0.9)


@pytest.fixture(scope="module")
def by_rlax(unrolls, tmp_path_factory):
    source, target = (tmp_path_factory.mktemp("rlax") / f"{name}.npz" for name in ("arguments", "results"))
    arrays = columns_of(unrolls)[1] | policies() | returns() | sequence() | distributions() | gaussians()
    np.savez(source, settings=np.array(SETTINGS), **arrays)
    command = [sys.executable, "-m", "tests.losses.rlax_losses", source, target]
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    return np.load(target)


@pytest.mark.parametrize("index", range(len(SETTINGS)))
def test_vtrace_is_that_of_rlax_for_each_episode_alone(unrolls, by_rlax, index):
    lambda_, rho_bar, pg_rho_bar = SETTINGS[index]
    numbers = {"lambda_": lambda_, "rho_bar": rho_bar, "pg_rho_bar": pg_rho_bar}
    found = vtrace(**unrolls.required, valid=unrolls.valid, accept=unrolls.accept, **numbers)
    places, _ = columns_of(unrolls)
    assert len(places) > found.vs.shape[1]
    for column, (b, start, end) in enumerate(places):
        for name, ours in (("errors", found.errors), ("vtrace", found.errors), ("pg_advantages", found.pg_advantages)):
            theirs = by_rlax[f"{name} {index}"][: end - start, column]
            np.testing.assert_allclose(ours[start:end, b], theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["policy_gradient", "entropy"])
def test_the_policys_losses_are_those_of_rlax(by_rlax, name):
    given = {key: torch.from_numpy(array) for key, array in policies().items()}
    logits = given["logits"].requires_grad_()
    if name == "entropy":
        losses = -entropy(logits)
    else:
        losses = policy_gradient_loss(logits, given["actions"], given["advantages"])
    means = (losses * given["weights"]).mean(dim=0)
    means.sum().backward()
    np.testing.assert_allclose(means.detach(), by_rlax[name], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(logits.grad, by_rlax[f"{name} gradient"], rtol=1e-5, atol=1e-6)


def test_gaussian_policies_are_those_of_rlax(by_rlax):
    means, deviations, actions = (torch.from_numpy(array) for array in gaussians().values())
    moments = torch.cat([means, deviations.log()], dim=1)
    found = {"log-probability": gaussian.action_log_probs(moments, actions), "entropy": gaussian.entropy(moments)}
    for name, numbers in found.items():
        np.testing.assert_allclose(numbers, by_rlax[f"gaussian {name}"], rtol=1e-4, atol=1e-5)


def test_the_loss_of_quantiles_is_that_of_rlax(by_rlax):
    quantiles, targets = (torch.from_numpy(array) for array in returns().values())
    np.testing.assert_allclose(quantile_huber(quantiles, targets), by_rlax["quantiles"], rtol=1e-5)
    action, weight = torch.zeros(len(quantiles), dtype=torch.int64), torch.ones(len(quantiles))
    gradient = quantile_huber_gradient(quantiles.unsqueeze(1), action, targets, weight).squeeze(1)
    np.testing.assert_allclose(gradient, by_rlax["quantiles gradient"], rtol=1e-5, atol=1e-6)


def test_the_rescaled_errors_of_n_steps_are_those_of_rlax(by_rlax):
    q, q_target, action, best, reward, discount = map(torch.from_numpy, sequence().values())
    column = (numbers.unsqueeze(1) for numbers in (reward, (discount > 0).float(), torch.zeros(21, dtype=torch.bool)))
    found, discounts, offsets = (numbers.squeeze(1) for numbers in n_step_windows(*column, 0.97, 5))
    ends = torch.arange(15) + offsets
    targets = n_step_targets(found, discounts, q_target[ends, best[ends]], rescaling=True)
    errors = targets - q[torch.arange(15), action[:15]]
    np.testing.assert_allclose(errors, by_rlax["n-step errors"][:15], rtol=1e-3, atol=1e-3)


def test_the_clipped_surrogate_is_that_of_rlax(by_rlax):
    given = {key: torch.from_numpy(array) for key, array in policies().items()}
    losses = clipped_surrogate_loss(given["logits"][..., 0].exp(), given["advantages"], 0.4)
    np.testing.assert_allclose(losses.mean(dim=0), by_rlax["surrogate"], rtol=1e-5, atol=1e-6)


def test_the_projection_onto_atoms_is_that_of_rlax(by_rlax):
    given = {name: torch.from_numpy(array) for name, array in distributions().items()}
    found = projected(given["support"], given["rewards"], given["discounts"], given["probabilities"])
    np.testing.assert_allclose(found, by_rlax["projected"], rtol=1e-4, atol=1e-5)
