"""The divergence of categorical policies, which CLEAR's cloning loss is (arXiv:1811.11682, section 3)."""

import math

import numpy as np
import pytest
import torch

from apexrl.losses.categorical import kl_divergence

SHAPE = (5, 3, 4)


def random_logits(seed):
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 2, SHAPE))


def probabilities(logits):
    weights = [math.exp(x) for x in logits]
    return [w / sum(weights) for w in weights]


def test_the_divergence_is_the_sum_over_actions():
    behavior, target = random_logits(0), random_logits(1)
    found = kl_divergence(behavior, target)
    for t in range(SHAPE[0]):
        for b in range(SHAPE[1]):
            mu, pi = probabilities(behavior[t, b].tolist()), probabilities(target[t, b].tolist())
            expected = sum(m * math.log(m / p) for m, p in zip(mu, pi, strict=True))
            assert found[t, b].item() == pytest.approx(expected)


def test_its_gradient_draws_the_policy_to_the_other_one():
    """The gradient of KL(mu || pi) by the logits of pi is pi - mu."""
    behavior, target = random_logits(0), random_logits(1).requires_grad_()
    kl_divergence(behavior, target).sum().backward()
    torch.testing.assert_close(target.grad, target.detach().softmax(-1) - behavior.softmax(-1))


def test_half_precision_of_the_log_is_enough():
    behavior = torch.log_softmax(random_logits(0), -1)
    target = random_logits(1).float()
    found = kl_divergence(behavior.half(), target)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, kl_divergence(behavior.float(), target), rtol=1e-2, atol=1e-3)
    never = torch.tensor([[0.0, -torch.inf]], dtype=torch.float16)
    logits = torch.zeros(1, 2, requires_grad=True)
    loss = kl_divergence(never, logits)
    loss.sum().backward()
    assert loss.item() == pytest.approx(math.log(2)) and logits.grad.tolist() == [[-0.5, 0.5]]
