import numpy as np
import pytest
import torch

from apexrl.losses.value_learning import double_q_errors, huber, huber_gradient, inverse_rescale, rescale


def test_double_q_takes_the_online_choice_and_the_target_value():
    q_tm1 = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    q_target = torch.tensor([[10.0, 20.0], [30.0, 40.0]], requires_grad=True)
    q_online = torch.tensor([[5.0, 1.0], [0.0, 1.0]], requires_grad=True)
    errors = double_q_errors(
        q_tm1, torch.tensor([1, 0]), torch.tensor([0.5, 1.0]), torch.tensor([0.9, 0.0]), q_target, q_online
    )
    assert errors.tolist() == pytest.approx([0.5 + 0.9 * 10 - 2, 1.0 - 3])
    errors.sum().backward()
    assert q_tm1.grad.tolist() == [[0, -1], [-1, 0]]
    assert q_target.grad is None and q_online.grad is None


def test_shapes_that_disagree_are_an_error():
    q = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="shapes"):
        double_q_errors(q, torch.zeros(2, dtype=torch.int64), torch.zeros(2, 1), torch.zeros(2), q, q)


def test_rescaled_targets_follow_the_paper():
    value, reward, discount = 3.0, -0.7, 0.99**3
    q = torch.tensor([[value, 0.0]])
    errors = double_q_errors(
        torch.zeros(1, 2), torch.tensor([0]), torch.tensor([reward]), torch.tensor([discount]), q, q, rescaling=True
    )
    x = reward + discount * ((np.sqrt(1 + 4e-3 * (value + 1 + 1e-3)) - 1) / 2e-3) ** 2 - discount
    assert errors.item() == pytest.approx(np.sign(x) * (np.sqrt(abs(x) + 1) - 1) + 1e-3 * x, rel=1e-5)


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
    targets = torch.randn(512, generator=rng), torch.full((512,), 0.97), *torch.randn(2, 512, 6, generator=rng)
    errors = double_q_errors(q_tm1, action, *targets)
    (weight * huber(errors, threshold)).sum().backward()
    again = double_q_errors(q_tm1.detach(), action, *targets)
    assert torch.equal(again, errors)
    found = huber_gradient(q_tm1.detach(), action, again, weight, threshold)
    torch.testing.assert_close(found, q_tm1.grad, rtol=2e-7, atol=1e-7)
