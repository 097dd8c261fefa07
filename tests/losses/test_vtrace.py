"""V-trace next to its definition in plain Python, at every kind of end."""

import math

import numpy as np
import pytest
import torch

from apexrl.losses.vtrace import vtrace
from apexrl.losses.windows import n_step_windows
from tests.losses.unrolls import GAMMA, T, random_unrolls

PLAIN = {"lambda_": 1.0, "rho_bar": 1.0, "c_bar": 1.0, "pg_rho_bar": 1.0}
OTHER = {"lambda_": 0.8, "rho_bar": 2.0, "c_bar": 1.5, "pg_rho_bar": 3.0}


def by_definition(unrolls, b, lambda_, rho_bar, c_bar, pg_rho_bar):
    """The targets and advantages of one column, as explicit sums and products over the steps until the trace ends."""
    discount, reward = unrolls.discounts[:, b].tolist(), unrolls.rewards[:, b].tolist()
    value = [*unrolls.values[:, b].tolist(), unrolls.bootstrap_value[b].item()]
    rho = [math.exp(x) for x in unrolls.log_rhos[:, b].tolist()]
    learned = [v and a for v, a in zip(unrolls.valid[:, b].tolist(), unrolls.accept[:, b].tolist(), strict=True)]

    def target(s):
        end = next((t for t in range(s, T) if not learned[t]), T)
        total = value[s]
        for t in range(s, end):
            scale = math.prod(discount[i] * lambda_ * min(c_bar, rho[i]) for i in range(s, t))
            total += scale * min(rho_bar, rho[t]) * (reward[t] + discount[t] * value[t + 1] - value[t])
        return total

    def advantage(s):
        next_value = lambda_ * target(s + 1) + (1 - lambda_) * value[s + 1]
        return min(pg_rho_bar, rho[s]) * (reward[s] + discount[s] * next_value - value[s])

    return [target(s) for s in range(T)], [advantage(s) if learned[s] else 0.0 for s in range(T)], learned


@pytest.mark.parametrize("numbers", [PLAIN, OTHER])
@pytest.mark.parametrize("accepted", [1.0, 0.8])
@pytest.mark.parametrize("seed", range(3))
def test_vtrace_is_its_definition_wherever_episodes_end(numbers, accepted, seed):
    unrolls = random_unrolls(np.random.default_rng(seed), accepted=accepted)
    found = vtrace(**unrolls.required, valid=unrolls.valid, accept=unrolls.accept, **numbers)
    for b in range(found.vs.shape[1]):
        vs, advantages, learned = by_definition(unrolls, b, **numbers)
        assert found.vs[:, b].tolist() == pytest.approx(vs, abs=1e-9)
        assert found.pg_advantages[:, b].tolist() == pytest.approx(advantages, abs=1e-9)
        assert found.learned[:, b].tolist() == learned
    torch.testing.assert_close(found.errors, found.vs - unrolls.values, rtol=0, atol=1e-12)
    assert not found.errors[~found.learned].any() and not found.pg_advantages[~found.learned].any()


def test_on_policy_the_target_is_the_n_step_bellman_target():
    """The windows are those of Ape-X: a termination ends the return, a truncation bootstraps from the final one."""
    unrolls = random_unrolls(np.random.default_rng(0), scale=0)
    found = vtrace(**unrolls.required, valid=unrolls.valid)
    values = np.concatenate([unrolls.values, unrolls.bootstrap_value[None]])
    environment = np.where(unrolls.discounts > 0, 1.0, 0.0)
    columns = np.arange(values.shape[1])
    for s in range(T):
        rewards, discounts, starts = (
            np.pad(array[s:], ((0, 1), (0, 0)), constant_values=fill)
            for array, fill in ((unrolls.rewards, 0), (environment, 1), (unrolls.starts, 0))
        )
        returns, bootstrap, offsets = n_step_windows(rewards, discounts, starts, GAMMA, T - s)
        expected = returns[0] + bootstrap[0] * values[s + offsets[0], columns]
        here = unrolls.valid[s].numpy()
        np.testing.assert_allclose(found.vs[s][here], expected[here], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(found.pg_advantages[s], found.errors[s], atol=1e-12)


def test_on_policy_with_lambda_the_advantage_is_generalised_advantage_estimation():
    unrolls = random_unrolls(np.random.default_rng(0), scale=0)
    found = vtrace(**unrolls.required, valid=unrolls.valid, lambda_=0.7)
    torch.testing.assert_close(found.pg_advantages, found.errors, rtol=0, atol=1e-12)


@pytest.mark.parametrize("end", range(T - 2))
@pytest.mark.parametrize("terminated", [True, False])
def test_nothing_leaks_from_the_next_episode(end, terminated):
    rng = np.random.default_rng(end)
    shape = (T, 1)
    log_rhos, rewards, values = (torch.from_numpy(rng.normal(size=shape)) for _ in range(3))
    discounts = torch.full(shape, GAMMA, dtype=torch.float64)
    discounts[end] = 0 if terminated else GAMMA
    valid = torch.arange(T)[:, None] != end + 1

    def earlier(noise):
        """The results up to the end, when everything later is something else."""
        arguments = []
        for tensor, first in ((log_rhos, end + 1), (discounts, end + 1), (rewards, end + 1), (values, end + 2)):
            later = torch.arange(T)[:, None] >= first
            arguments.append(torch.where(later, tensor * noise, tensor))
        found = vtrace(*arguments, torch.tensor([noise], dtype=torch.float64), valid=valid)
        return torch.cat([found.vs[: end + 1], found.pg_advantages[: end + 1]])

    assert torch.equal(earlier(1.0), earlier(-300.0))
    values[end + 1] += 1  # the final observation's
    changed = earlier(1.0)
    values[end + 1] -= 1
    assert torch.equal(earlier(1.0), changed) == terminated


def test_a_rejected_state_is_bootstrapped_from_and_learns_nothing():
    unrolls = random_unrolls(np.random.default_rng(0))
    accept = torch.ones_like(unrolls.valid)
    accept[3] = False
    found = vtrace(**unrolls.required, valid=unrolls.valid, accept=accept)
    cut = {name: tensor[:3] if tensor.ndim == 2 else tensor for name, tensor in unrolls.required.items()}
    shorter = vtrace(**{**cut, "bootstrap_value": unrolls.values[3]}, valid=unrolls.valid[:3])
    assert torch.equal(found.vs[:3], shorter.vs) and torch.equal(found.pg_advantages[:3], shorter.pg_advantages)
    assert torch.equal(found.vs[3], unrolls.values[3])
    assert not found.pg_advantages[3].any() and not found.learned[3].any()


def test_masks_that_accept_everything_change_nothing():
    unrolls = random_unrolls(np.random.default_rng(0))
    everything = torch.ones_like(unrolls.valid)
    plain = vtrace(**unrolls.required)
    assert plain.learned.all()
    assert all(map(torch.equal, plain, vtrace(**unrolls.required, valid=everything, accept=everything)))


def test_ratios_of_resets_may_be_anything():
    unrolls = random_unrolls(np.random.default_rng(0))
    expected = vtrace(**unrolls.required, valid=unrolls.valid)
    for bad in (math.inf, -math.inf, math.nan):
        log_rhos = unrolls.log_rhos.masked_fill(~unrolls.valid, bad)
        assert all(
            map(torch.equal, expected, vtrace(**{**unrolls.required, "log_rhos": log_rhos}, valid=unrolls.valid))
        )


def test_ratios_beyond_float32_are_clipped():
    unrolls = random_unrolls(np.random.default_rng(0), scale=0)
    single = {name: tensor.float() for name, tensor in unrolls.required.items()}
    expected = vtrace(**{**single, "log_rhos": single["log_rhos"] + 3})
    found = vtrace(**{**single, "log_rhos": single["log_rhos"] + 300})
    assert all(map(torch.equal, expected, found)) and found.vs.isfinite().all()


def test_no_gradient_flows_through_targets_and_advantages():
    unrolls = random_unrolls(np.random.default_rng(0))
    found = vtrace(**{name: tensor.requires_grad_() for name, tensor in unrolls.required.items()})
    assert not any(tensor.requires_grad for tensor in found)


@pytest.mark.parametrize("name", ["log_rhos", "discounts", "rewards", "bootstrap_value", "valid", "accept"])
def test_shapes_that_disagree_are_an_error(name):
    unrolls = random_unrolls(np.random.default_rng(0))
    arguments = {**unrolls.required, **unrolls.named("valid", "accept")}
    with pytest.raises(ValueError, match="shapes"):
        vtrace(**{**arguments, name: arguments[name][:1]})


def test_a_rho_bar_below_c_bar_is_an_error():
    unrolls = random_unrolls(np.random.default_rng(0))
    with pytest.raises(ValueError, match="raise rho_bar"):
        vtrace(**unrolls.required, rho_bar=0.5)
