import logging

import numpy as np
import pytest
import torch

from apexrl.config import NetworkConfig
from apexrl.errors import WireError
from apexrl.networks import policy
from apexrl.networks.dueling import make_network
from apexrl.networks.policy import Policy
from apexrl.types import StreamSpec, TimeSteps
from tests.streams import slow_stack

CONFIG = NetworkConfig(channels=(8, 16, 16), hidden_size=32)
NUM_ENVS = 5
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")),
]
SHAPES = [((84, 84), 4), ((84, 84), 1), ((96, 96, 3), 2), ((40, 50), 3), ((10, 7), 4), ((3,), 2), ((), 1)]


def spec_of(shape, stacked=4):
    return StreamSpec("Shape-v0", shape, "uint8" if len(shape) > 1 else "float32", stacked, 6, 1)


def stream(spec, num_steps, seed=0):
    """Yields frames, starts, and the stacks that a slow reader makes of them."""
    rng = np.random.default_rng(seed)
    observations = np.zeros((NUM_ENVS, *spec.observation_shape), spec.frame_dtype)
    nothing = np.zeros(NUM_ENVS)
    for t in range(num_steps):
        frames = rng.integers(0, 256, (NUM_ENVS, *spec.frame_shape)).astype(spec.frame_dtype)
        if spec.frame_dtype == "float32":
            frames /= 256
        starts = rng.random(NUM_ENVS) < 0.2 if t else np.ones(NUM_ENVS, bool)
        observations = slow_stack(observations, TimeSteps(frames, nothing, nothing, starts, nothing, nothing))
        yield frames, starts, observations


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("shape", "stacked"), SHAPES)
def test_values_are_those_of_the_whole_stack_in_float32(shape, stacked, device):
    spec = spec_of(shape, stacked)
    network = make_network(spec, CONFIG)
    acting = Policy(spec, CONFIG, torch.device(device), network.state_dict())
    stack = acting.frame_stack(NUM_ENVS)
    for frames, starts, observations in stream(spec, 40):
        values = acting.q_values(frames, starts, stack)
        with torch.no_grad():
            exact = network(torch.from_numpy(observations)).numpy()
        assert values.dtype == np.float32
        np.testing.assert_allclose(values, exact, atol=0.02 * np.abs(exact).max() + 1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_greedy_actions_are_those_of_float32_unless_two_are_as_good(device):
    spec = spec_of((84, 84))
    network = make_network(spec, NetworkConfig())
    acting = Policy(spec, NetworkConfig(), torch.device(device), network.state_dict())
    stack = acting.frame_stack(NUM_ENVS)
    same = []
    for frames, starts, observations in stream(spec, 40, seed=1):
        chosen = acting.q_values(frames, starts, stack).argmax(1)
        with torch.no_grad():
            exact = network(torch.from_numpy(observations)).numpy()
        lost = exact.max(1) - exact[np.arange(NUM_ENVS), chosen]
        assert (lost <= 0.02 * np.abs(exact).max()).all()
        same.append(lost == 0)
    assert np.mean(same) > 0.9


@pytest.mark.parametrize("device", DEVICES)
def test_two_stacks_of_one_policy_do_not_see_each_other(device):
    spec = spec_of((84, 84))
    tensors = make_network(spec, CONFIG).state_dict()
    acting = Policy(spec, CONFIG, torch.device(device), tensors)
    alone = Policy(spec, CONFIG, torch.device(device), tensors)
    stack, other, one = acting.frame_stack(NUM_ENVS), acting.frame_stack(NUM_ENVS), alone.frame_stack(NUM_ENVS)
    for (frames, starts, _), (noise, resets, _) in zip(stream(spec, 9), stream(spec, 9, seed=2), strict=True):
        values = acting.q_values(frames, starts, stack)
        acting.q_values(noise, resets, other)
        assert np.array_equal(values, alone.q_values(frames, starts, one))


@pytest.mark.parametrize("device", DEVICES)
def test_new_parameters_are_used_from_the_next_call_on(device):
    spec = spec_of((84, 84))
    networks = [make_network(spec, CONFIG) for _ in range(2)]
    acting = Policy(spec, CONFIG, torch.device(device), networks[0].state_dict())
    fresh = Policy(spec, CONFIG, torch.device(device), networks[1].state_dict())
    stack, other = acting.frame_stack(NUM_ENVS), fresh.frame_stack(NUM_ENVS)
    for t, (frames, starts, _) in enumerate(stream(spec, 12)):
        if t == 6:
            acting.load(networks[1].state_dict())
        values, expected = acting.q_values(frames, starts, stack), fresh.q_values(frames, starts, other)
        assert np.array_equal(values, expected) == (t >= 6)


SCREEN = spec_of((84, 84))


def damaged(**changes):
    return make_network(SCREEN, CONFIG).state_dict() | changes


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("tensors", "complaint"),
    [
        (make_network(SCREEN, NetworkConfig()).state_dict(), "do not fit"),
        ({}, "do not fit"),
        (damaged(evil=torch.zeros(1)), "evil"),
        (damaged(**{"value.bias": torch.zeros(2)}), "value.bias"),
        (damaged(**{"value.bias": torch.full((1,), torch.nan)}), "not finite"),
        (damaged(**{"value.bias": torch.full((1,), torch.inf)}), "not finite"),
    ],
)
def test_parameters_that_do_not_fit_are_refused_and_the_old_ones_stay(tensors, complaint, device):
    acting, old = (Policy(SCREEN, CONFIG, torch.device(device), damaged(**{"value.bias": torch.ones(1)})) for _ in "ab")
    old.load({name: tensor.clone() for name, tensor in acting._exact.state_dict().items()})
    with pytest.raises(WireError, match=complaint):
        acting.load(tensors)
    with pytest.raises(WireError, match=complaint):
        Policy(SCREEN, CONFIG, torch.device(device), tensors)
    frames, starts, _ = next(stream(SCREEN, 1))
    values = [policy.q_values(frames, starts, policy.frame_stack(NUM_ENVS)) for policy in (acting, old)]
    assert np.array_equal(*values)


@pytest.mark.parametrize(
    "sizes", [((65_536, 65_536, 65_536), 65_536), ((2**40, 8, 8), 8), ((8, 8, 8), 0), ((-1, 8, 8), 8)]
)
def test_a_description_of_an_absurd_network_takes_no_memory(sizes):
    with pytest.raises(WireError):
        Policy(SCREEN, NetworkConfig(*sizes), torch.device("cpu"), damaged())


def test_a_precision_that_computes_something_else_is_not_used(monkeypatch, caplog):
    monkeypatch.setattr(policy, "fastest_dtype", lambda device, spec: torch.bfloat16)
    monkeypatch.setattr(policy, "TOLERANCE", 1e-6)
    spec = spec_of((84, 84))
    network = make_network(spec, CONFIG)
    with caplog.at_level(logging.WARNING):
        acting = Policy(spec, CONFIG, torch.device("cpu"), network.state_dict())
    assert acting.dtype == torch.float32 and "acting in float32" in caplog.text
    frames, starts, observations = next(stream(spec, 1))
    values = acting.q_values(frames, starts, acting.frame_stack(NUM_ENVS))
    with torch.no_grad():
        assert np.allclose(values, network(torch.from_numpy(observations)).numpy(), atol=1e-5)
