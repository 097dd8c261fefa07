import dataclasses
import math
from typing import NamedTuple

import numpy as np
import pytest
import torch

from apexrl.errors import ConfigError, WireError
from apexrl.networks.actor_critic import ActorCriticNetwork
from apexrl.networks.config import ActorCriticConfig
from apexrl.networks.frame_layout import FrameLayout
from apexrl.networks.policy import Policy
from apexrl.networks.recurrent import History, last_step, memory_of
from apexrl.types import EnvironmentSpec
from tests.devices import CPU, DEVICES
from tests.networks.test_frame_stack import slow_stacks

NUM_ACTIONS, NUM_ENVS, STEPS, SIZE = 5, 3, 12, 7
SHALLOW = ActorCriticConfig("shallow", (4, 8, 8), 16)
DEEP = dataclasses.replace(SHALLOW, torso="deep")
SHAPES = [((), 1), ((3,), 2), ((10, 7), 4), ((40, 50), 2), ((40, 50, 3), 2), ((84, 84), 4)]


class Sizes(NamedTuple):
    """A network with or without an LSTM."""

    config: ActorCriticConfig
    lstm_size: int = 0


CONFIGS = [Sizes(SHALLOW), Sizes(DEEP), Sizes(SHALLOW, SIZE), Sizes(DEEP, SIZE)]
TANH = dataclasses.replace(SHALLOW, activation="tanh")


def make_network(spec, sizes):
    return ActorCriticNetwork(spec, *sizes)


def spec_of(shape, stacked=4, actions=NUM_ACTIONS):
    return EnvironmentSpec("Shape-v0", shape, "uint8" if len(shape) > 1 else "float32", stacked, actions, 1)


def policy_of(spec, config, network, device=CPU, **options):
    return Policy(spec, lambda: make_network(spec, config), device, network.state_dict(), **options)


def stream(spec, seed=0):
    """Returns frames [T + 1, E, *frame], starts, stacks as a slow reader makes them, last actions and rewards."""
    rng = np.random.default_rng(seed)
    frames = rng.integers(0, 256, (STEPS, NUM_ENVS, *spec.frame_shape)).astype(spec.frame_dtype)
    if spec.frame_dtype == "float32":
        frames /= 256
    starts = rng.random((STEPS, NUM_ENVS)) < 0.2
    starts[0, 0], starts[0, 1] = True, False  # the first rows: a new episode, and one that goes on
    actions = rng.integers(0, NUM_ACTIONS, (STEPS, NUM_ENVS))
    rewards = (3 * rng.standard_normal((STEPS, NUM_ENVS))).astype(np.float32)
    return frames, starts, slow_stacks(frames, starts, spec.stacked_frames), actions, rewards


def stored(spec, stacks):
    """Returns stacks [T + 1, E, H, *frame] as a learner gets them."""
    flat = FrameLayout.of(spec).store_stacks(torch.from_numpy(stacks).flatten(0, 1))
    return flat.unflatten(0, stacks.shape[:2])


def act(acting, config, parts, state, num_steps=STEPS):
    """Returns logits, values and states before each step, of a policy that is called step by step."""
    frames, starts, _, actions, rewards = parts
    stack, logits, values, states = acting.frame_stack(NUM_ENVS), [], [], []
    for t in range(num_steps):
        memory = None
        if config.lstm_size:
            states.append(state)
            history = History(*map(torch.from_numpy, (starts[t], actions[t], rewards[t], state)))
            memory = memory_of(history, NUM_ACTIONS).numpy()
        found = torch.from_numpy(acting.values(frames[t], starts[t], stack, memory))
        logits.append(found[:, :NUM_ACTIONS])
        values.append(found[:, NUM_ACTIONS])
        state = found[:, NUM_ACTIONS + 1 :].unflatten(1, (2, -1)).numpy() if config.lstm_size else state
    return torch.stack(logits), torch.stack(values), [*states, state]


def first_state(seed=3):
    return np.random.default_rng(seed).standard_normal((NUM_ENVS, 2, SIZE)).astype(np.float32)


def history_of(parts, state, first=0):
    _, starts, _, actions, rewards = parts
    tensors = (torch.from_numpy(array[first:]) for array in (starts, actions, rewards))
    return History(*tensors, torch.from_numpy(state))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("config", [*CONFIGS, Sizes(TANH), Sizes(TANH, SIZE)])
@pytest.mark.parametrize(("shape", "stacked"), SHAPES)
def test_a_learners_pass_over_an_unroll_is_the_actors_steps(config, shape, stacked, device):
    spec = spec_of(shape, stacked)
    network, parts = make_network(spec, config), stream(spec)
    exact = policy_of(spec, config, network, device, dtype=torch.float32)
    logits, values, states = act(exact, config, parts, first_state())
    with torch.no_grad():
        found = network.unroll(stored(spec, parts[2]), history_of(parts, first_state()))
    assert found.logits.shape == (STEPS, NUM_ENVS, NUM_ACTIONS) and found.values.shape == (STEPS, NUM_ENVS)
    atol = 1e-5 if device == CPU else 1e-3
    assert torch.allclose(found.logits, logits, atol=atol) and torch.allclose(found.values, values, atol=atol)
    if config.lstm_size:
        assert found.state.shape == (NUM_ENVS, 2, SIZE)
        assert torch.allclose(found.state, torch.from_numpy(states[-1]), atol=atol)
    else:
        assert found.state is None


@pytest.mark.parametrize("config", CONFIGS[2:])
def test_the_state_at_an_unrolls_first_step_continues_the_stream(config):
    spec = spec_of((40, 40))
    network, parts = make_network(spec, config), stream(spec)
    observation = stored(spec, parts[2])
    with torch.no_grad():
        whole = network.unroll(observation, history_of(parts, first_state()), num_steps=5)
        rest = network.unroll(observation[5:], history_of(parts, whole.state.numpy(), first=5))
    assert torch.allclose(rest.logits, whole.logits[5:], atol=1e-6)
    assert torch.allclose(rest.values, whole.values[5:], atol=1e-6)
    states = act(policy_of(spec, config, network, dtype=torch.float32), config, parts, first_state())[2]
    with torch.no_grad():
        rest = network.unroll(observation[5:], history_of(parts, states[5], first=5))  # as the log stores it
    assert torch.allclose(rest.logits, whole.logits[5:], atol=1e-5)


def test_nothing_of_the_past_counts_where_an_episode_begins():
    spec, config = spec_of((3,)), CONFIGS[2]
    network, parts = make_network(spec, config), stream(spec)
    parts[1][4] = True  # in all rows
    other = stream(spec, seed=9)
    for array, changed in zip(parts[3:], other[3:], strict=True):
        changed[5:] = array[5:]
    observation = stored(spec, parts[2])
    with torch.no_grad():
        found = network.unroll(observation, history_of(parts, first_state()))
        past = network.unroll(observation, history_of((None, parts[1], None, *other[3:]), first_state(seed=4)))
        anew = network.unroll(observation[4:], history_of(parts, np.zeros_like(first_state()), first=4))
    assert torch.equal(found.logits[4:], past.logits[4:]) and not torch.equal(found.logits[3], past.logits[3])
    assert torch.allclose(found.logits[4:], anew.logits, atol=1e-6)


def test_a_state_that_is_not_finite_ends_with_its_episode():
    spec, config = spec_of((3,)), CONFIGS[2]
    network, parts = make_network(spec, config), stream(spec)
    parts[1][0] = True
    found = network.unroll(stored(spec, parts[2]), history_of(parts, np.full_like(first_state(), np.nan)))
    assert found.logits.isfinite().all()


def test_the_last_step_is_a_one_hot_action_and_a_clipped_reward():
    start = torch.tensor([False, False, True])
    found = last_step(start, torch.tensor([2, 0, 1]), torch.tensor([7.0, -0.5, 1.0]), 3)
    assert found.tolist() == [[0, 0, 1, 1], [1, 0, 0, -0.5], [0, 0, 0, 0]]


def test_parameters_of_the_deep_network_are_those_of_the_paper():
    config = ActorCriticConfig()
    network = make_network(spec_of((84, 84), actions=18), Sizes(config))
    sections = (
        (4 * 9 * 16 + 16) + 4 * (16 * 9 * 16 + 16),  # 9,872
        (16 * 9 * 32 + 32) + 4 * (32 * 9 * 32 + 32),  # 41,632
        (32 * 9 * 32 + 32) + 4 * (32 * 9 * 32 + 32),  # 46,240
    )
    fully_connected = 11 * 11 * 32 * 256 + 256  # 991,488: 84 pixels become 42, 21, 11
    heads = 256 * (18 + 1) + 18 + 1
    assert sum(sections) + fully_connected == 1_089_232
    assert sum(p.numel() for p in network.parameters()) == 1_089_232 + heads
    convolutions = [module for module in network.modules() if isinstance(module, torch.nn.Conv2d)]
    assert len(convolutions) == 15
    recurrent = make_network(spec_of((84, 84), actions=18), Sizes(config, 256))
    assert sum(p.numel() for p in recurrent.lstm.parameters()) == 4 * 256 * (256 + 18 + 1 + 256 + 1)


def slow_deep_features(torso, screens):
    """Returns the features of plain screens [B, H, h, w] by torch's modules, one after the other."""
    x = screens.float() / 255
    for section in (torso.first, *torso.others):
        x = torch.nn.MaxPool2d(3, 2, 1)(section.conv(x))
        for block in section.blocks:
            x = x + block.conv2(torch.relu(block.conv1(torch.relu(x))))
    return torch.relu(x).flatten(1)


@pytest.mark.parametrize("shape", [(84, 84), (36, 44), (37, 50)])
def test_the_deep_torso_sees_single_pixels_of_screens_in_blocks(shape):
    spec = spec_of(shape)
    torso = make_network(spec, Sizes(DEEP)).torso
    screens = torch.randint(0, 256, (3, 4, *shape), dtype=torch.uint8)
    prepared = torso.layout.prepare(torso.layout.store_stacks(screens), torch.float32)
    features = torso.features(prepared, torso.kernel())
    assert features.shape == (3, torso.num_features)
    assert torch.allclose(features, slow_deep_features(torso, screens), atol=1e-5)


@pytest.mark.parametrize("shape", [(3,), (10, 7)])
def test_small_observations_have_the_same_torso_with_any_kind(shape):
    shallow, deep = (make_network(spec_of(shape), Sizes(config)) for config in (SHALLOW, DEEP))
    assert type(shallow.torso) is type(deep.torso)


@pytest.mark.parametrize("config", CONFIGS)
def test_the_last_layers_stay_in_float32_under_autocast(config):
    spec = spec_of((84, 84))
    network, parts = make_network(spec, config), stream(spec)
    observation, history = stored(spec, parts[2]), history_of(parts, first_state())
    with torch.no_grad():
        exact = network.unroll(observation, history)
        with torch.autocast("cpu", torch.bfloat16):
            fast = network.unroll(observation, history)
            heads = network(observation[0])
    assert fast.logits.dtype == fast.values.dtype == heads.dtype == torch.float32
    assert torch.allclose(fast.logits, exact.logits, atol=0.02) and torch.allclose(fast.values, exact.values, atol=0.02)
    assert len(torch.unique(fast.logits)) > 150  # values of bfloat16 would fall together


@pytest.mark.parametrize("config", CONFIGS)
def test_an_actor_in_bfloat16_is_close_to_float32(config):
    spec = spec_of((84, 84))
    network, parts = make_network(spec, config), stream(spec)
    acting = policy_of(spec, config, network, dtype=torch.bfloat16)
    assert acting.dtype == torch.bfloat16
    logits, values, _ = act(acting, config, parts, first_state())
    exact = network.unroll(stored(spec, parts[2]), history_of(parts, first_state()))
    assert torch.allclose(logits, exact.logits, atol=0.03) and torch.allclose(values, exact.values, atol=0.03)


def test_a_new_network_whose_values_are_near_0_acts_in_bfloat16():
    spec = spec_of((84, 84))
    with torch.random.fork_rng():
        for seed in range(40):
            torch.manual_seed(seed)
            acting = policy_of(spec, CONFIGS[1], make_network(spec, CONFIGS[1]), dtype=torch.bfloat16)
            assert acting.dtype == torch.bfloat16, seed


@pytest.mark.parametrize("config", CONFIGS)
def test_a_loss_reaches_every_parameter(config):
    spec = spec_of((40, 40))
    network, parts = make_network(spec, config), stream(spec)
    output = network.unroll(stored(spec, parts[2]), history_of(parts, first_state()))
    (output.logits.square().sum() + output.values.square().sum()).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in network.parameters())


def test_a_forgotten_history_or_memory_is_named():
    spec = spec_of((3,))
    network = make_network(spec, CONFIGS[2])
    frames, starts, stacks, *_ = stream(spec)
    with pytest.raises(ValueError, match="needs the history"):
        network.unroll(stored(spec, stacks))
    acting = policy_of(spec, CONFIGS[2], network)
    with pytest.raises(ValueError, match=f"a memory of {2 * SIZE + NUM_ACTIONS + 1} numbers"):
        acting.values(frames[0], starts[0], acting.frame_stack(NUM_ENVS))
    plain = policy_of(spec, Sizes(SHALLOW), make_network(spec, Sizes(SHALLOW)))
    with pytest.raises(ValueError, match=r"a memory of 0 numbers \(its memory_size\)"):
        plain.values(frames[0], starts[0], plain.frame_stack(NUM_ENVS), np.zeros((NUM_ENVS, 20), np.float32))


@pytest.mark.parametrize(
    "changes",
    [
        {"channels": (65_536, 65_537, 65_536)},
        {"channels": (2**40, 8, 8)},
        {"hidden_size": 0},
        {"lstm_size": -1},
        {"lstm_size": 2**40},
        *({"first_deviation": number} for number in (0.0, -1.0, 0.005, 8.0, math.inf, math.nan)),
    ],
)
def test_an_absurd_number_is_refused_and_takes_no_memory(changes):
    spec, lstm_size = spec_of((84, 84)), changes.get("lstm_size", SIZE)
    config = Sizes(dataclasses.replace(DEEP, **{k: v for k, v in changes.items() if k != "lstm_size"}), lstm_size)
    with pytest.raises(ConfigError, match="makes no sense"):
        make_network(spec, config)
    with pytest.raises(WireError, match="impossible network"):
        policy_of(spec, config, make_network(spec, CONFIGS[3]))


def test_the_greatest_network_that_is_described_takes_no_memory():
    spec = spec_of((84, 84))
    config = Sizes(ActorCriticConfig("deep", (65_536, 65_536, 65_536), 65_536), 65_536)
    with pytest.raises(WireError, match="do not fit"):
        policy_of(spec, config, make_network(spec, Sizes(DEEP)))


def test_the_policy_over_vectors_is_a_gaussian_whose_deviations_are_learned_for_all_observations():
    bounds = ((-1.0, 1.0), (0.0, 3.0))
    spec, sizes = EnvironmentSpec("Shape-v0", (3,), "float32", 2, 0, 1, bounds), Sizes(SHALLOW)
    torch.manual_seed(0)
    network = make_network(spec, sizes)
    with torch.no_grad():
        network.policy.log_deviations.copy_(torch.tensor([-1.0, 0.5]))
    frames, starts, stacks, _, _ = stream(spec)
    output = network.unroll(stored(spec, stacks))
    assert (output.logits[..., 2:] == torch.tensor([-1.0, 0.5])).all() and output.logits[..., :2].std() > 0
    acting = policy_of(spec, sizes, network)
    stack = acting.frame_stack(NUM_ENVS)
    for t in range(STEPS):
        found = torch.from_numpy(acting.values(frames[t], starts[t], stack))
        torch.testing.assert_close(found[:, :4], output.logits[t].detach())
        torch.testing.assert_close(found[:, 4], output.values[t].detach())


def test_the_deviations_of_a_policy_over_vectors_begin_where_they_are_asked_to():
    config = dataclasses.replace(TANH, first_deviation=0.5)
    network = make_network(EnvironmentSpec("Shape-v0", (3,), "float32", 1, 0, 1, ((-2.0, 2.0),)), Sizes(config))
    moments = network.unroll(torch.randn(STEPS, NUM_ENVS, 1, 3)).logits
    torch.testing.assert_close(moments[..., 1].exp(), torch.full((STEPS, NUM_ENVS), 0.5))
    assert (moments[..., 0].abs() < 0.1).all()


def test_the_layers_of_a_perceptron_and_the_one_after_it_have_the_activation_that_is_asked_for():
    spec, observation = spec_of((3,), 1), torch.randn(1, 64, 1, 3)
    networks = make_network(spec, Sizes(SHALLOW)), make_network(spec, Sizes(TANH))
    networks[1].load_state_dict(networks[0].state_dict())
    for network, function in zip(networks, (torch.relu, torch.tanh), strict=True):
        torso, x = network.torso, observation[0, :, 0]
        for layer in (torso.first, torso.second, network.hidden):
            x = function(torch.nn.functional.linear(x, layer.weight, layer.bias))
        torch.testing.assert_close(network.unroll(observation).features[0], x)
