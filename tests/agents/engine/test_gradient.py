"""One buffer of gradients beside torch's own gradients and clip."""

import pytest
import torch
from torch import nn

from apexrl.agents.engine.gradient import LINE, Gradient
from apexrl.agents.engine.plain import Slope
from apexrl.errors import ApexError


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
    gradient = Gradient({"net": ours}, is_mean)
    for _ in range(2):  # what was there before does not count
        gradient.compute({"net": losses(ours, slice(None)).sum()}, 8)
    norm, divisor = gradient.parts["net"].clipping(most)
    found = losses(plain, slice(None))
    (found.mean() if is_mean else found.sum()).backward()
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), most)
    assert norm.item() == pytest.approx(expected.item(), rel=1e-5)
    for own, other in zip(ours.parameters(), plain.parameters(), strict=True):
        assert own.grad.stride() == own.stride() and own.grad.data_ptr() >= gradient.buffer.data_ptr()
        torch.testing.assert_close(own.grad / divisor, other.grad, rtol=1e-4, atol=1e-8)


def test_a_networks_parameters_and_gradients_are_views_of_two_buffers():
    ours, plain = network(), network()
    gradient = Gradient({"net": ours}, is_mean=False)
    gradient.compute({"net": losses(ours, slice(None)).sum()}, 8)
    losses(plain, slice(None)).sum().backward()
    part = gradient.parts["net"]
    assert part.parameters.grad.data_ptr() == gradient.buffer.data_ptr()
    for numbers in (part.parameters.detach(), part.parameters.grad):
        assert len(numbers) % LINE == 0
        numbers.mul_(3)
    for place, own, other in zip(part.split(part.parameters), ours.parameters(), plain.parameters(), strict=True):
        assert place.data_ptr() == own.data_ptr() and place.data_ptr() % (4 * LINE) == ours[0].weight.data_ptr() % (
            4 * LINE
        )
        assert own.stride() == other.stride() and torch.equal(own, 3 * other)
        torch.testing.assert_close(own.grad, 3 * other.grad)


def test_a_gradient_by_outputs_is_that_of_the_loss():
    ours, plain = network(), network()
    rows = torch.randn(8, 2, 4, 4, generator=torch.Generator().manual_seed(2))
    weights = torch.rand(8, 2, generator=torch.Generator().manual_seed(3))
    gradients = [Gradient({"net": net}, is_mean=True) for net in (ours, plain)]
    gradients[0].compute({"net": Slope(ours(rows), weights)}, 8)
    gradients[1].compute({"net": (weights * plain(rows)).sum()}, 8)
    assert torch.equal(gradients[0].buffer, gradients[1].buffer)


def test_gradients_that_lie_otherwise_are_copied_apart_from_the_others(monkeypatch):
    """A GPU copies tensors by one kernel only where types and strides are the same, else one after the other."""
    copied, copy = [], torch._foreach_copy_

    def recorded(places, found):
        copied.append(list(zip(places, found, strict=True)))
        copy(places, found)

    def turned(tensor):  # the same numbers, the last axis outermost in memory
        return tensor.movedim(-1, 0).contiguous().movedim(0, -1)

    ours = network()
    gradient = Gradient({"net": ours}, is_mean=False)
    gradients = [turned(parameter.detach()) for parameter in ours.parameters()]
    monkeypatch.setattr(torch, "_foreach_copy_", recorded)
    monkeypatch.setattr(torch.autograd, "grad", lambda *_, **__: gradients)
    gradient.compute({"net": torch.zeros((), requires_grad=True)}, 1)
    alike = [{place.stride() == found.stride() for place, found in pairs} for pairs in copied]
    assert sorted(map(list, alike)) == [[False], [True]]
    assert all(torch.equal(place, found) for pairs in copied for place, found in pairs)


def test_a_parameter_that_the_loss_does_not_use_has_no_gradient():
    net = network()
    gradient = Gradient({"net": net}, is_mean=True)
    gradient.buffer.fill_(7)
    gradient.compute({"net": net[0].weight.sum()}, 8)
    assert not net[0].bias.grad.any() and net[0].weight.grad.all()


@pytest.mark.parametrize("is_mean", [True, False])
def test_the_buffers_of_unequal_parts_add_up_to_that_of_the_whole(is_mean):
    whole, parts = network(), [network(), network()]
    expected = Gradient({"net": whole}, is_mean)
    expected.compute({"net": losses(whole, slice(None)).sum()}, 8)
    gradients = [Gradient({"net": part}, is_mean) for part in parts]
    for gradient, part, rows in zip(gradients, parts, (slice(0, 3), slice(3, 8)), strict=True):
        gradient.compute({"net": losses(part, rows).sum()}, torch.tensor(float(rows.stop - rows.start)))
    gradients[0].buffer.add_(gradients[1].buffer)
    assert [one.item() for one in gradients[0].parts["net"].clipping(0.5)] == pytest.approx(
        [one.item() for one in expected.parts["net"].clipping(0.5)], rel=1e-5
    )
    for own, other in zip(parts[0].parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-4, atol=1e-7)


def test_a_batch_of_which_nothing_counts_has_no_gradient():
    net = network()
    gradient = Gradient({"net": net}, is_mean=True)
    gradient.compute({"net": 0 * losses(net, slice(None)).sum()}, 0)
    norm, divisor = gradient.parts["net"].clipping(1.0)
    assert norm == 0 and divisor > 0 and not gradient.buffer.any()


def test_a_gradient_that_is_not_finite_has_such_a_norm():
    net = network()
    gradient = Gradient({"net": net}, is_mean=True)
    gradient.compute({"net": torch.inf * losses(net, slice(None)).sum()}, 8)
    assert not gradient.parts["net"].clipping(1.0)[0].isfinite()


def test_no_losses_are_those_of_no_part():
    gradient = Gradient({"a": nn.Linear(2, 1)}, True)
    gradient.compute({}, None, None, [])
    with pytest.raises(ApexError, match=r"gives losses of the parts \[\]; `parts` are \['a'\]"):
        gradient.compute({}, None)
