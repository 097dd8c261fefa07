"""IMPACT: its loss once more state by state, for vectors too, minibatches, a graph's replays, actors, refusals."""

import dataclasses

import numpy as np
import pytest
import torch
from torch.distributions import Normal

from apexrl.agents import impact, sac
from apexrl.agents.families import FAMILIES
from apexrl.agents.impact_config import FAMILY, ImpactAlgorithm, ImpactUpdate
from apexrl.agents.replaying.policy_targets import policies_of
from apexrl.agents.replaying.unroll_batches import history_of
from apexrl.errors import ConfigError
from apexrl.learning.experience.unroll_store import UnrollStore
from apexrl.learning.updates.updater import Updater
from apexrl.networks import hidden_linear
from apexrl.networks.device_stream import DeviceStream
from apexrl.networks.hidden_linear import HiddenLinear
from apexrl.types import EnvironmentSpec
from tests.agents.impala_parts import LSTM_SIZE, NETWORK, VECTORS, random_batches, slow_column
from tests.devices import CPU
from tests.fake_graph import FakeDeviceStream
from tests.fields import random_unroll
from tests.learning.twins import update_both
from tests.learning.updates.test_updater import World
from tests.losses.test_vtrace import by_definition
from tests.losses.unrolls import T, Unrolls

SIZE, TABLE = 12, "uniform@40"
ALGORITHM = ImpactAlgorithm(gamma=0.9, unroll_starts=T)
UPDATE = ImpactUpdate(SIZE, learning_rate=1e-3, entropy_cost=0.3, target_period_updates=3, surrogate_clip=0.2)


BOUNDS = ((-2.0, 2.0), (0.0, 1.0))
ARMS = EnvironmentSpec("Arm-v0", (4,), "float32", 2, 0, 1, action_bounds=BOUNDS)


def make_learner(update=UPDATE, lstm=False, environment=VECTORS):
    """Returns a learner whose target network is another one, and both of whose policies are not nearly uniform."""
    torch.manual_seed(7)
    algorithm = dataclasses.replace(ALGORITHM, lstm=lstm, lstm_size=LSTM_SIZE)
    learner = impact.make_learner(algorithm, NETWORK, update, FAMILY.stream(algorithm, environment), CPU)
    with torch.no_grad():
        for parameter in learner.target.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        for network in (learner.online["network"], learner.target["network"]):
            (network.policy if environment is VECTORS else network.policy.means).weight.mul_(4)
    return learner


def slow_gradients(learner, update, batch):
    """Returns the mean loss's gradient by the paper's definitions, in float64, behind the learner's own networks."""
    (pi_logits, values, *_), (target_logits, target_values, *_) = (
        networks["network"].unroll(batch.observation, history_of(batch))
        for networks in (learner.online, learner.target)
    )
    total, count, clipped = torch.zeros((), dtype=torch.float64), 0.0, 0
    for b in range(len(batch.weight)):
        mu = batch.extras["behavior_log_probs"][:, b].double().softmax(-1)
        own = target_logits[:-1, b].double(), target_values[:, b].double(), mu
        column = slow_column(*own, batch, b, update, 0.9, has_region=False)
        for t in range(T):
            if batch.start[t + 1, b]:
                continue  # a reset
            weight, action = batch.weight[b].item(), batch.action[t, b]
            pi, old = pi_logits[t, b].double().softmax(-1), target_logits[t, b].detach().double().softmax(-1)
            aim, advantage, _ = column[t]
            ratio = min(mu[t, action] / old[action], update.target_rho_bar) * pi[action] / mu[t, action]
            bounded = min(max(ratio, 1 - update.surrogate_clip), 1 + update.surrogate_clip)
            clipped += bool(bounded * advantage < ratio * advantage)
            count += weight
            total = total - weight * min(ratio * advantage, bounded * advantage)
            total = total + weight * update.value_cost * 0.5 * (aim - values[t, b].double()) ** 2
            total = total + weight * update.entropy_cost * (pi * pi.log()).sum()
    gradients = torch.autograd.grad(total / count, list(learner.online["network"].parameters()))
    return torch.cat([gradient.flatten() for gradient in gradients]), (total / count).item(), clipped


@pytest.mark.parametrize("lstm", [False, True], ids=["feed-forward", "lstm"])
@pytest.mark.parametrize(
    "changes", [{}, {"target_rho_bar": 1.0, "trace_lambda": 0.8}, {"rho_bar": 2.0, "pg_rho_bar": 1.5}], ids=str
)
def test_gradients_are_those_of_the_papers_definitions(lstm, changes):
    update = dataclasses.replace(UPDATE, **changes)
    learner = make_learner(update, lstm)
    batches = random_batches(1, {TABLE: SIZE}, lstm, weights=(0.0, 0.5, 1.0))
    expected, loss, clipped = slow_gradients(learner, update, batches[TABLE])
    known = learner.from_online(batches, learner.from_target(batches))
    metrics = learner.gradients(batches, lambda: known).metrics
    found = torch.cat([parameter.grad.flatten() for parameter in learner.online["network"].parameters()])
    assert metrics["loss"].item() == pytest.approx(loss, rel=1e-4) and clipped > 3
    assert (found / learner.gradient[-1] - expected).abs().max() < 1e-4 * expected.abs().max()


def random_arms(seed):
    """A batch whose actions are vectors, a third of their numbers at a bound."""
    (batch,) = random_batches(seed, {TABLE: SIZE}, weights=(0.0, 0.5, 1.0)).values()
    generator = torch.Generator().manual_seed(seed)
    moments = torch.randn(T, SIZE, 4, generator=generator) * torch.tensor([1, 1, 0.3, 0.3])
    drawn = moments[..., :2] + moments[..., 2:].exp() * torch.randn(T, SIZE, 2, generator=generator)
    action = torch.tensor([0, 0.5]) + torch.tensor([2, 0.5]) * drawn.clamp(-1, 1)
    return batch._replace(action=action, extras={"behavior_moments": moments, "behavior_value": torch.zeros(T, SIZE)})


def slow_log_prob(moments, action):
    """Of an action within the bounds, number by number."""
    total = 0
    for i, (low, high) in enumerate(BOUNDS):
        normal = Normal((low + high) / 2 + (high - low) / 2 * moments[i], (high - low) / 2 * moments[2 + i].exp())
        if action[i] == low:
            total = total + normal.cdf(action[i]).log()
        elif action[i] == high:
            total = total + (1 - normal.cdf(action[i])).log()
        else:  # its learner measures density by half the range
            total = total + normal.log_prob(action[i]) + np.log((high - low) / 2)
    return total


def slow_vector_gradients(learner, update, batch):
    """`slow_gradients` for actions that are vectors."""
    (moments, values, *_), (target_moments, target_values, *_) = (
        networks["network"].unroll(batch.observation) for networks in (learner.online, learner.target)
    )
    actions, total, count, clipped = batch.action.double(), torch.zeros((), dtype=torch.float64), 0.0, 0
    for b in range(SIZE):
        pi, old, mu = (
            torch.stack([slow_log_prob(policy[t, b].double(), actions[t, b]) for t in range(T)])
            for policy in (moments, target_moments.detach(), batch.extras["behavior_moments"])
        )
        unroll = Unrolls(
            (old - mu)[:, None], 0.9 * batch.discount[:, b, None].double(), batch.reward[:, b, None].double(),
            target_values.detach()[:-1, b, None].double(), target_values.detach()[-1:, b].double(),
            ~batch.start[1:, b, None], torch.ones(T, 1, dtype=torch.bool), batch.start[:, b, None],
        )  # fmt: skip
        numbers = update.trace_lambda, update.rho_bar, update.c_bar, update.pg_rho_bar
        for t, (aim, advantage, learned) in enumerate(zip(*by_definition(unroll, 0, *numbers), strict=True)):
            if not learned:
                continue  # a reset
            weight = batch.weight[b].item()
            ratio = min((mu[t] - old[t]).exp(), update.target_rho_bar) * (pi[t] - mu[t]).exp()
            bounded = min(max(ratio, 1 - update.surrogate_clip), 1 + update.surrogate_clip)
            clipped += bool(bounded * advantage < ratio * advantage)
            count += weight
            entropy = Normal(moments[t, b, :2].double(), moments[t, b, 2:].double().exp()).entropy().sum()
            total = total - weight * (min(ratio * advantage, bounded * advantage) + update.entropy_cost * entropy)
            total = total + weight * update.value_cost * 0.5 * (aim - values[t, b].double()) ** 2
    gradients = torch.autograd.grad(total / count, list(learner.online["network"].parameters()))
    return torch.cat([gradient.flatten() for gradient in gradients]), (total / count).item(), clipped


@pytest.mark.parametrize(
    "changes", [{}, {"target_rho_bar": 1.0, "trace_lambda": 0.8}, {"rho_bar": 2.0, "pg_rho_bar": 1.5}], ids=str
)
def test_gradients_of_vectors_are_those_of_the_papers_definitions(changes):
    update = dataclasses.replace(UPDATE, **changes)
    learner, batch = make_learner(update, environment=ARMS), random_arms(1)
    expected, loss, clipped = slow_vector_gradients(learner, update, batch)
    known = learner.from_online({TABLE: batch}, learner.from_target({TABLE: batch}))
    metrics = learner.gradients({TABLE: batch}, lambda: known).metrics
    found = torch.cat([parameter.grad.flatten() for parameter in learner.online["network"].parameters()])
    assert metrics["loss"].item() == pytest.approx(loss, rel=1e-4) and clipped > 3
    assert (found / learner.gradient[-1] - expected).abs().max() < 1e-4 * expected.abs().max()
    assert metrics["deviation"] > 0 and not any("probability" in name for name in metrics)


def test_actors_draw_within_the_bounds_log_the_moments_and_take_means_in_evaluations():
    acting = impact.acting_of(ALGORITHM, FAMILY.stream(ALGORITHM, ARMS))
    assert acting.explore(np.arange(3), 8).tolist() == [1, 1, 1] and acting.evaluation_exploration == 0
    values = np.tile(np.float32([0.5, -0.5, -1.0, 0.7, 3.0]), (4000, 1))
    actions, extras = acting.act(values, np.ones(4000), np.random.default_rng(0))
    assert actions.dtype == np.float32 and (actions >= [-2, 0]).all() and (actions <= [2, 1]).all()
    assert (extras["behavior_moments"] == values[:, :4]).all() and (extras["behavior_value"] == 3).all()
    assert extras.keys() == {field.name for field in acting.spec.extras}
    inside = actions[np.abs(actions[:, 0]) < 2, 0] / 2
    assert np.median(actions[:, 0]) / 2 == pytest.approx(0.5, abs=0.03) and inside.std() > 0.2
    log_probs = policies_of(ARMS, CPU).log_probs(torch.from_numpy(values[:, :4]), torch.from_numpy(actions))
    at_bounds = actions[:, 1] == 0
    expected = Normal(0.5, np.exp(-1)).log_prob(torch.from_numpy(actions[:, 0] / 2))
    tail = Normal(-0.5, np.exp(0.7)).cdf(torch.tensor(-1.0)).log()
    places = at_bounds & (np.abs(actions[:, 0]) < 2)
    assert places.sum() > 500
    torch.testing.assert_close(log_probs[places], (expected + tail)[places], rtol=1e-4, atol=1e-4)
    exact, _ = acting.act(values, np.zeros(4000), np.random.default_rng(0))
    assert exact[0] == pytest.approx([1.0, 0.25])


def test_its_densities_have_the_precision_of_those_that_actors_logged(monkeypatch):
    """In bfloat16 a ratio on policy is not 1, and the less so the smaller the deviations are."""
    monkeypatch.setattr(hidden_linear, "cpu_has_bfloat16", lambda: True)
    network = dataclasses.replace(NETWORK, hidden_size=hidden_linear.LEAST_SIZE)
    learner = impact.make_learner(ALGORITHM, network, UPDATE, FAMILY.stream(ALGORITHM, ARMS), CPU)
    twin = FAMILIES["sac"]
    stream = twin.stream(twin.algorithm, ARMS)
    size = dataclasses.replace(twin.network, hidden_size=hidden_linear.LEAST_SIZE)
    other = sac.make_learner(twin.algorithm, size, twin.update, stream, CPU)
    of_both = [[m.is_fast for m in one.online.modules() if isinstance(m, HiddenLinear)] for one in (learner, other)]
    assert of_both[0] and not any(of_both[0]) and of_both[1] and all(of_both[1])


@pytest.mark.parametrize("mix", [("uniform@40=1",), ("queue=1/3", "uniform@40=2/3")], ids=str)
def test_minibatches_divide_the_rows_of_all_tables_with_their_targets(mix):
    update = dataclasses.replace(UPDATE, mix=mix, minibatches=2)
    learner = make_learner(update)
    sizes = {TABLE: SIZE} if len(mix) == 1 else {"queue": SIZE // 3, TABLE: 2 * SIZE // 3}
    batches = random_batches(1, sizes)
    known = learner.from_target(batches)
    parts = list(learner.minibatches(batches, lambda: known))
    assert learner.num_steps == len(parts) == 2
    for table, size in sizes.items():
        rewards = torch.cat([batch[table].reward for batch, _ in parts], 1)
        assert [len(batch[table].weight) for batch, _ in parts] == [size // 2] * 2
        assert rewards.sum(0).sort().values.tolist() == batches[table].reward.sum(0).sort().values.tolist()
    for batch, known_of_it in parts:
        anew = learner.learning.from_target(learner.target, batch)
        for found, expected in zip(known_of_it().targets, anew.targets, strict=True):
            assert torch.allclose(found.float(), expected.float(), atol=1e-5)
        assert torch.allclose(known_of_it().log_rhos, anew.log_rhos, atol=1e-5)


class ImpactWorld(World):
    """The world of Ape-X's tests with this family's learner and experience."""

    def __init__(self, update, environment, device_stream=None):
        self.spec, self.device = FAMILY.stream(ALGORITHM, environment), CPU
        self.device_stream = device_stream or DeviceStream(CPU)
        self.updater = Updater(make_learner(update, environment=environment), self.device_stream)
        self.store = UnrollStore(self.spec, 16, FAMILY.wants(ALGORITHM, update), CPU, 8, self.device_stream)
        self.rng = np.random.default_rng(3)
        for number in range(16):
            self.store.commit(self.store.begin(number), random_unroll(self.spec, number))


@pytest.mark.parametrize("environment", [VECTORS, ARMS], ids=["choices", "vectors"])
@pytest.mark.parametrize("minibatches", [1, 3])
def test_a_graph_makes_the_same_updates(monkeypatch, minibatches, environment):
    """In one order of rows: the warm-ups of a graph draw others."""
    monkeypatch.setattr(impact, "shuffled", lambda size, parts, *_: torch.arange(size).flip(0).chunk(parts))
    update = dataclasses.replace(UPDATE, minibatches=minibatches, mix=("uniform=1",))

    def updated(world, keys):
        draw = world.keys(keys, np.ones(SIZE, np.float32))
        draw = draw._replace(samples={"uniform": draw.samples["transitions"]._replace(table="uniform")})
        pending = world.updater.update(draw)
        return (), pending.result()[1] | pending.row_metrics()

    graph, plain = (ImpactWorld(update, environment, on) for on in (FakeDeviceStream(), None))
    for _ in range(4):
        keys = graph.rng.integers(0, 16, SIZE)
        update_both(graph, plain, lambda keys=keys: updated(graph, keys), lambda keys=keys: updated(plain, keys))
    assert graph.device_stream.num_captures == 1


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"minibatches": 5}, r"--minibatches 5 does not divide the 12 unrolls of uniform@40"),
        ({"minibatches": 2, "mix": ("elite-1@40=1",)}, "--mix elite-1@40 tells of the rows of a whole"),
        ({"minibatches": 2, "trust_region": 0.1}, "--trust-region tells of the rows of a whole batch"),
        ({"replay_state": "walk", "mix": ("uniform=1",)}, "--replay-state walk knows the state of the newest policy"),
    ],
)
def test_flags_that_exclude_each_other_are_refused(changes, complaint):
    with pytest.raises(ConfigError, match=complaint):
        FAMILY.wants(dataclasses.replace(ALGORITHM, lstm=True), dataclasses.replace(UPDATE, **changes))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (
            {"trust_region": 0.1},
            "--trust-region compares policies over several actions, and those of environment",
        ),
        ({"policy_cloning_cost": 0.1}, "--policy-cloning-cost compares"),
        ({"mix": ("elite-1@40=1",)}, r"--mix elite-1@40=1 compares"),
    ],
)
def test_flags_that_compare_policies_are_refused_for_vectors(changes, complaint):
    with pytest.raises(ConfigError, match=complaint):
        make_learner(dataclasses.replace(UPDATE, **changes), environment=ARMS)


def test_an_lstm_is_refused_for_vectors():
    with pytest.raises(ConfigError, match=r"--lstm sees the last action as one of several, and environment 'Arm-v0'"):
        FAMILY.stream(dataclasses.replace(ALGORITHM, lstm=True), ARMS)


def test_the_rate_is_constant_but_for_games_of_atari():
    presets = [FAMILY.presets[name]["update"]["learning_rate"] for name in ("gpu", "two-cores", "small")]
    assert [ImpactUpdate().learning_rate, *presets] == [5e-4, "4e-4:0", "4e-4:0", 1e-3]
