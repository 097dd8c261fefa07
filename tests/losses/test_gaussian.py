"""Gaussian policies whose draws are clipped: against torch's distributions, number by number, and against shares."""

import math

import numpy as np
import pytest
import torch
from torch.distributions import Normal

from apexrl.agents.replaying.policy_targets import policies_of
from apexrl.bounds import clipped
from apexrl.losses.gaussian import action_log_probs, deviations, entropy
from apexrl.types import EnvironmentSpec

MOMENTS = torch.tensor([[0.0, -1.5, 0.3, -1.0], [0.9, 0.1, -3.0, 0.5], [7.0, -0.2, -1.0, 1.5]])
ACTIONS = torch.tensor([[0.5, -1.0], [0.87, 1.0], [1.0, 0.0]])


def by_numbers(moments, actions):
    """The log-probability of one action, as a sum over its numbers."""
    means, logs = moments.chunk(2)
    total = 0
    for mean, log, action in zip(means, logs, actions, strict=True):
        normal = Normal(mean, log.exp())
        if action >= 1:
            total = total + (1 - normal.cdf(torch.ones_like(mean))).log()
        elif action <= -1:
            total = total + normal.cdf(-torch.ones_like(mean)).log()
        else:
            total = total + normal.log_prob(action)
    return total


def test_log_probabilities_are_densities_inside_and_tails_at_the_bounds():
    moments, twins = (MOMENTS.double().requires_grad_() for _ in "12")
    found = action_log_probs(moments, ACTIONS.double())
    expected = torch.stack([by_numbers(*row) for row in zip(twins, ACTIONS.double(), strict=True)])
    torch.testing.assert_close(found, expected)
    (gradient,), (theirs,) = torch.autograd.grad(found.sum(), moments), torch.autograd.grad(expected.sum(), twins)
    torch.testing.assert_close(gradient, theirs)


def test_actions_at_a_bound_are_as_frequent_as_their_probability():
    means, logs = torch.tensor([0.6, -0.3]), torch.tensor([-0.5, 0.2])
    moments = torch.cat([means, logs])
    draws = (means + logs.exp() * torch.randn(200_000, 2, generator=torch.Generator().manual_seed(0))).clamp(-1, 1)
    for bounds in ((1.0, 1.0), (-1.0, 1.0), (1.0, -1.0)):
        share = (draws == torch.tensor(bounds)).all(dim=1).float().mean().item()
        assert action_log_probs(moments, torch.tensor(bounds)).exp().item() == pytest.approx(share, abs=0.004)


def test_entropies_and_deviations_are_those_before_clipping():
    means, logs = MOMENTS.chunk(2, dim=1)
    torch.testing.assert_close(entropy(MOMENTS), Normal(means, logs.exp()).entropy().sum(dim=1))
    torch.testing.assert_close(deviations(MOMENTS), logs.exp())


def test_extremes_keep_finite_numbers():
    moments = torch.tensor([[90.0, -60.0, -50.0, 9.0]], requires_grad=True)
    for action in ((1.0, 1.0), (-1.0, -1.0), (0.0, 0.5), (1 - 1e-7, 1e-7 - 1)):
        found = action_log_probs(moments, torch.tensor([action]))
        (gradient,) = torch.autograd.grad(found.sum(), moments)
        assert found.isfinite().all() and gradient.isfinite().all()
    least, most = deviations(moments)[0].tolist()
    assert (least, most) == pytest.approx((math.exp(-5), math.exp(2)))


def test_shapes_that_disagree_are_refused():
    with pytest.raises(ValueError, match=r"moments \(3, 4\) are not those of actions \(3, 4\)"):
        action_log_probs(MOMENTS, MOMENTS)


@pytest.mark.parametrize("bounds", [(-1.0, 1.0), (10.1, 10.3), (300.0, 301.1), (1000.1, 1000.3)])
def test_bounds_far_from_0_are_bounds(bounds):
    """Where scaling an action misses -1 and 1 by its rounding."""
    spec = EnvironmentSpec("Any-v0", (3,), "float32", 1, 0, 1, action_bounds=(tuple(np.float32(bounds).tolist()),))
    log_probs = policies_of(spec, torch.device("cpu")).log_probs
    actions = torch.from_numpy(clipped(np.array([[1e9], [-1e9]]), spec.action_bounds))
    moments = torch.tensor([[5.0, math.log(0.3)], [-5.0, math.log(0.3)]])
    torch.testing.assert_close(log_probs(moments, actions), torch.zeros(2))


def test_a_deviation_beyond_its_bounds_can_come_back_and_goes_no_further():
    logs = torch.tensor([3.0, -6.0, 0.0])
    moments = torch.cat([torch.zeros(3), logs]).requires_grad_()
    for sign, expected in ((1.0, [1.0, 0.0, 1.0]), (-1.0, [0.0, -1.0, -1.0])):  # a step goes against the gradient
        (gradient,) = torch.autograd.grad(sign * entropy(moments), moments)
        assert gradient[3:].tolist() == expected
    assert deviations(moments).log().tolist() == pytest.approx([2.0, -5.0, 0.0])
