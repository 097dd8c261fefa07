"""C51's projection and loss: against loops over the atoms, as the paper writes them."""

import math

import pytest
import torch

from apexrl.losses.categorical_returns import cross_entropy, projected

SUPPORT = torch.linspace(-2, 2, 5)


def by_loops(support, returns, discounts, probabilities):
    """Algorithm 1 of the paper."""
    low, high, n = float(support[0]), float(support[-1]), len(support)
    distance, found = (high - low) / (n - 1), torch.zeros_like(probabilities)
    for row in range(len(returns)):
        for atom in range(n):
            moved = min(max(float(returns[row] + discounts[row] * support[atom]), low), high)
            place = (moved - low) / distance
            lower, upper, mass = math.floor(place), math.ceil(place), float(probabilities[row, atom])
            if lower == upper:
                found[row, lower] += mass
            else:
                found[row, lower] += mass * (upper - place)
                found[row, upper] += mass * (place - lower)
    return found


def test_the_projection_is_the_papers():
    generator = torch.Generator().manual_seed(1)
    probabilities = torch.randn(40, 5, generator=generator).softmax(dim=1)
    returns, discounts = torch.randn(40, generator=generator) * 2, torch.rand(40, generator=generator)
    returns[:3], discounts[:3] = (
        torch.tensor([0.0, 1.0, 50.0]),
        torch.tensor([1.0, 0.0, 0.9]),
    )  # itself, one atom, the end
    found = projected(SUPPORT, returns, discounts, probabilities)
    torch.testing.assert_close(found, by_loops(SUPPORT, returns, discounts, probabilities))
    torch.testing.assert_close(found[0], probabilities[0])
    assert found[1].tolist() == pytest.approx([0, 0, 0, 1, 0]) and found[2].tolist() == pytest.approx([0, 0, 0, 0, 1])


def test_the_loss_is_least_where_the_distribution_is_the_target():
    targets = torch.tensor([[0.1, 0.2, 0.7]])
    logits = targets.log().requires_grad_()
    loss = cross_entropy(logits, targets)
    assert loss.item() == pytest.approx(-sum(p * math.log(p) for p in (0.1, 0.2, 0.7)))
    loss.sum().backward()
    assert logits.grad.abs().max() < 1e-6
