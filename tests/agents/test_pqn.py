"""PQN's gradients beside the paper's definition, its exploration, and the mixes that it takes."""

import dataclasses

import numpy as np
import pytest
import torch

from apexrl.agents import pqn
from apexrl.agents.pqn_config import FAMILY, PqnAlgorithm, PqnUpdate, stream, wants
from apexrl.config.commands import RunCommand
from apexrl.config.flags import check_together, parse
from apexrl.errors import ConfigError
from apexrl.networks.config import NormalizedConfig, to_text
from apexrl.networks.dueling import make_normalized_network as make_network
from apexrl.networks.headers import ParametersHeader
from apexrl.networks.parameters import Parameters
from tests.agents.impala_parts import CPU, NUM_ACTIONS, VECTORS, random_batches
from tests.learning.updates.test_updater import SCREENS
from tests.losses.unrolls import T

NETWORK = NormalizedConfig((4, 4, 4), 8)
ALGORITHM = PqnAlgorithm(gamma=0.9, unroll_starts=T)


def make_learner(update):
    torch.manual_seed(7)
    return pqn.make_learner(ALGORITHM, NETWORK, update, stream(ALGORITHM, VECTORS), CPU)


def slow_return(values, batch, b, t, lambda_):
    """The lambda return of a step, by the paper's recursion; where the next step is a reset or missing, V ends it."""
    reward, discount = batch.reward[t, b].item(), ALGORITHM.gamma * batch.discount[t, b].item()
    after = values[t + 1, b].max().item()
    if t + 1 < T and not batch.start[t + 2, b]:
        after = (1 - lambda_) * after + lambda_ * slow_return(values, batch, b, t + 1, lambda_)
    return reward + discount * after


def slow_gradient(learner, update, batches):
    """The gradient of the mean of half the squared errors of all steps but resets, in float64 behind the network."""
    network, total, count = learner.online["q"], torch.zeros((), dtype=torch.float64), 0.0
    for batch in batches.values():
        values = network(batch.observation.flatten(0, 1)).double().unflatten(0, batch.observation.shape[:2])
        for b, weight in enumerate(batch.weight.tolist()):
            for t in range(T):
                if batch.start[t + 1, b] or not weight:
                    continue
                error = slow_return(values, batch, b, t, update.trace_lambda) - values[t, b, batch.action[t, b]]
                total, count = total + weight * error**2 / 2, count + weight
    gradients = torch.autograd.grad(total / count, list(network.parameters()))
    return torch.cat([gradient.flatten() for gradient in gradients]), (total / count).item()


@pytest.mark.parametrize("lambda_", [0.0, 0.65, 1.0])
@pytest.mark.parametrize("mix", [("queue=1",), ("queue=1/2", "uniform@9=1/2")])
def test_gradients_are_those_of_the_definition(mix, lambda_):
    update = PqnUpdate(batch_size=40, mix=mix, trace_lambda=lambda_)
    sizes = {want.table: want.batch_size for want in wants(ALGORITHM, update)}
    batches, learner = random_batches(3, sizes, weights=(0.0, 1.0)), make_learner(update)
    metrics = learner.gradients(batches, lambda: None).metrics
    found = torch.cat([parameter.grad.flatten() for parameter in learner.online["q"].parameters()])
    expected, loss = slow_gradient(learner, update, batches)
    torch.testing.assert_close(found / learner.gradient[-1], expected.float(), rtol=1e-4, atol=1e-6)
    assert metrics["loss"].item() == pytest.approx(loss, rel=1e-5)


def test_actors_explore_on_the_ladder_and_evaluations_hardly():
    spec, learner = stream(ALGORITHM, VECTORS), make_learner(PqnUpdate())
    header = ParametersHeader(3, spec, "pqn", to_text(NETWORK))
    actor = pqn.make_actor(ALGORITHM, Parameters(header, learner.acting_tensors()), CPU)
    assert actor.explore(np.array([0, 4]), 5).tolist() == pytest.approx([0.4, 0.4**8])
    assert actor.evaluation_exploration == 0.001
    frames = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    seen = frames, np.ones(50, bool), np.zeros(50, np.float32)
    actions, extras, _ = actor.act(seen, np.zeros(50), actor.initial_state(50), np.random.default_rng(1))
    stacks = torch.from_numpy(np.repeat(frames[:, None], 2, 1))
    stacks[:, 0] = 0
    assert actions.shape == (50,) and set(actions) <= set(range(NUM_ACTIONS)) and not extras


def test_the_network_acts_on_screens_in_bfloat16_like_in_float32():
    torch.manual_seed(0)
    network = make_network(SCREENS, NETWORK)
    stacks = torch.randint(0, 256, (5, SCREENS.stacked_frames, *SCREENS.frame_shape), dtype=torch.uint8)
    prepared = network.prepare(network.torso.layout.store_stacks(stacks))
    exact = network.values(prepared)
    network.compute_in(torch.bfloat16)
    torch.testing.assert_close(network.values(prepared.bfloat16()), exact, rtol=0.1, atol=0.05)
    assert network.values(prepared.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize(("mix", "words"), [(("attentive=1",), "pqn takes queue"), (("queue=1/3", "uniform=2/3"), "4")])
def test_other_mixes_are_refused(mix, words):
    with pytest.raises(ConfigError, match=words):
        wants(ALGORITHM, PqnUpdate(mix=mix))


@pytest.mark.parametrize("preset", ["paper", "two-cores", "small"])
def test_the_presets_fill_their_tables(preset):
    """The newest unrolls are fewer than the log holds, and enough for the first batch."""
    command = parse(RunCommand, ["--agent", "pqn", "--preset", preset])
    check_together(dataclasses.replace(command))
    tables = FAMILY.tables(command.update)
    assert [table.kind for table in tables] == ["fifo", "uniform"]
    assert tables[1].capacity * command.algorithm.unroll_starts >= command.replay.min_size_to_sample
