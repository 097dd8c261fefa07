"""Ape-X's learner with quantiles and Munchausen targets: against plain tensors, autograd, and a graph's replays."""

import dataclasses
import math

import pytest
import torch

from apexrl.agents import apex_dqn
from apexrl.agents.apex_dqn_config import ApexUpdate, wants
from apexrl.errors import ConfigError
from apexrl.learning.experience.draw import Draw
from apexrl.learning.updates.updater import Updater
from apexrl.losses.quantiles import quantile_huber
from apexrl.losses.value_learning import inverse_rescale, rescale
from apexrl.networks.config import DuelingConfig
from tests.devices import CPU
from tests.fake_graph import FakeDeviceStream
from tests.learning.twins import update_both
from tests.learning.updates.test_updater import SCREENS, SIZE, VECTORS, World
from tests.lockstep import ALGORITHM, TABLE, results

N, ALPHA = 6, 0.9
UPDATE = ApexUpdate(SIZE, "adam", 1e-3, optimizer_epsilon=1e-5, max_gradient_norm=40.0, target_period_updates=7)
KINDS = [(0, 0.0), (N, 0.0), (1, 0.0), (0, ALPHA), (N, ALPHA)]
IDS = ["values", "quantiles", "one quantile", "munchausen", "both"]


def world_of(make_unroll, spec, quantiles, munchausen, device_stream=None, algorithm=ALGORITHM):
    world = World(make_unroll, spec, CPU, device_stream=device_stream)
    torch.manual_seed(7)
    network = DuelingConfig((4, 4, 4), 16, quantiles=quantiles)
    update = dataclasses.replace(UPDATE, munchausen=munchausen)
    learner = apex_dqn.make_learner(algorithm, network, update, spec, CPU)
    with torch.no_grad():
        for tensor in learner.target.parameters():
            tensor.add_(0.1 * torch.randn_like(tensor))
    world.updater = Updater(learner, world.device_stream)
    return world


def by_definition(learner, batch, quantiles, munchausen, is_rescaled=False):
    """Losses and errors [B] once more, as the papers have them, without closed forms."""
    online, target = learner.online["q"], learner.target["q"]

    def returns(network, observation):
        prepared = network.prepare(observation)
        return network.quantiles(prepared) if quantiles else network.values(prepared).unsqueeze(2)

    after, rows = returns(target, batch.next_observation), torch.arange(SIZE)
    reward = batch.n_step_return
    if munchausen:
        policy = (after.mean(dim=2) / 0.03).softmax(dim=1)
        entropy = -0.03 * policy.clamp(min=1e-30).log()
        value = (policy.unsqueeze(2) * (after + entropy.unsqueeze(2))).sum(dim=1)
        log_policy = (target(batch.observation) / 0.03).log_softmax(dim=1)[rows, batch.action]
        reward = reward + munchausen * (0.03 * log_policy).clamp(-1, 0)
    else:
        value = after[rows, online(batch.next_observation).argmax(dim=1)]
    value = inverse_rescale(value) if is_rescaled else value
    targets = (reward.unsqueeze(1) + batch.discount.unsqueeze(1) * value).detach()
    targets = rescale(targets) if is_rescaled else targets
    taken = returns(online, batch.observation)[rows, batch.action]
    errors = (targets.mean(dim=1) - taken.mean(dim=1)).detach().abs()
    if quantiles:
        return quantile_huber(taken, targets), errors
    return torch.nn.functional.huber_loss(taken, targets, reduction="none").squeeze(1), errors


@pytest.mark.parametrize(
    ("quantiles", "munchausen", "is_rescaled"),
    [*((*kind, False) for kind in KINDS), (N, 0.0, True)],
    ids=[*IDS, "rescaled quantiles"],
)
def test_gradients_and_priorities_are_those_of_the_papers(make_unroll, quantiles, munchausen, is_rescaled):
    algorithm = dataclasses.replace(ALGORITHM, value_rescaling=is_rescaled)
    world = world_of(make_unroll, VECTORS, quantiles, munchausen, algorithm=algorithm)
    learner, batches = world.updater.learner, {TABLE: world.store.gather(TABLE, *world.sample()).batch}
    losses, errors = by_definition(learner, batches[TABLE], quantiles, munchausen, is_rescaled)
    expected = torch.autograd.grad((batches[TABLE].weight * losses).sum(), learner.online.parameters())
    outcome = learner.gradients(batches, lambda: learner.from_online(batches, learner.from_target(batches)))
    for parameter, gradient in zip(learner.online.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(outcome.priorities[TABLE], errors + 1e-6, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("quantiles", "munchausen"), KINDS, ids=IDS)
@pytest.mark.parametrize("spec", [VECTORS, SCREENS], ids=["vectors", "screens"])
def test_a_graph_makes_the_same_updates(make_unroll, spec, quantiles, munchausen):
    graph = world_of(make_unroll, spec, quantiles, munchausen, FakeDeviceStream())
    plain = world_of(make_unroll, spec, quantiles, munchausen)
    for _ in range(4):
        keys = graph.sample()
        update_both(graph, plain, lambda keys=keys: graph.by_keys(*keys), lambda keys=keys: plain.plainly(*keys))


def test_a_side_thread_changes_no_number(make_unroll):
    world, plain = (world_of(make_unroll, SCREENS, N, ALPHA) for _ in "12")
    for _ in range(4):
        keys = world.sample()
        draw = Draw(0, {TABLE: world.store.gather(TABLE, *keys)})
        (found, metrics), (expected, others) = results(world.updater.update(draw)), plain.plainly(*keys)
        assert found.tolist() == pytest.approx(expected.tolist(), rel=1e-4)
        assert metrics.keys() == others.keys() and math.isfinite(metrics["loss"])


def test_what_excludes_each_other_is_refused():
    algorithm = dataclasses.replace(ALGORITHM, value_rescaling=True)
    with pytest.raises(ConfigError, match=r"--munchausen adds .* leave one out"):
        wants(algorithm, dataclasses.replace(UPDATE, munchausen=ALPHA))
