"""SAC's policy and losses: against torch's distributions and against plain sums, row by row."""

import math

import pytest
import torch
from torch.distributions import Independent, Normal, TransformedDistribution
from torch.distributions.transforms import TanhTransform

from apexrl.losses.maximum_entropy import soft_value, squashed_draws, temperature_loss

MOMENTS = torch.tensor([[0.0, -1.5, 0.3, -1.0], [2.0, 0.1, -3.0, 0.5]])
NOISE = torch.tensor([[0.5, -1.0], [0.0, 2.0]])


def test_actions_and_log_probabilities_are_those_of_a_squashed_normal():
    moments, twins = (MOMENTS.clone().double().requires_grad_() for _ in "12")
    actions, log_probs = squashed_draws(moments, NOISE.double())
    means, logs = twins.chunk(2, dim=1)
    drawn = means + logs.exp() * NOISE
    torch.testing.assert_close(actions, drawn.tanh())
    policy = TransformedDistribution(Independent(Normal(means, logs.exp()), 1), [TanhTransform(cache_size=1)])
    expected = torch.stack([
        sum(
            -((u - mean) ** 2) / (2 * deviation**2) - deviation.log() - math.log(2 * math.pi) / 2
            - (1 - u.tanh() ** 2).log()
            for u, mean, deviation in zip(*row, strict=True)
        )
        for row in zip(drawn, means, logs.exp(), strict=True)
    ])  # fmt: skip
    torch.testing.assert_close(log_probs, expected)
    torch.testing.assert_close(log_probs, policy.log_prob(drawn.tanh()))
    (gradient,), (theirs,) = (
        torch.autograd.grad(x.sum(), y) for x, y in ((log_probs, moments), (expected, twins))
    )  # fmt: skip
    torch.testing.assert_close(gradient, theirs)


def test_far_draws_and_deviations_keep_finite_numbers():
    moments = torch.tensor([[40.0, -60.0, 5.0, -50.0]], requires_grad=True)
    actions, log_probs = squashed_draws(moments, torch.ones(1, 2))
    assert actions.tolist() == [[1.0, -1.0]] and log_probs.isfinite().all()
    log_probs.sum().backward()
    assert moments.grad.isfinite().all() and moments.grad[0, 2:].tolist() == [0, 0]  # both deviations at their bounds


def test_the_soft_value_is_the_least_critics_and_the_price_of_entropy():
    values = torch.tensor([[1.0, 5.0], [2.0, 4.0]])
    found = soft_value(values, torch.tensor([-1.0, 0.5]), torch.tensor(0.2))
    assert found.tolist() == pytest.approx([1.2, 3.9])


def test_the_temperature_rises_where_the_policy_has_too_little_entropy():
    logarithm = torch.tensor(0.5, requires_grad=True)
    log_probs = torch.tensor([3.0, 1.0], requires_grad=True)  # entropies of -3 and -1, next to a target of -2
    losses = temperature_loss(logarithm, log_probs, -2.0)
    assert losses.tolist() == pytest.approx([-0.5, 0.5])
    of_each = [torch.autograd.grad(loss, logarithm, retain_graph=True)[0].item() for loss in losses]
    assert of_each == [-1.0, 1.0]
    assert torch.autograd.grad(losses.sum(), log_probs, allow_unused=True) == (None,)
