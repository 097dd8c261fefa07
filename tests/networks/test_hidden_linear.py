"""Layers between hidden ones, which updates on a CPU may compute in bfloat16."""

import pytest
import torch

from apexrl.networks import hidden_linear
from apexrl.networks.hidden_linear import LEAST_SIZE, HiddenLinear

SIZE = LEAST_SIZE


@pytest.fixture
def has_bfloat16(monkeypatch):
    monkeypatch.setattr(hidden_linear, "cpu_has_bfloat16", lambda: True)


def layers(inputs=SIZE, outputs=SIZE):
    torch.manual_seed(1)
    exact, fast = HiddenLinear(inputs, outputs), HiddenLinear(inputs, outputs)
    fast.load_state_dict(exact.state_dict())
    fast.compute_fast()
    return exact, fast


def test_it_is_exact_until_it_is_told_otherwise(has_bfloat16):
    exact, fast = layers()
    plain = torch.nn.Linear(SIZE, SIZE)
    plain.load_state_dict(exact.state_dict())
    inputs = torch.randn(7, SIZE)
    assert torch.equal(exact(inputs), plain(inputs)) and not torch.equal(fast(inputs), plain(inputs))


def test_products_in_bfloat16_have_gradients_in_float32_that_are_close(has_bfloat16):
    inputs = torch.randn(64, SIZE)
    found = []
    for layer in layers():
        own = inputs.clone().requires_grad_()
        outputs = layer(own)
        outputs.square().sum().backward()
        found.append((outputs.detach(), own.grad, layer.weight.grad, layer.bias.grad))
    for exact, fast in zip(*found, strict=True):
        assert fast.dtype == torch.float32
        torch.testing.assert_close(fast, exact, rtol=0, atol=0.03 * float(exact.abs().max()))


def test_small_layers_and_old_processors_stay_exact(has_bfloat16, monkeypatch):
    assert not layers(SIZE, SIZE - 1)[1].is_fast
    monkeypatch.setattr(hidden_linear, "cpu_has_bfloat16", lambda: False)
    assert not layers()[1].is_fast
