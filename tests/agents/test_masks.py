"""Families and masks of actions: losses beside plain ones without the forbidden actions, and what actors choose."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from apexrl.agents import apex_dqn
from apexrl.agents.apex_dqn_config import FAMILY as APEX
from apexrl.agents.apex_dqn_config import ApexUpdate
from apexrl.agents.contract import Observation, TransitionBatch
from apexrl.agents.families import family_of, implementation
from apexrl.agents.pqn_config import PqnUpdate
from apexrl.agents.pqn_config import stream as pqn_stream
from apexrl.losses.quantiles import quantile_huber
from apexrl.networks.actor_critic import ActorCriticNetwork
from apexrl.networks.config import DuelingConfig, to_text
from apexrl.networks.dueling import make_network, make_normalized_network
from apexrl.networks.headers import ParametersHeader
from apexrl.networks.parameters import Parameters
from apexrl.types import FORBIDDEN, EnvironmentSpec
from tests.agents import test_pqn as pqn_parts
from tests.agents import test_r2d2 as r2d2_parts
from tests.agents.impala_parts import CPU, LASER, SIZES, algorithm_of, random_batches, slow_gradients, updates
from tests.agents.impala_parts import NETWORK as ACTOR_CRITIC
from tests.agents.impala_parts import make_learner as make_impala
from tests.lockstep import ALGORITHM
from tests.losses.unrolls import T

A, SIZE, N, ALPHA, TAU = 3, 40, 6, 0.9, 0.03
FREE = EnvironmentSpec("Doors-v0", (4 + A,), "float32", 2, A, 1)
MASKED = EnvironmentSpec("Doors-v0", (4 + A,), "float32", 2, A, 1, variant='{"action_mask": "mask"}')
FAMILIES = ["apex-dqn", "pqn", "r2d2", "impala", "impact"]


def masks(rng, *shape, most=A):
    """Masks [.., A] of which each allows 1 to `most` actions."""
    order = rng.permuted(np.broadcast_to(np.arange(A), (*shape, A)), axis=-1)
    return torch.from_numpy(order < rng.integers(1, most + 1, (*shape, 1)))


def with_masks(frames, mask):
    """Frames [.., H, 4] with masks [.., A] of the newest; those before it allow the opposite."""
    stacked = torch.stack([~mask, mask], dim=-2).float()
    return torch.cat([frames, stacked], dim=-1)


def chosen(rng, mask):
    """Allowed actions of masks [.., A]."""
    return torch.from_numpy(rng.random(mask.shape)).masked_fill(~mask, -1).argmax(dim=-1)


def without_masks(network, make, *sizes):
    """A network with the same parameters that knows no masks."""
    free = make(FREE, *sizes)
    free.load_state_dict(network.state_dict())
    return free


def close_gradients(learner, expected, part):
    for parameter, gradient in zip(learner.online[part].parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient.float(), rtol=1e-4, atol=1e-5)


def transitions(seed):
    """A batch, and the masks of its observations and of the next ones."""
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    before, after = (masks(rng, SIZE) for _ in "12")
    frames = torch.randn(2, SIZE, 2, 4, generator=generator)
    returns, discount = torch.randn(SIZE, generator=generator), 0.9 * (torch.arange(SIZE) % 4 > 0).float()
    weight = torch.rand(SIZE, generator=generator)
    batch = TransitionBatch(
        with_masks(frames[0], before), chosen(rng, before), returns, discount, with_masks(frames[1], after), weight
    )
    return batch, before, after


def slow_losses(learner, batch, before, after, quantiles, munchausen):
    """Losses [B], errors [B] and mean values [B], row by row of its allowed actions, and their network."""
    sizes = DuelingConfig((4, 4, 4), 16, quantiles=quantiles)
    online, target = (without_masks(nets["q"], make_network, sizes) for nets in (learner.online, learner.target))

    def returns(network, observation):
        prepared = network.prepare(observation)
        found = network.quantiles(prepared) if quantiles else network.values(prepared).unsqueeze(2)
        return found.double()  # [B, A, N]

    taken_online, next_online = returns(online, batch.observation), returns(online, batch.next_observation).mean(dim=2)
    taken_target, next_target = returns(target, batch.observation).mean(dim=2), returns(target, batch.next_observation)
    losses, errors, means = [], [], []
    for b in range(SIZE):
        reward, action = batch.n_step_return[b].double(), batch.action[b]
        allowed, allowed_after = before[b].nonzero().flatten(), after[b].nonzero().flatten()
        value = next_target[b][allowed_after][next_online[b][allowed_after].argmax()]
        if munchausen:
            log_policy = (next_target[b][allowed_after].mean(dim=1) / TAU).log_softmax(dim=0).unsqueeze(1)
            value = (log_policy.exp() * (next_target[b][allowed_after] - TAU * log_policy)).sum(dim=0)
            log_taken = (taken_target[b][allowed] / TAU).log_softmax(dim=0)[allowed == action]
            reward = reward + munchausen * (TAU * log_taken).clamp(-1, 0)
        aim, taken = (reward + batch.discount[b] * value).detach(), taken_online[b, action]
        losses.append(quantile_huber(taken[None], aim[None])[0] if quantiles else nn.functional.huber_loss(taken, aim))
        errors.append(abs((aim.mean() - taken.mean()).item()))
        means.append(taken_online[b][allowed].mean().item())
    return torch.stack(losses), errors, means, online


@pytest.mark.parametrize(("quantiles", "munchausen"), [(0, 0.0), (N, 0.0), (0, ALPHA), (N, ALPHA)])
def test_targets_of_ape_x_and_its_heirs_leave_forbidden_actions_out(quantiles, munchausen):
    torch.manual_seed(7)
    update = ApexUpdate(SIZE, munchausen=munchausen, policy_temperature=TAU)
    sizes, spec = DuelingConfig((4, 4, 4), 16, quantiles=quantiles), APEX.stream(ALGORITHM, MASKED)
    learner = apex_dqn.make_learner(ALGORITHM, sizes, update, spec, CPU)
    with torch.no_grad():
        for parameter in [*learner.online.parameters(), *learner.target.parameters()]:
            parameter.add_(0.1 * torch.randn_like(parameter))
    batch, before, after = transitions(5)
    losses, errors, means, online = slow_losses(learner, batch, before, after, quantiles, munchausen)
    expected = torch.autograd.grad((batch.weight * losses).sum(), list(online.parameters()))
    batches = {update.table: batch}
    outcome = learner.gradients(batches, lambda: learner.from_online(batches, learner.from_target(batches)))
    close_gradients(learner, expected, "q")
    assert outcome.priorities[update.table].tolist() == pytest.approx([error + 1e-6 for error in errors], rel=1e-3)
    assert outcome.metrics["q_mean"].tolist() == pytest.approx(means, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(("quantiles", "munchausen"), [(0, 0.0), (N, ALPHA)])
def test_an_end_where_nothing_is_allowed_changes_nothing(quantiles, munchausen):
    """An observation after the end may have a mask of zeros: its value counts nothing, and is no NaN."""
    torch.manual_seed(7)
    update = ApexUpdate(SIZE, munchausen=munchausen)
    sizes, spec = DuelingConfig((4, 4, 4), 16, quantiles=quantiles), APEX.stream(ALGORITHM, MASKED)
    learner = apex_dqn.make_learner(ALGORITHM, sizes, update, spec, CPU)
    batch, _, after = transitions(6)
    found = []
    for mask in (after, after & (batch.discount > 0).unsqueeze(1)):
        next_observation = with_masks(batch.next_observation[..., :4], mask)
        batches = {update.table: batch._replace(next_observation=next_observation)}
        outcome = learner.gradients(batches, lambda: learner.from_online(batches, learner.from_target(batches)))
        found.append(outcome.priorities[update.table])
    assert found[0].isfinite().all() and found[0].max() < 100
    torch.testing.assert_close(*found)


class Excluding(nn.Module):
    """The values of a network, of which those of forbidden actions are missing: no maximum takes them."""

    def __init__(self, free):
        super().__init__()
        self.free = free

    def forward(self, observation):
        return self.free(observation).double().masked_fill(observation[:, -1, -A:] == 0, -torch.inf)


def test_returns_of_pqn_leave_forbidden_actions_out():
    torch.manual_seed(7)
    update, sizes = PqnUpdate(batch_size=SIZE, mix=("queue=1",)), pqn_parts.NETWORK
    learner = implementation(family_of("pqn")).make_learner(
        pqn_parts.ALGORITHM, sizes, update, pqn_stream(pqn_parts.ALGORITHM, MASKED), CPU
    )
    ((table, batch),) = random_batches(3, {"queue": SIZE}, weights=(0.0, 1.0)).items()
    rng = np.random.default_rng(4)
    mask = masks(rng, T + 1, SIZE)
    batches = {table: batch._replace(observation=with_masks(batch.observation, mask), action=chosen(rng, mask[:-1]))}
    metrics = learner.gradients(batches, lambda: None).metrics
    twin = Excluding(without_masks(learner.online["q"], make_normalized_network, sizes))
    expected, loss = pqn_parts.slow_gradient(SimpleNamespace(online={"q": twin}), update, batches)
    found = torch.cat([parameter.grad.flatten() for parameter in learner.online["q"].parameters()])
    torch.testing.assert_close(found / learner.gradient[-1], expected.float(), rtol=1e-4, atol=1e-6)
    assert metrics["loss"].item() == pytest.approx(loss, rel=1e-5) and metrics["q_mean"].abs() < 100


class MaskedStream(r2d2_parts.Stream):
    """The stream of R2D2's tests with masks, and values without the forbidden actions."""

    def __init__(self, starts):
        super().__init__(starts)
        rng = np.random.default_rng(4)
        self.masks = masks(rng, len(self.frames))
        self.frames = np.concatenate([self.frames, self.masks.numpy().astype(np.float32)], axis=1)
        self.actions = chosen(rng, self.masks[:-1]).numpy().astype(np.int32)

    def values(self, *arguments):
        values, states = super().values(*arguments)
        return {at: row.masked_fill(~self.masks[at], -torch.inf) for at, row in values.items()}, states


@pytest.mark.parametrize(("unrolls", "burn_in"), [(1, 1), (2, 0)])
def test_sequences_of_r2d2_leave_forbidden_actions_out(unrolls, burn_in):
    environment = EnvironmentSpec("Doors-v0", (4 + A,), "float32", 1, A, 1, variant=MASKED.variant)
    spec = family_of("r2d2").stream(r2d2_parts.ALGORITHM, environment)
    state = f"burn-in:{burn_in * r2d2_parts.K}" if burn_in else "stored"
    world = r2d2_parts.R2d2World(r2d2_parts.update_of(unrolls, state), MaskedStream([0, 9, 19]), spec=spec)
    r2d2_parts.check_gradients(world, unrolls, burn_in)


class Subset(nn.Module):
    """An actor-critic whose policies are over two allowed actions alone, by their places [T + 1, B, 2]."""

    def __init__(self, free, places):
        super().__init__()
        self.free, self.places = free, places

    def unroll(self, observation, history):
        output = self.free.unroll(observation, history)
        return output._replace(logits=output.logits.gather(-1, next(self.places)))


@pytest.mark.parametrize("changes", [{"trust_region": 0.5}, {"policy_cloning_cost": 0.2, "trust_region": 0.0}])
def test_policies_of_impala_and_laser_are_over_allowed_actions_alone(changes):
    update, rng = updates(mix=LASER, **changes), np.random.default_rng(4)
    learner = make_impala(update, environment=MASKED)
    batches, small, places = {}, {}, []
    for table, batch in random_batches(3, SIZES).items():
        size = len(batch.weight)
        mask = torch.from_numpy(rng.permuted(np.broadcast_to([0, 1, 1], (T + 1, size, A)), axis=-1) > 0)
        places.append(mask.nonzero()[:, 2].view(T + 1, size, 2))
        observation, action = with_masks(batch.observation, mask), torch.from_numpy(rng.integers(2, size=(T, size)))
        log_probs = torch.from_numpy(rng.normal(size=(T, size, 2))).log_softmax(-1).half()
        all_log_probs = torch.full((T, size, A), -30.0, dtype=torch.half).scatter(-1, places[-1][:-1], log_probs)
        taken = places[-1][:-1].gather(-1, action.unsqueeze(-1)).squeeze(-1)
        for found, actions, behavior in ((batches, taken, all_log_probs), (small, action, log_probs)):
            extras = batch.extras | {"behavior_log_probs": behavior}
            found[table] = batch._replace(observation=observation, action=actions, extras=extras)
    metrics = learner.gradients(batches, lambda: None).metrics
    found = torch.cat([parameter.grad.flatten() for parameter in learner.online["network"].parameters()])
    twin = Subset(without_masks(learner.online["network"], ActorCriticNetwork, ACTOR_CRITIC), iter(places))
    expected, loss = slow_gradients(SimpleNamespace(online={"network": twin}), update, small, 0.9)
    torch.testing.assert_close(found, expected.float(), rtol=1e-3, atol=1e-3)
    assert metrics["loss"].item() == pytest.approx(loss, rel=1e-3) and 0 < metrics["entropy"] < np.log(2)


def make_actor(agent):
    """An actor of a new network, whose biases are not zero."""
    torch.manual_seed(3)
    family = family_of(agent)
    algorithm, network = family.algorithm, dataclasses.replace(family.network, channels=(4, 4, 4), hidden_size=16)
    spec = family.stream(algorithm, MASKED)
    learner = implementation(family).make_learner(algorithm, network, family.update, spec, CPU)
    tensors = {name: tensor + 0.1 * torch.randn_like(tensor) for name, tensor in learner.acting_tensors().items()}
    return implementation(family).make_actor(
        algorithm, Parameters(ParametersHeader(1, spec, agent, to_text(network)), tensors), CPU
    )


@pytest.mark.parametrize("agent", FAMILIES)
@pytest.mark.parametrize("exploration", [0.0, 0.5, 1.0])
def test_no_actor_takes_a_forbidden_action(agent, exploration):
    actor, rng, num_envs = make_actor(agent), np.random.default_rng(2), 300
    state = actor.initial_state(num_envs)
    for step in range(5):
        mask = masks(rng, num_envs).numpy()
        mask[0] = False  # after an end
        frames = np.concatenate([rng.normal(size=(num_envs, 4)), mask], axis=1).astype(np.float32)
        seen = Observation(frames, np.full(num_envs, step == 0), np.zeros(num_envs, np.float32))
        actions, extras, state = actor.act(seen, np.full(num_envs, exploration), state, rng)
        assert mask[np.arange(1, num_envs), actions[1:]].all() and 0 <= actions[0] < A
        assert set(actions[mask.all(axis=1)]) == set(range(A)) or exploration < 1
        if "behavior_log_probs" in extras:
            assert (extras["behavior_log_probs"][1:][~mask[1:]] == -30).all()
            assert np.exp(extras["behavior_log_probs"].astype(float)).sum(axis=1) == pytest.approx(1, abs=1e-2)
        if "q_max" in extras:
            assert (extras["q_max"] > FORBIDDEN).all()


def test_an_update_of_impact_has_finite_gradients():
    family = family_of("impact")
    algorithm, update = algorithm_of(False), family.update
    spec = family.stream(algorithm, MASKED)
    learner = implementation(family).make_learner(algorithm, ACTOR_CRITIC, update, spec, CPU)
    (want,) = family.wants(algorithm, update)
    ((table, batch),) = random_batches(3, {want.table: want.num_rows}).items()
    rng = np.random.default_rng(4)
    mask = masks(rng, T + 1, want.num_rows)
    batches = {table: batch._replace(observation=with_masks(batch.observation, mask), action=chosen(rng, mask[:-1]))}
    metrics = learner.gradients(batches, lambda: learner.from_online(batches, learner.from_target(batches))).metrics
    assert learner.gradient.isfinite().all() and all(metric.isfinite().all() for metric in metrics.values())
