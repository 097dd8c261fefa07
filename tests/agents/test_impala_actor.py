"""IMPALA's actor: its log says how it acted, and its memory is that of the learner's network."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from apexrl.agents import impala
from apexrl.agents.contract import Observation
from apexrl.agents.impala import LEAST_LOG_PROB, MOST_VALUE, sampled
from apexrl.errors import WireError
from apexrl.networks.config import ActorCriticConfig
from apexrl.networks.recurrent import History
from apexrl.types import EnvironmentSpec, Unroll
from apexrl.unroll import UnrollCodec
from tests.agents.impala_parts import (
    CPU,
    LSTM_SIZE,
    NETWORK,
    NUM_ACTIONS,
    VECTORS,
    algorithm_of,
    make_actor,
    make_learner,
    parameters_of,
    spec_of,
    updates,
)
from tests.networks.test_frame_stack import slow_stacks

NUM_ENVS, STEPS = 3, 12
MANY = 20_000


def with_policy(bias, value=0.0):
    """Returns a learner and its actor whose policy and value are the same everywhere."""
    learner = make_learner(updates())
    with torch.no_grad():
        for layer, numbers in ((learner.online["network"].policy, bias), (learner.online["network"].value, [value])):
            layer.weight.zero_()
            layer.bias.copy_(torch.tensor(numbers))
    return make_actor(learner, spec_of())


def seen_by(num_envs, starts=True):
    frames = np.zeros((num_envs, *VECTORS.frame_shape), np.float32)
    return Observation(frames, np.full(num_envs, starts), np.zeros(num_envs, np.float32))


def act_once(actor, num_envs, exploration=0.0, seed=0):
    rng = np.random.default_rng(seed)
    return actor.act(seen_by(num_envs), np.full(num_envs, exploration), actor.initial_state(num_envs), rng)


@pytest.mark.parametrize("exploration", [0.0, 0.4])
def test_actions_are_drawn_by_the_probabilities_that_are_logged(exploration):
    bias = np.array([1.0, -0.5, -2.0])
    actions, extras, _ = act_once(with_policy(bias), MANY, exploration)
    policy = np.exp(bias) / np.exp(bias).sum()
    expected = (1 - exploration) * policy + exploration / NUM_ACTIONS
    logged = np.exp(extras["behavior_log_probs"].astype(np.float64))
    assert logged == pytest.approx(np.tile(expected, (MANY, 1)), rel=2e-3)
    frequencies = np.bincount(actions, minlength=NUM_ACTIONS) / MANY
    assert (np.abs(frequencies - expected) < 4 * np.sqrt(expected * (1 - expected) / MANY)).all()
    assert actions.dtype == np.int32 and extras["behavior_log_probs"].dtype == np.float16


def test_each_environment_draws_from_its_own_probabilities():
    rng = np.random.default_rng(0)
    probabilities = rng.dirichlet([0.3] * 5, 4).astype(np.float32)
    counts = np.zeros((4, 5))
    for _ in range(MANY):
        counts[np.arange(4), sampled(probabilities, rng)] += 1
    errors = np.abs(counts / MANY - probabilities)
    assert (errors < 4.5 * np.sqrt(probabilities * (1 - probabilities) / MANY) + 1e-6).all()


def test_an_action_without_probability_is_never_drawn():
    rng = np.random.default_rng(0)
    probabilities = np.tile(np.array([0, 0.5, 0, 0.5, 0], np.float32), (MANY, 1))
    assert set(sampled(probabilities, rng).tolist()) == {1, 3}
    for number, action in ((0.0, 1), (np.nextafter(1.0, 0.0), 3)):  # the least and the greatest that are drawn
        extreme = SimpleNamespace(random=lambda shape, number=number: np.full(shape, number))
        assert sampled(probabilities[:1], extreme).tolist() == [action]


def test_training_explores_by_the_policy_alone():
    assert not with_policy([0.0, 0.0, 0.0]).explore(np.array([3, 7]), 8).any()


def test_numbers_that_float16_does_not_hold_are_clamped():
    """So that no unroll is refused on its way."""
    actor = with_policy([0.0, -25.0, -200.0], value=1e9)
    actions, extras, _ = act_once(actor, MANY)
    logged = extras["behavior_log_probs"]
    assert not actions.any()
    assert logged[0] == pytest.approx([0, -25, LEAST_LOG_PROB], abs=0.01)
    assert extras["behavior_value"].dtype == np.float16 and (extras["behavior_value"] == np.float16(MOST_VALUE)).all()
    spec = spec_of()
    steps = spec.unroll_steps
    unroll = Unroll(
        np.zeros((spec.unroll_frames, *spec.frame_shape), np.float32),
        actions[:steps],
        np.zeros(steps, np.float32),
        np.ones(steps, np.float32),
        np.zeros(steps + 1, bool),
        {name: values[:steps] for name, values in extras.items()},
    )
    UnrollCodec(spec).encode(unroll)


def play(actor, stream, seed=0):
    """Returns the actions, extras and states of an actor that sees frames, starts and rewards step by step."""
    frames, starts, rewards = stream
    rng, state = np.random.default_rng(seed), actor.initial_state(NUM_ENVS)
    actions, extras = [], []
    for seen in zip(frames, starts, rewards, strict=True):
        chosen, own, state = actor.act(Observation(*seen), np.zeros(NUM_ENVS), state, rng)
        actions.append(chosen)
        extras.append(own)
    return np.array(actions), {name: np.array([own[name] for own in extras]) for name in extras[0]}


def random_stream(seed=0):
    rng = np.random.default_rng(seed)
    frames = rng.normal(size=(STEPS, NUM_ENVS, *VECTORS.frame_shape)).astype(np.float32)
    starts = rng.random((STEPS, NUM_ENVS)) < 0.25
    starts[0] = True
    return frames, starts, (3 * rng.normal(size=(STEPS, NUM_ENVS))).astype(np.float32)


@pytest.mark.parametrize("lstm", [False, True], ids=["feed-forward", "lstm"])
def test_the_log_holds_the_numbers_of_the_learners_network_over_the_whole_stream(lstm):
    """One long unroll from the first step of all, with a state of zeros, knows nothing of the actor's bookkeeping."""
    learner, (frames, starts, rewards) = make_learner(updates(), lstm), random_stream()
    actions, extras = play(make_actor(learner, spec_of(lstm)), (frames, starts, rewards))
    before = np.concatenate([np.zeros_like(actions[:1]), actions[:-1]])
    history = History(
        torch.from_numpy(starts), torch.from_numpy(before).long(), torch.from_numpy(rewards),
        torch.zeros(NUM_ENVS, 2, LSTM_SIZE),
    )  # fmt: skip
    stacks = torch.from_numpy(slow_stacks(frames, starts, VECTORS.stacked_frames))
    states = []
    with torch.no_grad():
        output = learner.online["network"].unroll(stacks, history)
        for step in range(STEPS if lstm else 0):
            states.append(learner.online["network"].unroll(stacks, history, num_steps=step).state.numpy())
    assert extras["behavior_log_probs"] == pytest.approx(output.logits.log_softmax(-1).numpy(), rel=1e-3, abs=1e-3)
    assert extras["behavior_value"] == pytest.approx(output.values.numpy(), rel=1e-3, abs=1e-3)
    if lstm:
        assert extras["core_state"] == pytest.approx(np.array(states), rel=1e-3, abs=1e-3)
        assert np.array_equal(extras["last_action"], before) and np.array_equal(extras["last_reward"], rewards)
    else:
        assert extras.keys() == {"behavior_log_probs", "behavior_value"}


def test_an_lstm_sees_rewards_as_they_are_learned_from():
    learner, spec, (frames, starts, rewards) = make_learner(updates(), lstm=True), spec_of(lstm=True), random_stream()
    parameters = parameters_of(learner, spec)
    scaled = {**parameters.tensors, "normalizer.reward_scale": torch.tensor(0.25)}
    actor = impala.make_actor(algorithm_of(True), parameters._replace(tensors=scaled), CPU)
    _, found = play(actor, (frames, starts, rewards))
    _, wanted = play(make_actor(learner, spec), (frames, starts, 0.25 * rewards))
    assert np.array_equal(found["behavior_log_probs"], wanted["behavior_log_probs"])
    assert np.array_equal(found["last_reward"], rewards), "the log holds what the environment gave"


@pytest.mark.parametrize("number", ["core_state", "last_action", "rewards"])
def test_the_past_counts_but_not_beyond_the_start_of_an_episode(number):
    actor = make_actor(make_learner(updates(), lstm=True), spec_of(lstm=True))

    def log_probs(starts, other):
        rng = np.random.default_rng(0)
        _, _, state = actor.act(seen_by(NUM_ENVS), np.zeros(NUM_ENVS), actor.initial_state(NUM_ENVS), rng)
        state.core_state += 0.5 * (other and number == "core_state")
        state.last_action = (state.last_action + (other and number == "last_action")) % NUM_ACTIONS
        seen = seen_by(NUM_ENVS, starts)._replace(
            rewards=np.full(NUM_ENVS, float(other and number == "rewards"), np.float32)
        )
        return actor.act(seen, np.zeros(NUM_ENVS), state, rng)[1]["behavior_log_probs"]

    assert np.array_equal(log_probs(True, False), log_probs(True, True))
    assert not np.array_equal(log_probs(False, False), log_probs(False, True))


@pytest.mark.parametrize("lstm", [False, True], ids=["feed-forward", "lstm"])
def test_new_parameters_act_from_the_next_step_on(lstm):
    spec = spec_of(lstm)
    first, second = (make_learner(updates(), lstm, seed=seed) for seed in (1, 2))
    larger = ActorCriticConfig("shallow", (4, 4, 4), 2 * NETWORK.hidden_size)
    other = parameters_of(first, spec, 9, larger)
    with pytest.raises(WireError, match="parameters do not fit"):
        make_actor(first, spec).load(other)  # named as larger than they are
    actor, twin = make_actor(first, spec), make_actor(second, spec)
    with pytest.raises(WireError):
        actor.load(other)
    assert actor.header.params_version == 3
    stream = random_stream()
    before = play(actor, stream)[1]["behavior_log_probs"]
    assert np.array_equal(before, play(make_actor(first, spec), stream)[1]["behavior_log_probs"])
    actor.load(parameters_of(second, spec, 8))
    assert actor.header.params_version == 8
    after = play(actor, stream)[1]["behavior_log_probs"]
    assert np.array_equal(after, play(twin, stream)[1]["behavior_log_probs"]) and not np.array_equal(before, after)


@pytest.mark.parametrize("environment", [VECTORS, EnvironmentSpec("Small-v0", (10, 7), "uint8", 2, NUM_ACTIONS, 1)])
def test_a_learner_that_comes_back_with_another_network_is_followed(environment):
    """The state of environments that play on stays in use."""
    spec = spec_of(True, environment)
    learner = make_learner(updates(), True, environment)
    actor, rng = make_actor(learner, spec), np.random.default_rng(0)
    frames = rng.integers(0, 9, (NUM_ENVS, *spec.frame_shape)).astype(spec.frame_dtype)
    seen = Observation(frames, np.zeros(NUM_ENVS, bool), np.zeros(NUM_ENVS, np.float32))
    _, _, state = actor.act(seen, np.zeros(NUM_ENVS), actor.initial_state(NUM_ENVS), rng)
    larger = ActorCriticConfig("shallow", (8, 4, 4), 2 * NETWORK.hidden_size)
    other = parameters_of(make_learner(updates(), True, environment, network=larger), spec, 8, larger)
    actor.load(other)
    fresh = impala.make_actor(algorithm_of(True), other, CPU)
    found, expected = (agent.act(seen, np.zeros(NUM_ENVS), state, np.random.default_rng(1)) for agent in (actor, fresh))
    assert actor.header.params_version == 8
    assert np.array_equal(found[1]["behavior_log_probs"], expected[1]["behavior_log_probs"])
