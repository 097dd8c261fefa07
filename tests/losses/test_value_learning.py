import numpy as np
import pytest
import torch

from apexrl.losses.value_learning import huber, huber_gradient, inverse_rescale, n_step_targets, rescale


def test_shapes_that_disagree_are_an_error():
    with pytest.raises(ValueError, match="shapes"):
        n_step_targets(torch.zeros(2, 1), torch.zeros(2), torch.zeros(2))


def test_targets_bootstrap_where_the_window_has_not_ended():
    found = n_step_targets(torch.tensor([0.5, 1.0]), torch.tensor([0.9, 0.0]), torch.tensor([10.0, 20.0]))
    assert found.tolist() == pytest.approx([0.5 + 0.9 * 10, 1.0])


def test_rescaled_targets_follow_the_paper():
    value, reward, discount = 3.0, -0.7, 0.99**3
    found = n_step_targets(*map(torch.tensor, ([reward], [discount], [value])), rescaling=True)
    x = reward + discount * ((np.sqrt(1 + 4e-3 * (value + 1 + 1e-3)) - 1) / 2e-3) ** 2 - discount
    assert found.item() == pytest.approx(np.sign(x) * (np.sqrt(abs(x) + 1) - 1) + 1e-3 * x, rel=1e-5)


def test_rescaling_and_its_inverse():
    x = torch.cat([torch.linspace(-500, 500, 1001), torch.tensor([1e-4, -1e-4, 1e5])])
    assert torch.allclose(inverse_rescale(rescale(x)), x, rtol=1e-4, atol=1e-4)
    assert (rescale(x).abs() <= x.abs() + 1e-6).all()


def test_huber_is_quadratic_then_linear():
    assert huber(torch.tensor([0.0, 0.5, -0.5, 1.0, -3.0])).tolist() == pytest.approx([0, 0.125, 0.125, 0.5, 2.5])


@pytest.mark.parametrize("threshold", [0.3, 1.0, 4.0])
def test_the_gradient_in_closed_form_is_autograds(threshold):
    rng = torch.Generator().manual_seed(0)
    q_tm1 = (2 * torch.randn(512, 6, generator=rng)).requires_grad_()
    action, weight = torch.randint(6, (512,), generator=rng), torch.rand(512, generator=rng)
    errors = 3 * torch.randn(512, generator=rng) - q_tm1[torch.arange(512), action]
    (weight * huber(errors, threshold)).sum().backward()
    found = huber_gradient(q_tm1.detach(), action, errors.detach(), weight, threshold)
    torch.testing.assert_close(found, q_tm1.grad, rtol=2e-7, atol=1e-7)
