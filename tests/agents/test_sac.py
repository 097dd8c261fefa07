"""SAC and CrossQ: losses once more as the papers have them, a graph's replays, draws within bounds, refusals."""

import dataclasses

import numpy as np
import pytest
import torch
from torch.distributions import Independent, Normal, TransformedDistribution
from torch.distributions.transforms import TanhTransform

from apexrl.agents.sac import SacActing, make_learner
from apexrl.agents.sac_config import FAMILY, SacAlgorithm, SacUpdate
from apexrl.config.commands import LearnerCommand
from apexrl.config.flags import default_command
from apexrl.errors import ConfigError
from apexrl.learning.experience.unroll_store import UnrollStore
from apexrl.learning.sharing import share_of
from apexrl.learning.updates.updater import Updater
from apexrl.networks.config import GaussianConfig
from apexrl.networks.device_stream import DeviceStream
from apexrl.types import EnvironmentSpec
from tests.devices import CPU
from tests.fake_graph import FakeDeviceStream
from tests.learning.twins import update_both
from tests.learning.updates.test_updater import World
from tests.lockstep import TABLE, hold

ALGORITHM = SacAlgorithm(n_steps=3, unroll_starts=8)
BOUNDS = ((-2.0, 2.0), (0.0, 1.0))
VECTORS = FAMILY.stream(ALGORITHM, EnvironmentSpec("Arm-v0", (5,), "float32", 1, 0, 1, action_bounds=BOUNDS))
SCREENS = FAMILY.stream(ALGORITHM, EnvironmentSpec("Arm-v1", (36, 36), "uint8", 2, 0, 1, action_bounds=BOUNDS))
RING, SIZE = 6, 12
UPDATE = SacUpdate(SIZE, learning_rate=1e-3, target_rate=0.25, policy_period_updates=2, first_temperature=0.3)
NORMS = ("none", "layer", "batch")


class SacWorld(World):
    """The world of Ape-X's tests with this family's learner and experience."""

    def __init__(self, make_unroll, spec, norm, device_stream=None, update=UPDATE):
        torch.manual_seed(7)
        self.make_unroll, self.spec, self.device = make_unroll, spec, CPU
        self.device_stream = device_stream or DeviceStream(CPU)
        network = GaussianConfig((4, 4, 4), 16, critic_norm=norm)
        learner = make_learner(ALGORITHM, network, update, spec, CPU)
        with torch.no_grad():
            learner.online["policy"].moments.weight.mul_(0.01)  # frames are large numbers
        self.updater = Updater(learner, self.device_stream)
        self.store = UnrollStore(spec, RING, FAMILY.wants(ALGORITHM, update), CPU, 8, self.device_stream)
        self.rng = np.random.default_rng(3)
        for number in range(RING):
            hold(self.store, number, self.make_unroll(spec, number))

    def batches(self):
        return {TABLE: self.store.gather(TABLE, *self.sample()).batch}


def chosen(policy, observation, noise):
    """Actions and log-probabilities by torch's distributions."""
    means, logs = policy(observation).chunk(2, dim=1)
    normal, squash = Independent(Normal(means, logs.exp()), 1), TanhTransform(cache_size=1)
    draws = squash(means + logs.exp() * noise)
    log_probs = TransformedDistribution(normal, [squash]).log_prob(draws)
    return policy.center + policy.reach * draws, log_probs


@pytest.fixture(autouse=True)
def same_noise(monkeypatch):
    """Noise that does not depend on how often a graph was tried before its capture."""
    noise = torch.randn(2, SIZE, len(BOUNDS), generator=torch.Generator().manual_seed(5))
    monkeypatch.setattr(torch, "randn", lambda shape, **_: noise[:, : shape[1]])
    return noise


def by_definition(learner, batch, norm, noises):
    """Losses of policy, critics and temperature once more, and errors [C, B]."""
    policy, critics, temperature = learner.online.values()
    price = temperature.logarithm.detach().exp()
    next_noise, noise = noises
    with torch.no_grad():
        next_actions, next_log_probs = chosen(policy, batch.next_observation, next_noise)
    if norm == "batch":
        critics.train()
        observations = torch.cat([batch.observation, batch.next_observation])
        values, next_values = critics(observations, torch.cat([batch.action, next_actions])).split(SIZE, dim=1)
        critics.eval()
    else:
        values = critics(batch.observation, batch.action)
        next_values = learner.target["critics"](batch.next_observation, next_actions)
    after = next_values.detach().min(dim=0).values - price * next_log_probs
    errors = batch.n_step_return + batch.discount * after - values
    actions, log_probs = chosen(policy, batch.observation, noise)
    least = critics(batch.observation, actions).min(dim=0).values
    of_policy = batch.weight * (price * log_probs - least)
    of_temperature = batch.weight * -temperature.logarithm * (log_probs.detach() - len(BOUNDS))
    return of_policy.sum(), 0.5 * (batch.weight * errors**2).sum(), of_temperature.sum(), errors


@pytest.mark.parametrize("norm", NORMS)
def test_the_gradients_are_those_of_the_papers(make_unroll, same_noise, norm):
    update = dataclasses.replace(UPDATE, policy_period_updates=1)
    world, twin = (SacWorld(make_unroll, VECTORS, norm, update=update) for _ in "12")
    learner, batches = world.updater.learner, world.batches()
    *losses, errors = by_definition(twin.updater.learner, batches[TABLE], norm, same_noise)
    outcome = learner.gradients(batches, lambda: learner.from_online(batches, learner.from_target(batches)))
    for part, theirs, loss in zip(learner.online.values(), twin.updater.learner.online.values(), losses, strict=True):
        expected = torch.autograd.grad(loss, list(theirs.parameters()), retain_graph=True)
        for parameter, gradient in zip(part.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-5)
    surprise = errors.detach().abs().mean(dim=0) + 1e-6
    torch.testing.assert_close(outcome.priorities[TABLE], surprise, rtol=1e-4, atol=1e-5)
    for buffer, theirs in zip(learner.online.buffers(), twin.updater.learner.online.buffers(), strict=True):
        torch.testing.assert_close(buffer, theirs)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("spec", [VECTORS, SCREENS], ids=["vectors", "screens"])
def test_a_graph_makes_the_same_updates(make_unroll, spec, norm):
    graph, plain = (SacWorld(make_unroll, spec, norm, stream) for stream in (FakeDeviceStream(), None))
    for _ in range(4):
        keys = graph.sample()
        update_both(graph, plain, lambda keys=keys: graph.by_keys(*keys), lambda keys=keys: plain.by_keys(*keys))
    assert graph.device_stream.num_captures == 1


def test_a_checkpoint_holds_the_temperature_and_the_statistics(make_unroll):
    learner = SacWorld(make_unroll, VECTORS, "batch").updater.learner
    names = learner.learning_tensors().keys()
    assert {"temperature.logarithm", "optimizer.temperature.0.exp_avg"} <= names
    assert {f"critics.each.1.layers.{layer}.running_var" for layer in (0, 3, 6)} <= names
    assert not any("running" in name for name in learner.acting_tensors())
    assert not any(name.startswith("target") for name in names)
    target = [n for n in SacWorld(make_unroll, VECTORS, "none").updater.learner.learning_tensors() if "target" in n]
    assert target and all(name.startswith("target.each") for name in target)


def test_actions_are_drawn_within_their_bounds_and_not_in_evaluations():
    acting = SacActing(ALGORITHM, VECTORS)
    assert acting.explore(np.arange(3), 8).tolist() == [1, 1, 1] and acting.evaluation_exploration == 0
    values = np.tile(np.float32([0.5, -0.5, -1.0, 9.0]), (4000, 1))
    actions, extras = acting.act(values, np.ones(4000), np.random.default_rng(0))
    assert extras == {} and actions.dtype == np.float32
    assert (actions.min(axis=0) >= [-2, 0]).all() and (actions.max(axis=0) <= [2, 1]).all()
    inside = np.arctanh(actions[:, 0] / 2)
    assert (inside.mean(), inside.std()) == pytest.approx((0.5, np.exp(-1)), rel=0.05)
    exact, _ = acting.act(values, np.zeros(4000), np.random.default_rng(0))
    assert exact[0] == pytest.approx([2 * np.tanh(0.5), 0.5 + 0.5 * np.tanh(-0.5)])


def test_statistics_of_batches_are_those_of_one_learner():
    command = default_command(LearnerCommand, "sac")
    command = dataclasses.replace(command, network=GaussianConfig(critic_norm="batch"))
    assert share_of(command, 1).update.batch_size == 256
    with pytest.raises(ConfigError, match=r"--critic-norm batch .* one learner"):
        share_of(command, 2)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3)])
def test_a_run_goes_on_with_another_period_of_the_policy(make_unroll, before, after):
    saved, loaded = (SacWorld(make_unroll, VECTORS, "none", update=dataclasses.replace(
        UPDATE, policy_period_updates=period)).updater for period in (before, after))  # fmt: skip
    state = {name: tensor.clone() for name, tensor in saved.state_dict().items()}
    loaded.load_state_dict(state, 7)
    assert loaded.num_updates == 7
    if before == 1:
        assert loaded.state_dict()["learning.num_updates"] == 7
