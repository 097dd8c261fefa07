import numpy as np
import pytest
import torch

from apexrl.agents.apex_dqn import make_actor
from apexrl.agents.apex_dqn_config import FAMILY, ApexUpdate
from apexrl.agents.contract import Observation
from apexrl.agents.engine.plain import SMALLEST_PRIORITY
from apexrl.errors import ConfigError
from apexrl.learning.experience.draw import Draw
from apexrl.learning.experience.unroll_store import UnrollStore
from apexrl.networks.checkpoint import all_finite, load_checkpoint, save_checkpoint
from apexrl.networks.headers import CheckpointHeader, Counters
from apexrl.types import EnvironmentSpec, StreamSpec, StreamUnrolls
from tests.lockstep import (
    ALGORITHM,
    CPU,
    TABLE,
    UPDATE,
    draw_of,
    exact_parameters_of,
    hold,
    identity_of,
    make_updater,
    parameters_of,
    results,
    train,
    want,
)

CATCH = StreamSpec("Catch-v0", (10, 7), "uint8", 1, 3, 1, unroll_starts=8, overlap_steps=3)
CARTPOLE = StreamSpec("CartPole-v1", (4,), "float32", 1, 2, 1, unroll_starts=8, overlap_steps=3)


def equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("env", ["Catch-v0", "CartPole-v1"])
def test_same_seed_same_parameters(env):
    first, _ = train(env, 60, seed=3)
    again, _ = train(env, 60, seed=3)
    other, _ = train(env, 60, seed=4)
    assert equal(first.state_dict(), again.state_dict())
    assert not equal(first.state_dict(), other.state_dict())


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_save_restore_continue_equals_never_stopping(tmp_path, optimizer):
    _, batches = train("Catch-v0", 50, seed=0)
    update = ApexUpdate(16, optimizer, 1e-3, optimizer_epsilon=1e-5, max_gradient_norm=40.0, target_period_updates=7)

    def fresh():
        torch.manual_seed(9)
        return make_updater(CATCH, update)

    never_stopped, stopped = fresh(), fresh()
    for batch in batches:
        never_stopped.update(batch)
    for batch in batches[:25]:
        stopped.update(batch)
    path = tmp_path / "latest.safetensors"
    save_checkpoint(path, CheckpointHeader(*identity_of(CATCH), Counters(updates=25)), stopped.state_dict())
    torch.manual_seed(1)
    restored = make_updater(CATCH, update)
    checkpoint = load_checkpoint(path)
    restored.load_state_dict(checkpoint.tensors, checkpoint.header.counters.updates)
    for batch in batches[25:]:
        restored.update(batch)
    assert restored.num_updates == never_stopped.num_updates == 50
    assert equal(restored.state_dict(), never_stopped.state_dict())


def test_update_equals_the_plain_computation():
    updater, draws = train("CartPole-v1", 30, seed=0)
    batch = draws[-1].batches()[TABLE]
    online, target = updater.learner.online["q"], updater.learner.target["q"]
    with torch.no_grad():
        q = online(batch.observation)
        best = online(batch.next_observation).argmax(1)
        bootstrap = target(batch.next_observation)[torch.arange(16), best]
        td_errors = batch.n_step_return + batch.discount * bootstrap - q[torch.arange(16), batch.action]
    expected = td_errors.abs().numpy() + SMALLEST_PRIORITY
    loss = (batch.weight * torch.where(td_errors.abs() < 1, 0.5 * td_errors**2, td_errors.abs() - 0.5)).mean()
    priorities, metrics = results(updater.update(draws[-1]))
    assert priorities == pytest.approx(expected, rel=1e-5)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)


def test_target_is_copied_every_period():
    updater, draws = train("Catch-v0", UPDATE.target_period_updates, seed=0)
    learner = updater.learner
    assert equal(learner.online.state_dict(), learner.target.state_dict())
    updater.update(draws[0])
    assert not equal(learner.online.state_dict(), learner.target.state_dict())


def test_initial_priorities_are_the_actors_own_n_step_errors():
    spec = StreamSpec("Known-v0", (2,), "float32", 1, 3, 1, unroll_starts=4, overlap_steps=3)
    actor = make_actor(ALGORITHM, exact_parameters_of(make_updater(spec), spec), CPU)
    rewards = np.array([1, 0, 2, 0, 0, 3, 0], np.float32)[:, None]
    discounts = np.array([1, 0, 1, 1, 1, 1, 1], np.float32)[:, None]
    starts = np.zeros((8, 1), bool)
    starts[3] = True  # the episode ended with step 1, step 2 is the reset
    unrolls = StreamUnrolls(np.zeros((8, 1, 2), np.float32), np.zeros((7, 1), np.int32), rewards, discounts, starts)
    extras = {"q_taken": np.arange(8, dtype=np.float32)[:, None], "q_max": 10 * np.ones((8, 1), np.float32)}
    priorities = actor.priorities(unrolls, extras)[:, 0]
    g = ALGORITHM.gamma
    assert priorities == pytest.approx([1 - 0, 1 - 0, 2 + g**3 * 10 - 2, g**2 * 3 + g**3 * 10 - 3], abs=1e-5)


def test_an_actor_with_the_published_parameters_takes_the_learners_actions():
    updater, draws = train("Catch-v0", 40, seed=0)
    actor = make_actor(ALGORITHM, parameters_of(updater, CATCH), CPU)
    batch = draws[-1].batches()[TABLE]
    frames = batch.observation[:, 0].numpy()  # a stack of one
    seen = Observation(frames, np.ones(16, bool), np.zeros(16, np.float32))
    actions, extras, _ = actor.act(seen, np.zeros(16), actor.initial_state(16), np.random.default_rng(0))
    with torch.no_grad():
        q_values = updater.learner.online["q"](batch.observation).float().numpy()
    assert actor.header.params_version == 40
    assert (actions == q_values.argmax(1)).mean() > 0.9
    assert extras["q_max"] == pytest.approx(q_values.max(1), abs=0.02)


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_a_transition_without_finite_errors_changes_nothing(optimizer):
    _, draws = train("CartPole-v1", 30, seed=0)
    learner = make_updater(
        CARTPOLE,
        ApexUpdate(16, optimizer, 1e-3, optimizer_epsilon=1e-5, max_gradient_norm=40.0, target_period_updates=7),
    )
    learner.update(draws[0])
    before = {name: tensor.clone() for name, tensor in learner.state_dict().items()}
    sample = draws[-1].samples[TABLE]
    poisoned = sample.batch.observation.clone()
    poisoned[5, 0, 2] = torch.inf
    poisoned = sample._replace(batch=sample.batch._replace(observation=poisoned))
    priorities, _ = results(learner.update(Draw(0, {TABLE: poisoned})))
    assert np.flatnonzero(~np.isfinite(priorities)).tolist() == [5]
    assert equal(learner.state_dict(), before) and all_finite(before)
    assert np.isfinite(results(learner.update(draws[-1]))[0]).all()
    assert not equal(learner.state_dict(), before)


def test_values_computed_ahead_change_nothing(make_unroll):
    """Also where the target network is copied in between, and where the batch announced is not the next."""
    spec = StreamSpec("Screens-v0", (36, 36), "uint8", 3, 4, 1, unroll_starts=8, overlap_steps=3)
    store = UnrollStore(spec, 6, [want()], CPU, 100)
    for number in range(6):
        hold(store, number, make_unroll(spec, number))
    rng = np.random.default_rng(3)
    weights = np.ones(16, np.float32)
    batches = [draw_of(store, rng.integers(0, 48, 16), weights) for _ in range(20)]
    update = ApexUpdate(16, "adam", 1e-3, optimizer_epsilon=1e-5, max_gradient_norm=40.0, target_period_updates=3)

    def fresh():
        torch.manual_seed(9)
        return make_updater(spec, update)

    ahead, plain = fresh(), fresh()
    restored = plain.state_dict()
    restored = {name: tensor.clone() for name, tensor in restored.items()}
    for i, batch in enumerate(batches):
        upcoming = batches[(i + (2 if i % 5 == 4 else 1)) % len(batches)]
        found, wanted = ahead.update(batch, upcoming), plain.update(batch)
        assert np.array_equal(results(found)[0], results(wanted)[0])
        if i == 13:
            ahead.load_state_dict(restored, ahead.num_updates)
            plain.load_state_dict(restored, plain.num_updates)
    assert equal(ahead.state_dict(), plain.state_dict())


def test_actions_that_are_numbers_are_refused():
    environment = EnvironmentSpec("Pendulum-v1", (3,), "float32", 1, 0, 1, action_bounds=((-2.0, 2.0),))
    with pytest.raises(ConfigError, match="give --agent sac, apex-dpg or impact"):
        FAMILY.stream(ALGORITHM, environment)
