"""Ape-X DPG, TD3 and D4PG: losses once more without closed forms, a graph's replays, noise and its ladder, refusals."""

import dataclasses
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

from apexrl.agents.apex_dpg import DpgActing, make_actor, make_learner, make_network
from apexrl.agents.apex_dpg_config import FAMILY, DpgAlgorithm, DpgUpdate
from apexrl.agents.apex_dqn_config import FAMILY as APEX_DQN
from apexrl.agents.exploration import noise_ladder
from apexrl.config.commands import LearnerCommand, RunCommand
from apexrl.config.flags import parse
from apexrl.errors import ConfigError
from apexrl.learning.experience.unroll_store import UnrollStore
from apexrl.learning.updates.updater import Updater
from apexrl.losses.windows import valid_starts
from apexrl.networks.config import DeterministicConfig, from_text, to_text
from apexrl.networks.device_stream import DeviceStream
from apexrl.networks.frame_stack import stacks_of
from apexrl.networks.headers import ParametersHeader
from apexrl.networks.parameters import Parameters
from apexrl.types import EnvironmentSpec, StreamUnrolls
from tests.devices import CPU
from tests.fake_graph import FakeDeviceStream
from tests.learning.twins import update_both
from tests.learning.updates.test_updater import World
from tests.lockstep import TABLE, hold
from tests.losses.test_categorical_returns import by_loops

ALGORITHM = DpgAlgorithm(n_steps=3, unroll_starts=8)
BOUNDS = ((-2.0, 2.0), (0.0, 1.0))
REACH = torch.tensor([2.0, 0.5])
VECTORS = FAMILY.stream(ALGORITHM, EnvironmentSpec("Arm-v0", (5,), "float32", 1, 0, 1, action_bounds=BOUNDS))
SCREENS = FAMILY.stream(ALGORITHM, EnvironmentSpec("Arm-v1", (36, 36), "uint8", 2, 0, 1, action_bounds=BOUNDS))
NETWORK = DeterministicConfig((4, 4, 4), 16)
ATOMS = dataclasses.replace(NETWORK, atoms=7, least_return=-3.0, most_return=3.0)
RING, SIZE = 6, 12
PAPERS = DpgUpdate(SIZE, target_period_updates=7)
TD3S = dataclasses.replace(
    PAPERS, learning_rate=1e-3, target_rate=0.25, policy_period_updates=2, target_noise=0.2, action_gradient_clip=0.0
)


class DpgWorld(World):
    """The world of Ape-X's tests with this family's learner and experience."""

    def __init__(self, make_unroll, spec, update, device_stream=None, network=NETWORK):
        torch.manual_seed(7)
        self.make_unroll, self.spec, self.device = make_unroll, spec, CPU
        self.device_stream = device_stream or DeviceStream(CPU)
        self.updater = Updater(make_learner(ALGORITHM, network, update, spec, CPU), self.device_stream)
        self.store = UnrollStore(spec, RING, FAMILY.wants(ALGORITHM, update), CPU, 8, self.device_stream)
        self.rng = np.random.default_rng(3)
        for number in range(RING):
            hold(self.store, number, self.make_unroll(spec, number))

    def batches(self):
        return {TABLE: self.store.gather(TABLE, *self.sample()).batch}


@pytest.mark.parametrize(
    "update", [PAPERS, dataclasses.replace(TD3S, target_noise=0.0, policy_period_updates=1)], ids=["paper", "td3"]
)
@pytest.mark.parametrize("steepness", [1, 1000])
def test_the_gradients_are_those_of_the_papers(make_unroll, update, steepness):
    world = DpgWorld(make_unroll, VECTORS, update)
    with torch.no_grad():
        world.updater.learner.online["critics"].each[0].layers[-1].weight.mul_(steepness)
    learner, batches = world.updater.learner, world.batches()
    (policy, critics), batch = learner.online.values(), batches[TABLE]
    after = batch.next_observation
    next_values = learner.target["critics"](after, learner.target["policy"](after)).min(dim=0).values
    targets = (batch.n_step_return + batch.discount * next_values).detach()
    values = critics(batch.observation, batch.action)
    loss = 0.5 * (batch.weight * (targets - values) ** 2).sum()
    expected = list(torch.autograd.grad(loss, critics.parameters()))
    actions = policy(batch.observation)
    (slopes,) = torch.autograd.grad(critics.each[0](batch.observation, actions).sum(), actions, retain_graph=True)
    if update is PAPERS:
        slopes = (slopes * REACH).clamp(-1, 1) / REACH
    assert (slopes.abs() > 0.9).any() == (steepness > 1)
    of_policy = torch.autograd.grad(actions, policy.parameters(), -batch.weight.unsqueeze(1) * slopes)
    outcome = learner.gradients(batches, lambda: learner.from_online(batches, learner.from_target(batches)))
    for parameter, gradient in zip(critics.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-5)
    for parameter, gradient in zip(policy.parameters(), of_policy, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-5)
    low, high = torch.tensor(BOUNDS).T
    sizes = (2 * learner.target["policy"](after) - low - high).abs() / (high - low)
    torch.testing.assert_close(outcome.metrics["action_size"], sizes.mean(dim=1).detach())
    surprise = (targets - values).abs().mean(dim=0) + 1e-6
    torch.testing.assert_close(outcome.priorities[TABLE], surprise.detach(), rtol=1e-4, atol=1e-5)


def test_the_unit_of_an_environments_actions_changes_no_slope(make_unroll):
    gradients = []
    for unit in (1.0, 64.0):
        bounds = tuple((unit * low, unit * high) for low, high in BOUNDS)
        world = DpgWorld(make_unroll, msgspec.structs.replace(VECTORS, action_bounds=bounds), PAPERS)
        learner, batches = world.updater.learner, world.batches()
        with torch.no_grad():
            learner.online["critics"].each[0].layers[-1].weight.mul_(1000)
        learner.gradients(batches, lambda: learner.from_online(batches, learner.from_target(batches)))
        gradients.append([parameter.grad for parameter in learner.online["policy"].parameters()])
    for gradient, same in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, same, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--noise-least", "0.5", "--noise-most", "0.1"], "--noise-least 0.5 is above --noise-most 0.1: give less"),
        (["--noise-most", "0.01"], "--noise-least 0.05 is above --noise-most 0.01: give less"),
    ],
)
def test_a_ladder_that_runs_backwards_is_refused(flags, complaint):
    with pytest.raises(ConfigError, match=complaint):
        parse(RunCommand, ["--agent", "apex-dpg", "--preset", "small", *flags])


@pytest.mark.parametrize("critics", [1, 2])
def test_critics_of_atoms_learn_the_projected_distribution_of_the_least(make_unroll, critics):
    world = DpgWorld(make_unroll, VECTORS, PAPERS, network=dataclasses.replace(ATOMS, critics=critics))
    learner, batches = world.updater.learner, world.batches()
    (policy, online), batch = learner.online.values(), batches[TABLE]
    with torch.no_grad():
        for parameter in learner.target["critics"].parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    after, support = batch.next_observation, torch.linspace(-3, 3, 7)
    logits = learner.target["critics"].outputs(after, learner.target["policy"](after)).detach()
    means = (logits.softmax(dim=2) * support).sum(dim=2)
    of_least = torch.stack([logits[means[:, row].argmin(), row].softmax(dim=0) for row in range(SIZE)])
    targets = by_loops(support, batch.n_step_return, batch.discount, of_least)
    outputs = online.outputs(batch.observation, batch.action)
    loss = sum(
        -batch.weight[row] * (targets[row] * outputs[critic, row].softmax(dim=0).log()).sum()
        for row in range(SIZE) for critic in range(critics)
    )  # fmt: skip
    expected = torch.autograd.grad(loss, list(online.parameters()), retain_graph=True)
    actions = policy(batch.observation)
    value = (online.each[0](batch.observation, actions).softmax(dim=1) * support).sum()
    (slopes,) = torch.autograd.grad(value, actions, retain_graph=True)
    slopes = (slopes * REACH).clamp(-1, 1) / REACH
    of_policy = torch.autograd.grad(actions, policy.parameters(), -batch.weight.unsqueeze(1) * slopes)
    outcome = learner.gradients(batches, lambda: learner.from_online(batches, learner.from_target(batches)))
    for parameter, gradient in zip([*online.parameters(), *policy.parameters()], [*expected, *of_policy], strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-5)
    surprise = ((targets - outputs.softmax(dim=2)) @ support).abs().mean(dim=0) + 1e-6
    torch.testing.assert_close(outcome.priorities[TABLE], surprise.detach(), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("atoms", "least", "most"),
    [(1, -3.0, 3.0), (7, -3.0, -3.0), (7, -3.0, -4.0), (2, 1e8, 1e8 + 1), (512, 3e6, 3e6 + 9)],
)
def test_atoms_that_make_no_sense_are_refused(atoms, least, most):
    with pytest.raises(ConfigError, match="--atoms have to be 2 at least"):
        make_network(VECTORS, dataclasses.replace(ATOMS, atoms=atoms, least_return=least, most_return=most))


@pytest.mark.parametrize("spec", [VECTORS, SCREENS], ids=["vectors", "screens"])
@pytest.mark.parametrize(
    ("update", "network"),
    [(PAPERS, NETWORK), (dataclasses.replace(TD3S, target_noise=0.0), NETWORK), (PAPERS, ATOMS)],
    ids=["paper", "td3", "d4pg"],
)
def test_a_graph_makes_the_same_updates(make_unroll, spec, update, network):
    graph, plain = (DpgWorld(make_unroll, spec, update, stream, network) for stream in (FakeDeviceStream(), None))
    for _ in range(4):
        keys = graph.sample()
        update_both(graph, plain, lambda keys=keys: graph.by_keys(*keys), lambda keys=keys: plain.by_keys(*keys))
    assert graph.device_stream.num_captures == 1


def priorities_of(learner, spec, network, unroll, tensors=None):
    """Returns the priorities [K] that an actor with the learner's parameters gives an unroll of its own."""
    header = ParametersHeader(0, spec, "apex-dpg", to_text(network))
    actor = make_actor(ALGORITHM, Parameters(header, learner.acting_tensors() | (tensors or {})), CPU)
    of_streams = (array[:, None] for array in (unroll.frames, unroll.actions, unroll.rewards, unroll.discounts))
    unrolls = StreamUnrolls(*of_streams, unroll.starts[:, None])
    stacks = stacks_of(unrolls.frames, unrolls.starts, spec.stacked_frames)[:, 0]
    with torch.no_grad():
        stored = actor._acting.network.torso.layout.store_stacks(torch.from_numpy(stacks))
        normalizer = actor._acting.network.normalizer
        values = learner.online["policy"](stored if normalizer is None else normalizer(stored)).numpy()
    chosen, extras = actor._acting.act(values, np.zeros(len(values)), np.random.default_rng(0))
    assert np.allclose(chosen, values)
    return actor.priorities(unrolls, {name: extra[:, None] for name, extra in extras.items()})[:, 0]


@pytest.mark.parametrize("spec", [VECTORS, SCREENS], ids=["vectors", "screens"])
@pytest.mark.parametrize("network", [dataclasses.replace(NETWORK, critics=1), NETWORK, ATOMS], ids=["1", "2", "atoms"])
def test_actors_with_the_critics_give_the_learners_priorities(make_unroll, spec, network):
    network = dataclasses.replace(network, initial_priorities="critic")
    world = DpgWorld(make_unroll, spec, PAPERS, network=network)
    learner, unroll = world.updater.learner, make_unroll(spec, RING)
    unroll.discounts[1], unroll.starts[3] = 0, True  # the episode ended with step 1, step 2 is the reset
    hold(world.store, RING, unroll)
    found = priorities_of(learner, spec, network, unroll)
    keys = RING * spec.unroll_starts + np.flatnonzero(valid_starts(unroll.starts, spec.unroll_starts))
    batches = {TABLE: world.store.gather(TABLE, keys, np.ones(len(keys), np.float32)).batch}
    outcome = learner.gradients(batches, lambda: learner.from_online(batches, learner.from_target(batches)))
    expected = outcome.priorities[TABLE][: len(keys)].numpy()  # other rows only fill the batch
    assert len(keys) == spec.unroll_starts - 1
    assert found[keys - RING * spec.unroll_starts] == pytest.approx(expected, rel=1e-2, abs=1e-2)


def test_critics_of_actors_see_what_the_normalizer_makes_of_observations(make_unroll):
    network = dataclasses.replace(NETWORK, initial_priorities="critic")
    learner, unroll = DpgWorld(make_unroll, VECTORS, PAPERS, network=network).updater.learner, make_unroll(VECTORS)
    measure = {"normalizer.mean": torch.full((5,), 100.0), "normalizer.scale": torch.full((5,), 0.01)}
    found = priorities_of(learner, VECTORS, network, unroll, measure)
    normalized = unroll._replace(frames=(unroll.frames - 100) * np.float32(0.01))
    assert found == pytest.approx(priorities_of(learner, VECTORS, network, normalized), rel=1e-4)


def test_the_target_policys_noise_stays_within_clip_and_bounds(make_unroll):
    noisy = DpgWorld(make_unroll, VECTORS, dataclasses.replace(TD3S, target_noise=5.0, target_noise_clip=0.5))
    seen = []
    learner, batches = noisy.updater.learner, noisy.batches()
    policy = learner.target["policy"]
    exact = policy(batches[TABLE].next_observation)
    critics = learner.target["critics"]
    spy = SimpleNamespace(
        outputs=lambda after, actions: seen.append(actions) or critics.outputs(after, actions),
        least_of=critics.least_of,
    )  # fmt: skip
    learner.learning.from_target({"policy": policy, "critics": spy}, batches)
    moved = (seen[0] - exact) / policy.reach
    low, high = torch.tensor(BOUNDS).T
    assert 0.4 < moved.abs().max() <= 0.5 + 1e-6
    assert (seen[0] >= low).all() and (seen[0] <= high).all()


def test_actions_have_the_noise_of_their_rung_and_stay_within_bounds():
    acting = DpgActing(dataclasses.replace(ALGORITHM, noise_least=0.1, noise_most=0.4), VECTORS)
    acting.params_version = 1
    exploration = acting.explore(np.arange(3), 3)
    assert exploration.tolist() == pytest.approx([0.1, 0.2, 0.4]) and acting.evaluation_exploration == 0
    values = np.tile(np.float32([0.0, 0.5]), (3000, 1))
    actions, extras = acting.act(values, np.repeat(exploration, 1000), np.random.default_rng(0))
    assert np.array_equal(extras["policy"], values) and actions.dtype == np.float32
    assert actions[:, 1].min() == 0 and actions[:, 1].max() == 1
    assert actions[:, 0].reshape(3, 1000).std(axis=1) == pytest.approx([0.2, 0.4, 0.8], rel=0.1)
    exact, _ = acting.act(values, np.zeros(3000), np.random.default_rng(0))
    assert np.array_equal(exact, values)


def test_actions_are_uniformly_random_before_the_first_update_where_an_environment_explores():
    acting = DpgActing(ALGORITHM, VECTORS)
    acting.params_version = 0
    values = np.tile(np.float32([0.0, 0.5]), (3000, 1))
    actions, extras = acting.act(values, np.repeat([0.3, 0.0], 1500), np.random.default_rng(0))
    low, high = np.array(BOUNDS, np.float32).T
    drawn = (actions[:1500] - low) / (high - low)
    assert drawn.mean(axis=0) == pytest.approx([0.5, 0.5], abs=0.05)
    assert drawn.std(axis=0) == pytest.approx([0.289, 0.289], abs=0.02)
    assert np.array_equal(actions[1500:], values[1500:]) and np.array_equal(extras["policy"], values)


@pytest.mark.parametrize(
    ("least", "most", "expected"),
    [(0.3, 0.3, [0.3] * 3), (0.0, 0.4, [0.0, 0.2, 0.4]), (0.1, 0.4, [0.1, 0.2, 0.4]), (0.0, 0.0, [0.0] * 3)],
)
def test_the_ladder_of_noise(least, most, expected):
    assert noise_ladder(np.arange(3), 3, least, most).tolist() == pytest.approx(expected)
    assert noise_ladder(np.arange(1), 1, least, most).tolist() == pytest.approx(expected[1:2])
    with pytest.raises(ValueError, match="do not fit a ladder of 2"):
        noise_ladder(np.arange(3), 2, least, most)


def test_each_kind_of_action_has_its_algorithms():
    discrete = EnvironmentSpec("Pong-v0", (5,), "float32", 1, 3, 1)
    with pytest.raises(ConfigError, match=r"'Pong-v0' has 3 actions to choose from.* give --agent apex-dqn or impala"):
        FAMILY.stream(ALGORITHM, discrete)
    with pytest.raises(ConfigError, match=r"has actions of 2 numbers.* give --agent sac, apex-dpg or impact"):
        APEX_DQN.stream(APEX_DQN.algorithm, EnvironmentSpec("Arm-v0", (5,), "float32", 1, 0, 1, action_bounds=BOUNDS))


def test_a_network_without_critics_for_actors_is_described_as_before_there_were_any():
    assert "initial_priorities" not in to_text(NETWORK)
    valued = dataclasses.replace(NETWORK, initial_priorities="critic")
    assert from_text(to_text(valued), DeterministicConfig) == valued


def test_td3_and_d4pg_are_presets_of_this_family_alone():
    td3, d4pg = (parse(LearnerCommand, ["--agent", "apex-dpg", "--preset", name]) for name in ("td3", "d4pg"))
    assert (td3.preset, td3.algorithm.n_steps, td3.update.policy_period_updates) == ("td3", 1, 2)
    assert (d4pg.preset, d4pg.network.atoms, d4pg.network.critics) == ("d4pg", 101, 1)
    with pytest.raises(ConfigError, match=r"--agent apex-dqn has auto, .*; td3 is one of --agent apex-dpg$"):
        parse(LearnerCommand, ["--preset", "td3"])
