"""One buffer of gradients beside torch's own gradients and clip."""

import pytest
import torch
from torch import nn

from apexrl.agents.gradient import Gradient


def network():
    torch.manual_seed(0)
    made = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2, bias=False))
    return made.to(memory_format=torch.channels_last)


def losses(net, rows):
    torch.manual_seed(1)
    return net(torch.randn(8, 2, 4, 4)[rows]).square().sum(dim=1)


@pytest.mark.parametrize("is_mean", [True, False])
@pytest.mark.parametrize("most", [1e-2, 1e6])
def test_the_clipped_gradient_is_torchs(is_mean, most):
    ours, plain = network(), network()
    gradient = Gradient(ours, is_mean)
    for _ in range(2):  # what was there before does not count
        gradient.compute(losses(ours, slice(None)).sum(), 8)
    norm = gradient.clip(most)
    found = losses(plain, slice(None))
    (found.mean() if is_mean else found.sum()).backward()
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), most)
    assert norm.item() == pytest.approx(expected.item(), rel=1e-5)
    for own, other in zip(ours.parameters(), plain.parameters(), strict=True):
        assert own.grad.stride() == own.stride() and own.grad.data_ptr() >= gradient.buffer.data_ptr()
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("is_mean", [True, False])
def test_the_buffers_of_unequal_parts_add_up_to_that_of_the_whole(is_mean):
    whole, parts = network(), [network(), network()]
    expected = Gradient(whole, is_mean)
    expected.compute(losses(whole, slice(None)).sum(), 8)
    gradients = [Gradient(part, is_mean) for part in parts]
    for gradient, part, rows in zip(gradients, parts, (slice(0, 3), slice(3, 8)), strict=True):
        gradient.compute(losses(part, rows).sum(), torch.tensor(float(rows.stop - rows.start)))
    gradients[0].buffer.add_(gradients[1].buffer)
    assert gradients[0].clip(0.5).item() == pytest.approx(expected.clip(0.5).item(), rel=1e-5)
    for own, other in zip(parts[0].parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-4, atol=1e-7)


def test_a_batch_of_which_nothing_counts_has_no_gradient():
    net = network()
    gradient = Gradient(net, is_mean=True)
    gradient.compute(0 * losses(net, slice(None)).sum(), 0)
    assert gradient.clip(1.0) == 0 and not gradient.buffer.any()


def test_a_gradient_that_is_not_finite_has_such_a_norm():
    net = network()
    gradient = Gradient(net, is_mean=True)
    gradient.compute(torch.inf * losses(net, slice(None)).sum(), 8)
    assert not gradient.clip(1.0).isfinite()
