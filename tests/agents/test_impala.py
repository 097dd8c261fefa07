"""IMPALA's learner: its gradients beside a slow twin's, and everything that must not reach them."""

import math

import pytest
import torch

from apexrl.errors import ConfigError
from apexrl.losses.relevance import accepted_states
from tests.agents.impala_parts import (
    LASER,
    NUM_ACTIONS,
    SIZES,
    gradients_of,
    make_learner,
    random_batches,
    slow_gradients,
    updates,
)
from tests.losses.unrolls import T

GAMMA = 0.9
ALL = {"queue": 80}
CASES = {
    "impala": updates(),
    "mean": updates(reduction="mean"),
    "other-traces": updates(rho_bar=2.0, c_bar=1.5, pg_rho_bar=1.7, trace_lambda=0.8),
    "soft-asymmetric": updates(reward_transform="soft-asymmetric"),
    "laser": updates(mix=LASER),
    "laser-mean": updates(mix=LASER, reduction="mean", rho_bar=1.5),
    "no-region": updates(mix=LASER, trust_region=0.0),
    "clear": updates(mix=LASER, policy_cloning_cost=0.4, value_cloning_cost=0.6),
}


def sizes_of(update):
    return SIZES if update.mix == LASER else ALL


@pytest.mark.parametrize("lstm", [False, True], ids=["feed-forward", "lstm"])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_papers_definitions(name, lstm):
    update = CASES[name]
    learner = make_learner(update, lstm)
    batches = random_batches(1, sizes_of(update), lstm, weights=(0.0, 0.5, 1.0))
    expected, loss = slow_gradients(learner, update, batches, GAMMA)
    found, metrics = gradients_of(learner, batches)
    assert metrics["loss"] == pytest.approx(loss, rel=1e-4)
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
    if update.mix == LASER and update.trust_region:
        assert 0.1 < metrics["rejected_share"] < 0.9
    else:
        assert metrics["rejected_share"] == 0


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("mix", [("queue=1",), LASER], ids=["impala", "laser"])
def test_a_target_steers_the_weight_of_the_entropy(mix, reduction):
    usual = {"mix": mix, "reduction": reduction, "entropy_cost": 0.3}
    update = updates(**usual, entropy_target=0.9)
    learner, plain = make_learner(update), make_learner(updates(**usual))
    batches = random_batches(1, sizes_of(update), weights=(0.0, 0.5, 1.0))
    (found, metrics), (expected, _) = gradients_of(learner, batches), gradients_of(plain, batches)
    torch.testing.assert_close(found, expected)
    assert metrics["temperature"] == pytest.approx(0.3)
    slow, share = 0.0, 1 / 4 if mix == LASER else 1
    batch = batches["queue"]  # only new rows steer it
    logits = learner.online["network"].unroll(batch.observation).logits.detach()
    accepted = torch.ones(T, len(batch.weight), dtype=torch.bool)
    if mix == LASER:
        mu = batch.extras["behavior_log_probs"]
        accepted = accepted_states(mu, logits[:-1], update.trust_region, update.rho_bar)
    for b in range(len(batch.weight)):
        for t in range(T):
            if not batch.start[t + 1, b] and accepted[t, b]:
                pi = logits[t, b].double().softmax(-1)
                slow += batch.weight[b].item() / share * (-(pi * pi.log()).sum().item() - 0.9)
    (logarithm,) = learner.online["temperature"].parameters()
    assert logarithm.grad.item() == pytest.approx(slow, rel=1e-4) and slow > 0, "more entropy than the target"
    learner.apply()
    assert logarithm.item() < math.log(0.3)
    assert "temperature.logarithm" in learner.learning_tensors() and learner.acting_tensors().keys() == (
        plain.acting_tensors().keys()
    )


@pytest.mark.parametrize("changes", [{"entropy_cost": 0.0}, {"entropy_cost": "0.3:0.1:10"}])
def test_a_target_of_the_entropy_needs_a_weight_that_is_learned(changes):
    with pytest.raises(ConfigError, match="--entropy-target learns the weight"):
        make_learner(updates(**{"entropy_target": 0.9, **changes}))


@pytest.mark.parametrize("cost", [0.4, 0.25, 0.1])
def test_the_weight_of_the_entropy_may_change(cost):
    batches = random_batches(1, ALL)
    falling = make_learner(updates(entropy_cost="0.4:0.1:100"))
    falling.schedule({"learning_rate": 1e-3, "entropy_cost": cost})
    found, _ = gradients_of(falling, batches)
    expected, _ = gradients_of(make_learner(updates(entropy_cost=cost)), batches)
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-8)


def changed_where(batch, mask, seed=0):
    """Returns a batch with other numbers at the steps of a mask [T, B]: nothing is left of what they said."""
    torch.manual_seed(seed)
    places = mask.nonzero(as_tuple=True)
    count = len(places[0])
    behavior, value = (batch.extras[name].clone() for name in ("behavior_log_probs", "behavior_value"))
    action, reward = batch.action.clone(), batch.reward.clone()
    behavior[places] = torch.randn(count, NUM_ACTIONS).log_softmax(-1).half()
    value[places] = torch.randn(count).half()
    action[places] = (action[places] + 1) % NUM_ACTIONS
    reward[places] = 5 * torch.randn(count)
    extras = batch.extras | {"behavior_log_probs": behavior, "behavior_value": value}
    return batch._replace(action=action, reward=reward, extras=extras)


@pytest.mark.parametrize("lstm", [False, True], ids=["feed-forward", "lstm"])
def test_a_reset_teaches_nothing(lstm):
    """Its action was ignored. Its discount is the environment's, but nothing follows it in its episode."""
    update = CASES["clear"]
    learner, batches = make_learner(update, lstm), random_batches(2, SIZES, lstm)
    before, metrics = gradients_of(learner, batches)
    assert all(batch.start[1:].any() for batch in batches.values())
    others = {name: changed_where(batch, batch.start[1:]) for name, batch in batches.items()}
    after, other_metrics = gradients_of(learner, others)
    assert torch.equal(before, after) and metrics == other_metrics


def with_episode(batch, other, steps):
    """Returns a batch with the steps and observations of a slice of time from another one."""
    observation = batch.observation.clone()
    observation[steps] = other.observation[steps]
    taken = {}
    for name in ("action", "reward", "discount"):
        taken[name] = getattr(batch, name).clone()
        taken[name][steps] = getattr(other, name)[steps]
    extras = dict(batch.extras)
    for name in ("behavior_log_probs", "behavior_value"):
        extras[name] = extras[name].clone()
        extras[name][steps] = other.extras[name][steps]
    return batch._replace(observation=observation, extras=extras, **taken)


@pytest.mark.parametrize("terminated", [True, False], ids=["terminated", "truncated"])
@pytest.mark.parametrize("lstm", [False, True], ids=["feed-forward", "lstm"])
def test_nothing_crosses_an_episode(terminated, lstm):
    """The gradient of two episodes is a sum: what the second one adds does not depend on the first, nor the reverse."""
    update = updates(policy_cloning_cost=0.4, value_cloning_cost=0.6, mix=LASER, trust_region=0.5)
    learner, end = make_learner(update, lstm), 2  # the last step of the first episode; 3 is the reset

    def batches_of(first, second):
        made = {}
        for name in SIZES:
            batch = with_episode(sources[first][name], sources[second][name], slice(end + 2, T + 1))
            start = torch.zeros_like(batch.start)
            start[end + 2] = True
            discount = torch.ones_like(batch.discount)
            discount[end] = 0.0 if terminated else 1.0
            made[name] = batch._replace(start=start, discount=discount)
        return made

    sources = [random_batches(seed, SIZES, lstm) for seed in (3, 4)]
    gradients = {(i, j): gradients_of(learner, batches_of(i, j))[0] for i in (0, 1) for j in (0, 1)}
    changed_by_second = gradients[0, 1] - gradients[0, 0]
    assert changed_by_second.abs().max() > 1
    torch.testing.assert_close(changed_by_second, gradients[1, 1] - gradients[1, 0], rtol=1e-3, atol=1e-3)


def test_a_truncated_episode_learns_from_its_final_observation_and_a_terminated_one_does_not():
    learner, end = make_learner(CASES["impala"]), 2

    def gradient(terminated, final):
        batch = random_batches(5, ALL)["queue"]
        start, discount = torch.zeros_like(batch.start), torch.ones_like(batch.discount)
        start[end + 2] = True
        discount[end] = 0.0 if terminated else 1.0
        observation = batch.observation.clone()
        observation[end + 1] += final
        return gradients_of(learner, {"queue": batch._replace(start=start, discount=discount, observation=observation)})

    assert torch.equal(gradient(True, 0.0)[0], gradient(True, 1.0)[0])
    assert (gradient(False, 0.0)[0] - gradient(False, 1.0)[0]).abs().max() > 0.5


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_rows_that_only_fill_a_batch_change_nothing(reduction):
    update = updates(mix=LASER, reduction=reduction, policy_cloning_cost=0.4)
    learner = make_learner(update)
    some, others = (random_batches(seed, SIZES) for seed in (6, 7))
    weight = {name: (torch.arange(len(batch.weight)) % 3 > 0).float() for name, batch in some.items()}

    def filled_from(source):
        made = {}
        for name, batch in some.items():
            fills = weight[name] == 0
            *steps, extras, _ = batch
            *other_steps, other_extras, _ = source[name]
            mixed = [torch.where(shaped(fills, a), b, a) for a, b in zip(steps, other_steps, strict=True)]
            mixed_extras = {
                key: torch.where(shaped(fills, extras[key]), other_extras[key], extras[key]) for key in extras
            }
            made[name] = type(batch)(*mixed, mixed_extras, weight[name])
        return gradients_of(learner, made)

    def shaped(rows, tensor):
        return rows.view(1, -1, *[1] * (tensor.dim() - 2))

    (first, metrics), (second, other_metrics) = filled_from(some), filled_from(others)
    torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-6)
    assert metrics == pytest.approx(other_metrics, rel=1e-5)


def loss_of(batches, **changes):
    update = updates(trust_region=0.0, **changes)
    return gradients_of(make_learner(update), batches)[1]


def slow_entropies(learner, batch):
    """The sum of the entropies of the states of a batch that are no resets."""
    pi = learner.online["network"].unroll(batch.observation).logits[:-1].double().softmax(-1)
    return -(pi * pi.log()).sum(-1)[~batch.start[1:]].sum().item()


@pytest.mark.parametrize(
    ("mix", "tables", "weight"),
    [(LASER, ["queue"], 4), (("queue=1",), ["queue"], 1), (("uniform=1",), ["uniform"], 1)],
)
def test_new_rows_alone_keep_the_entropy_up_with_the_weight_that_all_would_have(mix, tables, weight):
    batches = random_batches(8, {name.split("=")[0]: SIZES.get(name.split("=")[0]) for name in mix})
    expected = sum(slow_entropies(make_learner(updates(mix=mix)), batches[table]) for table in tables)
    found = loss_of(batches, mix=mix, entropy_cost=0.0)["loss"] - loss_of(batches, mix=mix, entropy_cost=0.5)["loss"]
    num_steps = sum((~batch.start[1:]).sum().item() for batch in batches.values())
    assert found == pytest.approx(0.5 * weight * expected / num_steps, rel=1e-4)


def test_states_outside_the_trust_region_teach_nothing_and_others_do():
    """The behaviour of some rows is the policy itself: their KL is 0. That of the others is far from it."""
    update = updates(mix=LASER, trust_region=0.01)
    learner, batches = make_learner(update), random_batches(10, SIZES)
    for batch in batches.values():
        logits = learner.online["network"].unroll(batch.observation).logits[:-1].detach()
        far = torch.full_like(logits, -8.0)
        far.scatter_(-1, logits.argmin(-1, keepdim=True), 0.0)
        rejected = torch.arange(logits.shape[1]) % 2 == 0
        chosen = torch.where(rejected.view(1, -1, 1), far, logits).log_softmax(-1).half()
        batch.extras["behavior_log_probs"] = chosen
    before, metrics = gradients_of(learner, batches)
    assert 0.4 < metrics["rejected_share"] < 0.6
    for name, batch in batches.items():
        rows = torch.arange(batch.reward.shape[1]) % 2 == 0
        batches[name] = batch._replace(reward=torch.where(rows, 100.0, batch.reward))
    assert torch.equal(before, gradients_of(learner, batches)[0])
    assert not torch.equal(before, gradients_of(make_learner(updates(mix=LASER, trust_region=0.0)), batches)[0])


def test_metrics_are_means_over_real_steps():
    update = CASES["impala"]
    learner = make_learner(update)
    batches = random_batches(11, ALL, weights=(0.0, 1.0))
    batch = batches["queue"]
    metrics = gradients_of(learner, batches)[1]
    output = learner.online["network"].unroll(batch.observation)
    real = ~batch.start[1:] & (batch.weight > 0)
    pi = output.logits[:-1].softmax(-1)[real]
    assert metrics["value_mean"] == pytest.approx(output.values[:-1][real].mean().item(), rel=1e-4)
    assert metrics["entropy"] == pytest.approx(-(pi * pi.log()).sum(-1).mean().item(), rel=1e-4)
    shares = [value for name, value in metrics.items() if name.startswith("probability_")]
    assert shares == pytest.approx(pi.mean(0).tolist(), rel=1e-4) and math.isclose(sum(shares), 1, rel_tol=1e-5)


@pytest.mark.parametrize("lstm", [False, True])
def test_parts_are_joined_where_the_network_computes_in_bfloat16(lstm):
    learner, batches = make_learner(updates(mix=LASER, replay_state="stored"), lstm), random_batches(8, SIZES, lstm)
    learner._precision = lambda: torch.autocast("cpu", torch.bfloat16)  # as for pictures, whatever this machine has
    behaviors = [batch.extras["behavior_log_probs"] for batch in batches.values()]
    assert {values.dtype for values in behaviors} == {torch.float16}, "as the log holds them"
    assert learner.gradients(batches, lambda: None).metrics["loss"].isfinite()
