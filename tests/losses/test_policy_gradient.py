import numpy as np
import pytest
import torch

from apexrl.losses.categorical import entropy, kl_divergence
from apexrl.losses.policy_gradient import policy_gradient_loss, soft_asymmetric, sum_losses, value_loss
from apexrl.losses.vtrace import vtrace
from tests.losses.unrolls import T, random_unrolls

NUM_ACTIONS, NUM_INPUTS = 3, 4


@pytest.fixture
def unrolls():
    return random_unrolls(np.random.default_rng(0), accepted=0.9)


def reduced(losses, mask, weight, reduction):
    total, count = sum_losses(losses, mask, weight)
    return total if reduction == "sum" else total / count


def random_inputs(unrolls):
    rng = np.random.default_rng(1)
    shape = unrolls.values.shape
    observations = torch.from_numpy(rng.normal(size=(*shape, NUM_INPUTS)))
    behavior_logits = torch.from_numpy(rng.normal(size=(*shape, NUM_ACTIONS)))
    actions = torch.from_numpy(rng.integers(NUM_ACTIONS, size=shape))
    weight = torch.from_numpy(rng.choice([0.0, 0.5, 1.0], shape[1]))
    return observations, behavior_logits, actions, weight


def linear_model():
    torch.manual_seed(0)
    return torch.nn.Linear(NUM_INPUTS, NUM_ACTIONS + 1, dtype=torch.float64)


def whole_loss(parameters, unrolls, inputs, reduction, targets=None):
    """The loss of IMPALA and CLEAR together for a linear policy and value; and the targets of V-trace."""
    observations, behavior_logits, actions, weight = inputs
    outputs = observations @ parameters[0].T + parameters[1]
    logits, values = outputs[..., :-1], outputs[..., -1]
    if targets is None:
        taken = torch.log_softmax(logits, -1) - torch.log_softmax(behavior_logits, -1)
        log_rhos = taken.gather(-1, actions[..., None])[..., 0]
        arguments = {**unrolls.required, "values": values, "log_rhos": log_rhos}
        targets = vtrace(**arguments, valid=unrolls.valid, accept=unrolls.accept)
    losses = (
        policy_gradient_loss(logits, actions, targets.pg_advantages)
        + 0.5 * value_loss(values, targets.vs)
        - 0.1 * entropy(logits)
        + 0.3 * kl_divergence(behavior_logits, logits)
        + 0.2 * (unrolls.values - values).square()
    )
    return reduced(losses, targets.learned, weight, reduction), targets


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_the_gradient_is_that_of_finite_differences_with_targets_held(unrolls, reduction):
    inputs = random_inputs(unrolls)
    parameters = list(linear_model().parameters())
    loss, targets = whole_loss(parameters, unrolls, inputs, reduction)
    found = torch.autograd.grad(loss, parameters)
    for parameter, gradient in zip(parameters, found, strict=True):
        flat = parameter.data.view(-1)
        for i, slope in enumerate(gradient.flatten().tolist()):
            at, ends = flat[i].item(), []
            for step in (1e-5, -1e-5):
                flat[i] = at + step
                ends.append(whole_loss(parameters, unrolls, inputs, reduction, targets)[0].item())
            flat[i] = at
            assert slope == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-5, abs=1e-6)


def test_a_loss_is_the_weighted_sum_over_the_steps_that_count(unrolls):
    weight = random_inputs(unrolls)[-1]
    losses, mask = unrolls.rewards, unrolls.valid
    places = [(t, b) for t in range(T) for b in range(len(weight)) if mask[t, b] and weight[b] > 0]
    total = sum(weight[b].item() * losses[t, b].item() for t, b in places)
    weights = sum(weight[b].item() for _, b in places)
    assert [t.item() for t in sum_losses(losses, mask, weight)] == pytest.approx([total, weights])
    assert [t.item() for t in sum_losses(losses, mask, 3 * weight)] == pytest.approx([3 * total, 3 * weights])


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_steps_outside_the_mask_and_rows_that_fill_the_batch_change_nothing(reduction):
    losses = torch.tensor([[1.0, 2.0, 7.0], [3.0, torch.nan, torch.inf]], requires_grad=True)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    loss = reduced(losses, mask, torch.tensor([1.0, 0.0, 1.0]), reduction)
    assert loss.item() == (4 if reduction == "sum" else 2)
    loss.backward()
    assert losses.grad.count_nonzero() == 2


def test_a_batch_without_a_step_that_counts_has_the_sum_zero():
    losses = torch.ones(2, 3)
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    assert sum_losses(losses, nothing, torch.ones(3)) == (0, 0)
    assert sum_losses(losses, ~nothing, torch.zeros(3)) == (0, 0)


def test_the_value_loss_is_half_the_squared_error():
    values, targets = torch.tensor([[1.0, 2.0]], requires_grad=True), torch.tensor([[4.0, 2.0]], requires_grad=True)
    losses = value_loss(values, targets)
    losses.sum().backward()
    assert losses.tolist() == [[4.5, 0]] and values.grad.tolist() == [[-3, 0]] and targets.grad is None


def test_soft_asymmetric_clipping():
    rewards = torch.tensor([-100.0, -1.0, 0.0, 1.0, 100.0])
    squashed = np.tanh(1)
    assert soft_asymmetric(rewards).tolist() == pytest.approx([-0.3, -0.3 * squashed, 0, 5 * squashed, 5])


def test_shapes_that_disagree_are_an_error():
    with pytest.raises(ValueError, match="shapes"):
        value_loss(torch.zeros(3, 2), torch.zeros(3, 1))
    with pytest.raises(ValueError, match="shapes"):
        sum_losses(torch.zeros(3, 2), torch.ones(3, 2, dtype=torch.bool), torch.ones(3))
    with pytest.raises(ValueError, match="one action a policy"):
        policy_gradient_loss(torch.zeros(3, 2, 4), torch.zeros(3, 1, dtype=torch.int64), torch.zeros(3, 2))
