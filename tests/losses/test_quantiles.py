"""Quantile regression and Munchausen targets beside slow twins, number by number as the papers have them."""

import math

import pytest
import torch

from apexrl.losses.quantiles import quantile_huber, quantile_huber_gradient
from apexrl.losses.value_learning import munchausen_bonus, soft_values

B, A, N, M = 7, 4, 5, 6


def numbers(*shape, seed=0, scale=2.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def slow_loss(quantiles, targets):
    """Equations 9 and 10 of arXiv:1710.10044, kappa = 1: a sum over i of the mean over j."""
    count, total = len(quantiles), 0.0
    for i, theta in enumerate(quantiles):
        middle = (2 * i + 1) / (2 * count)
        for target in targets:
            u = target - theta
            huber = 0.5 * u * u if abs(u) <= 1 else abs(u) - 0.5
            total += abs(middle - (1.0 if u < 0 else 0.0)) * huber / len(targets)
    return total


def test_the_loss_is_the_papers():
    quantiles, targets = numbers(B, N), numbers(B, M, seed=1)
    expected = [slow_loss(q, t) for q, t in zip(quantiles.tolist(), targets.tolist(), strict=True)]
    assert quantile_huber(quantiles, targets).tolist() == pytest.approx(expected)


def test_the_gradient_in_closed_form_is_autograds():
    quantiles, targets, weight = numbers(B, A, N).requires_grad_(), numbers(B, M, seed=1), numbers(B, seed=2).abs()
    action = torch.arange(B) % A
    (weight * quantile_huber(quantiles[torch.arange(B), action], targets)).sum().backward()
    found = quantile_huber_gradient(quantiles.detach(), action, targets, weight)
    torch.testing.assert_close(found, quantiles.grad)


def test_quantiles_of_a_known_distribution_are_found():
    targets, action = 30 * numbers(1, 4001, seed=3, scale=1.0), torch.zeros(1, dtype=torch.int64)
    quantiles, weight = torch.zeros(1, 1, 9, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    for _ in range(4000):
        quantiles -= 0.5 * quantile_huber_gradient(quantiles, action, targets, weight)
    expected = torch.quantile(targets[0], (torch.arange(9, dtype=torch.float64) + 0.5) / 9)
    torch.testing.assert_close(quantiles[0, 0], expected, rtol=0, atol=1.5)


@pytest.mark.parametrize("temperature", [0.03, 1.0])
def test_munchausen_terms_are_the_papers(temperature):
    returns, action = numbers(B, A, N, scale=0.1), torch.arange(B) % A
    q = returns.mean(dim=2)
    bonuses, values, quantiles = [], [], []
    for row, taken, of_row in zip(q.tolist(), action.tolist(), returns.tolist(), strict=True):
        shares = [math.exp((x - max(row)) / temperature) for x in row]
        policy = [share / sum(shares) for share in shares]
        bonuses.append(max(min(temperature * math.log(policy[taken]), 0.0), -1.0))
        entropies = [-temperature * math.log(p) for p in policy]
        values.append(sum(p * (x + entropy) for p, x, entropy in zip(policy, row, entropies, strict=True)))
        parts = list(zip(policy, of_row, entropies, strict=True))
        quantiles.append([sum(p * (z[n] + entropy) for p, z, entropy in parts) for n in range(N)])
    assert munchausen_bonus(q, action, temperature).tolist() == pytest.approx(bonuses)
    assert soft_values(q.unsqueeze(2), temperature).squeeze(1).tolist() == pytest.approx(values)
    torch.testing.assert_close(soft_values(returns, temperature), torch.tensor(quantiles, dtype=torch.float64))


def test_an_unlikely_action_costs_no_more_than_the_clip():
    q = torch.tensor([[0.0, 100.0]])
    assert munchausen_bonus(q, torch.tensor([0]), 0.03).item() == -1.0
    assert munchausen_bonus(q, torch.tensor([1]), 0.03).item() == pytest.approx(0.0, abs=1e-6)
