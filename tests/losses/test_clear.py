import math

import numpy as np
import pytest
import torch

from apexrl.losses.clear import policy_cloning_loss, value_cloning_loss

SHAPE = (5, 3, 4)


def random_logits(seed):
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 2, SHAPE))


def probabilities(logits):
    weights = [math.exp(x) for x in logits]
    return [w / sum(weights) for w in weights]


def test_policy_cloning_is_the_divergence_from_the_policies_that_acted():
    behavior, target = random_logits(0), random_logits(1)
    found = policy_cloning_loss(behavior, target)
    for t in range(SHAPE[0]):
        for b in range(SHAPE[1]):
            mu, pi = probabilities(behavior[t, b].tolist()), probabilities(target[t, b].tolist())
            expected = sum(m * math.log(m / p) for m, p in zip(mu, pi, strict=True))
            assert found[t, b].item() == pytest.approx(expected)


def test_policy_cloning_draws_the_policy_to_the_one_that_acted():
    """The gradient of KL(mu || pi) by the logits of pi is pi - mu."""
    behavior, target = random_logits(0).requires_grad_(), random_logits(1).requires_grad_()
    policy_cloning_loss(behavior, target).sum().backward()
    assert behavior.grad is None
    torch.testing.assert_close(target.grad, target.detach().softmax(-1) - behavior.detach().softmax(-1))


def test_half_precision_of_the_log_is_enough():
    behavior = torch.log_softmax(random_logits(0), -1)
    target = random_logits(1).float()
    found = policy_cloning_loss(behavior.half(), target)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, policy_cloning_loss(behavior.float(), target), rtol=1e-2, atol=1e-3)
    never = torch.tensor([[0.0, -torch.inf]], dtype=torch.float16)
    logits = torch.zeros(1, 2, requires_grad=True)
    loss = policy_cloning_loss(never, logits)
    loss.sum().backward()
    assert loss.item() == pytest.approx(math.log(2)) and logits.grad.tolist() == [[-0.5, 0.5]]


def test_value_cloning_is_the_squared_difference():
    behavior, values = torch.tensor([[1.0, 2.0]]).half(), torch.tensor([[4.0, 2.0]], requires_grad=True)
    losses = value_cloning_loss(behavior, values)
    losses.sum().backward()
    assert losses.tolist() == [[9, 0]] and values.grad.tolist() == [[6, 0]]
    with pytest.raises(ValueError, match="shapes"):
        value_cloning_loss(behavior, values[:, :1])
