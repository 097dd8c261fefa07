import math

import numpy as np
import pytest
import torch

from apexrl.losses.categorical import action_log_probs, entropy, kl_divergence
from apexrl.losses.policy_gradient import policy_gradient_loss, sum_losses, value_loss
from apexrl.losses.relevance import (
    accepted_states,
    behavior_relevance,
    feature_distances,
    implied_policy,
    random_projection,
    unroll_divergence,
    unroll_features,
)
from apexrl.losses.vtrace import vtrace
from tests.losses.unrolls import random_unrolls

SHAPE = (6, 4, 5)


def random_logits(seed, scale=2.0):
    return torch.from_numpy(np.random.default_rng(seed).normal(0, scale, SHAPE))


def probabilities(logits):
    weights = [math.exp(x) for x in logits]
    return [w / sum(weights) for w in weights]


def pairs(*tensors):
    """The policies of each state, as lists."""
    return zip(*(tensor.flatten(0, 1).tolist() for tensor in tensors), strict=True)


@pytest.mark.parametrize("rho_bar", [1.0, 2.0, 0.5])
def test_the_implied_policy_and_the_relevance_are_their_definitions(rho_bar):
    behavior, target = random_logits(0), random_logits(1)
    found = implied_policy(behavior, target, rho_bar).flatten(0, 1).exp().tolist()
    relevance = behavior_relevance(behavior, target, rho_bar).flatten().tolist()
    for i, (behavior_logits, target_logits) in enumerate(pairs(behavior, target)):
        mu, pi = probabilities(behavior_logits), probabilities(target_logits)
        clipped = [min(rho_bar * m, p) for m, p in zip(mu, pi, strict=True)]
        implied = [c / sum(clipped) for c in clipped]
        assert found[i] == pytest.approx(implied)
        assert relevance[i] == pytest.approx(sum(p * math.log(p / q) for p, q in zip(pi, implied, strict=True)))


def test_on_policy_the_implied_policy_is_the_policy_and_the_relevance_is_zero():
    logits = random_logits(0).float()
    torch.testing.assert_close(implied_policy(logits, logits), torch.log_softmax(logits, -1))
    assert behavior_relevance(logits, logits).max() < 1e-6
    torch.testing.assert_close(implied_policy(random_logits(1), logits.double(), 1e9), logits.double().log_softmax(-1))


def test_constants_added_to_logits_change_nothing():
    behavior, target = random_logits(0), random_logits(1)
    shift, other = (torch.from_numpy(np.random.default_rng(s).normal(0, 9, (*SHAPE[:2], 1))) for s in (2, 3))
    for function in (behavior_relevance, implied_policy, kl_divergence):
        torch.testing.assert_close(function(behavior + shift, target + other), function(behavior, target))


def test_the_threshold_orders_states_from_off_policy_to_on_policy():
    behavior, target = random_logits(0), random_logits(1)
    behavior[:2] = target[:2] + 3.0
    on_policy = torch.zeros(SHAPE[:2], dtype=torch.bool)
    on_policy[:2] = True
    assert not accepted_states(behavior, target, 0.0)[~on_policy].any()
    assert torch.equal(accepted_states(behavior, target, 1e-9), on_policy)
    assert accepted_states(behavior, target, 1e9).all()
    some = accepted_states(behavior, target, 0.3)
    assert torch.equal(some, behavior_relevance(behavior, target) < 0.3) and some.any() and not some.all()


def test_policies_that_share_no_action_are_rejected():
    never = torch.tensor([[0.0, -torch.inf]])
    assert not accepted_states(never, never.flip(-1), 1e9).any()
    assert accepted_states(never, never, 0.1).all()
    assert entropy(never).tolist() == [0]


def test_a_huge_region_changes_no_target_and_an_empty_one_leaves_none():
    unrolls = random_unrolls(np.random.default_rng(0))
    shape = (*unrolls.values.shape, 3)
    behavior, target = (torch.from_numpy(np.random.default_rng(s).normal(size=shape)) for s in (1, 2))
    actions = torch.from_numpy(np.random.default_rng(3).integers(3, size=shape[:2]))
    log_rhos = action_log_probs(target, actions) - action_log_probs(behavior, actions)
    arguments = {**unrolls.required, "log_rhos": log_rhos, "valid": unrolls.valid}
    plain = vtrace(**arguments)
    everywhere = vtrace(**arguments, accept=accepted_states(behavior, target, 1e9))
    assert all(map(torch.equal, plain, everywhere))
    nowhere = vtrace(**arguments, accept=accepted_states(behavior, target, 0.0))
    assert torch.equal(nowhere.vs, unrolls.values)
    assert not nowhere.pg_advantages.any() and not nowhere.learned.any()


BANDIT_RETURNS = torch.tensor([[2.0, 5.0]])  # both actions' returns, [T = 1, B = 2]: a row for each
BANDIT_BEHAVIOR = torch.tensor([[0.9, 0.1]])


def bandit(baseline, updates=600, rate=2.0):
    """P(the better action) after exact expected updates: each action is a row, weighted by how often mu takes it."""
    logits = torch.zeros(2, requires_grad=True)
    value = torch.zeros(1, requires_grad=True)
    actions, everything = torch.tensor([[0, 1]]), torch.ones(1, 2, dtype=torch.bool)
    for _ in range(updates):
        rows = logits.expand(1, 2, 2)
        if baseline == "implied policy":
            value.data = (implied_policy(BANDIT_BEHAVIOR.log()[0], logits).exp() * BANDIT_RETURNS[0]).sum(0, True)
        values = value.expand(1, 2)
        log_rhos = action_log_probs(rows, actions) - BANDIT_BEHAVIOR.log()
        found = vtrace(log_rhos, torch.zeros(1, 2), BANDIT_RETURNS, values, torch.zeros(2))
        if baseline == "implied policy":  # the fixed point of V-trace
            assert (BANDIT_BEHAVIOR * found.errors).sum().item() == pytest.approx(0, abs=1e-5)
        losses = policy_gradient_loss(rows, actions, found.pg_advantages)
        if baseline == "learned":
            losses = losses + value_loss(values, found.vs)
        sum_losses(losses, everything, BANDIT_BEHAVIOR[0])[0].backward()
        for tensor in (logits, value):
            if tensor.grad is not None:
                tensor.data -= rate * tensor.grad
                tensor.grad = None
    return logits.softmax(-1)[1].item()


@pytest.mark.parametrize(("baseline", "expected"), [("none", 0.25), ("implied policy", 1.0), ("learned", 1.0)])
def test_off_policy_v_trace_needs_a_baseline(baseline, expected):
    """Proposition 2 of arXiv:1909.11583 leaves the baseline out: then mu, which rarely tries the best, misleads."""
    assert bandit(baseline) == pytest.approx(expected, abs=0.005)


def test_the_divergence_of_an_unroll_is_the_sum_over_its_steps():
    behavior, target = random_logits(0), random_logits(1)
    mask = torch.from_numpy(np.random.default_rng(2).random(SHAPE[:2]) < 0.6)
    mask[:, 0] = False
    found = unroll_divergence(behavior, target, mask)
    for b in range(SHAPE[1]):
        total = 0.0
        for t in range(SHAPE[0]):
            mu, pi = probabilities(behavior[t, b].tolist()), probabilities(target[t, b].tolist())
            total += sum(p * math.log(p / m) for p, m in zip(pi, mu, strict=True)) * bool(mask[t, b])
        assert float(found[b]) == pytest.approx(total)
    assert found[0] == 0
    excluded = behavior.masked_fill(~mask.unsqueeze(-1), -torch.inf)  # what is masked may be anything
    torch.testing.assert_close(unroll_divergence(excluded, target, mask), found)


def test_features_of_an_unroll_are_means_of_normalised_steps():
    features = torch.from_numpy(np.random.default_rng(0).normal(3, 2, (6, 4, 50))).float()
    mask = torch.from_numpy(np.random.default_rng(1).random((6, 4)) < 0.6)
    mask[:, 0], features[~mask] = False, torch.nan
    found = unroll_features(features, mask, torch.eye(50))
    for b in range(4):
        steps = [features[t, b].tolist() for t in range(6) if mask[t, b]]
        normalised = []
        for step in steps:
            mean = sum(step) / 50
            deviation = math.sqrt(sum((x - mean) ** 2 for x in step) / 50 + 1e-5)
            normalised.append([(x - mean) / deviation for x in step])
        expected = [sum(column) / len(steps) for column in zip(*normalised, strict=True)] or [0.0] * 50
        assert found[b].tolist() == pytest.approx(expected, abs=1e-5)
    torch.testing.assert_close(unroll_features(100 * features, mask, torch.eye(50)), found, atol=1e-4, rtol=1e-4)


def test_the_random_projection_is_always_the_same_and_keeps_distances_on_average():
    projection = random_projection(400)
    assert projection.shape == (400, 32) and torch.equal(projection, random_projection(400))
    vectors = torch.from_numpy(np.random.default_rng(0).normal(size=(2000, 400))).float()
    ratios = (vectors @ projection).norm(dim=1) / vectors.norm(dim=1)
    assert float((ratios**2).mean()) == pytest.approx(1, abs=0.1)


def test_feature_distances_are_distances():
    features, others = (torch.from_numpy(np.random.default_rng(s).normal(size=(7, 5))) for s in (0, 1))
    for measure in ("l2", "cosine"):
        assert feature_distances(features, features.clone(), measure).tolist() == [0] * 7, "not even by rounding"
        found = feature_distances(features, others, measure)
        assert (found > 0).all()
        torch.testing.assert_close(feature_distances(features, others[0], measure)[0], found[0])
    # A similarity turned round: the opposite is farthest.
    many = torch.from_numpy(np.random.default_rng(2).normal(size=(1000, 32))).float()
    assert feature_distances(many, many.clone(), "cosine").tolist() == [0] * 1000
    assert feature_distances(many, many * 1.001, "cosine").min() >= 0
    assert feature_distances(features, -features, "cosine") == pytest.approx(np.full(7, 2.0))
    assert feature_distances(features, 3 * features, "cosine") == pytest.approx(np.zeros(7), abs=1e-6)
    assert feature_distances(torch.zeros(2, 5), torch.zeros(5), "cosine").isfinite().all()
    assert float(feature_distances(torch.tensor([[3.0, 4.0]]), torch.zeros(2), "l2")) == 5
