import numpy as np
import pytest
import torch
from torch import nn

from apexrl.errors import WireError
from apexrl.networks import policy
from apexrl.networks.config import DuelingConfig
from apexrl.networks.dueling import make_network
from apexrl.networks.frame_layout import FrameLayout
from apexrl.networks.policy import Policy
from apexrl.networks.torsos import FrameNetwork, make_torso
from apexrl.types import FORBIDDEN, EnvironmentSpec
from tests.devices import CPU, DEVICES
from tests.networks.test_frame_stack import slow_stacks

CONFIG = DuelingConfig(channels=(8, 16, 16), hidden_size=32)
NUM_ENVS = 5
SHAPES = [((84, 84), 4), ((84, 84), 1), ((96, 96, 3), 2), ((40, 50), 3), ((10, 7), 4), ((3,), 2), ((), 1)]


def spec_of(shape, stacked=4):
    return EnvironmentSpec("Shape-v0", shape, "uint8" if len(shape) > 1 else "float32", stacked, 6, 1)


def policy_of(spec, tensors, device=CPU, config=CONFIG, **options):
    return Policy(spec, lambda: make_network(spec, config), device, tensors, **options)


def stream(spec, num_steps, seed=0):
    """Yields frames, starts, and the stacks that a slow reader makes of them."""
    rng = np.random.default_rng(seed)
    frames = rng.integers(0, 256, (num_steps, NUM_ENVS, *spec.frame_shape)).astype(spec.frame_dtype)
    if spec.frame_dtype == "float32":
        frames /= 256
    starts = rng.random((num_steps, NUM_ENVS)) < 0.2
    starts[0] = True
    yield from zip(frames, starts, slow_stacks(frames, starts, spec.stacked_frames), strict=True)


def exact_values(network, spec, observations):
    with torch.no_grad():
        return network(FrameLayout.of(spec).store_stacks(torch.from_numpy(observations))).numpy()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("shape", "stacked"), SHAPES)
def test_values_are_those_of_the_whole_stack_in_float32(shape, stacked, device):
    spec = spec_of(shape, stacked)
    network = make_network(spec, CONFIG)
    acting = policy_of(spec, network.state_dict(), device)
    stack = acting.frame_stack(NUM_ENVS)
    for frames, starts, observations in stream(spec, 40):
        values = acting.values(frames, starts, stack)
        exact = exact_values(network, spec, observations)
        assert values.dtype == np.float32
        np.testing.assert_allclose(values, exact, atol=0.02 * np.abs(exact).max() + 1e-5)


@pytest.mark.parametrize(("shape", "stacked"), [((84, 84), 4), ((96, 96, 3), 2), ((10, 7), 4)])
def test_values_in_bfloat16_are_close_to_those_in_float32(shape, stacked):
    spec = spec_of(shape, stacked)
    network = make_network(spec, CONFIG)
    acting = policy_of(spec, network.state_dict(), dtype=torch.bfloat16)
    assert acting.dtype == torch.bfloat16
    stack = acting.frame_stack(NUM_ENVS)
    for frames, starts, observations in stream(spec, 10):
        exact = exact_values(network, spec, observations)
        values = acting.values(frames, starts, stack)
        np.testing.assert_allclose(values, exact, atol=policy.TOLERANCE * np.abs(exact).max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_mask_of_the_newest_frame_forbids_actions_in_each_precision(dtype):
    spec = EnvironmentSpec("Doors-v0", (20,), "float32", 3, 6, 1, variant='{"action_mask": "mask"}')
    network = make_network(spec, CONFIG)
    acting = policy_of(spec, network.state_dict(), dtype=dtype)
    assert acting.dtype == dtype
    stack = acting.frame_stack(NUM_ENVS)
    for frames, starts, _ in stream(spec, 10):
        frames[:, -6:] = mask = frames[:, -6:] > 0.5
        forbidden = acting.values(frames, starts, stack) == FORBIDDEN
        assert (forbidden == (~mask & mask.any(axis=1, keepdims=True))).all()


class PairNetwork(FrameNetwork):
    """Two linear heads side by side, as an actor-critic network has them."""

    def __init__(self, spec):
        super().__init__(make_torso(spec, (8, 16, 16), 32))
        self.pair = nn.Linear(self.torso.num_features, spec.num_actions + 1)

    def heads(self, features):
        return self.pair(features.float())

    def compute_in(self, dtype):
        self.torso.to(dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(84, 84), (3,)])
def test_a_policy_runs_any_network_over_stacks(shape, device):
    spec = spec_of(shape)
    network = PairNetwork(spec)
    acting = Policy(spec, lambda: PairNetwork(spec), device, network.state_dict())
    stack = acting.frame_stack(NUM_ENVS)
    for frames, starts, observations in stream(spec, 10):
        exact = exact_values(network, spec, observations)
        values = acting.values(frames, starts, stack)
        assert values.shape == (NUM_ENVS, 7) and values.dtype == np.float32
        np.testing.assert_allclose(values, exact, atol=0.02 * np.abs(exact).max() + 1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_greedy_actions_are_those_of_float32_unless_two_are_as_good(device):
    spec = spec_of((84, 84))
    network = make_network(spec, DuelingConfig())
    acting = policy_of(spec, network.state_dict(), device, DuelingConfig())
    stack = acting.frame_stack(NUM_ENVS)
    same = []
    for frames, starts, observations in stream(spec, 40, seed=1):
        chosen = acting.values(frames, starts, stack).argmax(1)
        exact = exact_values(network, spec, observations)
        lost = exact.max(1) - exact[np.arange(NUM_ENVS), chosen]
        assert (lost <= 0.02 * np.abs(exact).max()).all()
        same.append(lost == 0)
    assert np.mean(same) > 0.9


@pytest.mark.parametrize("device", DEVICES)
def test_two_stacks_of_one_policy_do_not_see_each_other(device):
    spec = spec_of((84, 84))
    tensors = make_network(spec, CONFIG).state_dict()
    acting = policy_of(spec, tensors, device)
    alone = policy_of(spec, tensors, device)
    stack, other, one = acting.frame_stack(NUM_ENVS), acting.frame_stack(NUM_ENVS), alone.frame_stack(NUM_ENVS)
    for (frames, starts, _), (noise, resets, _) in zip(stream(spec, 9), stream(spec, 9, seed=2), strict=True):
        values = acting.values(frames, starts, stack)
        acting.values(noise, resets, other)
        assert np.array_equal(values, alone.values(frames, starts, one))


@pytest.mark.parametrize("device", DEVICES)
def test_new_parameters_are_used_from_the_next_call_on(device):
    spec = spec_of((84, 84))
    networks = [make_network(spec, CONFIG) for _ in range(2)]
    acting = policy_of(spec, networks[0].state_dict(), device)
    fresh = policy_of(spec, networks[1].state_dict(), device)
    stack, other = acting.frame_stack(NUM_ENVS), fresh.frame_stack(NUM_ENVS)
    for t, (frames, starts, _) in enumerate(stream(spec, 12)):
        if t == 6:
            acting.load(networks[1].state_dict())
        values, expected = acting.values(frames, starts, stack), fresh.values(frames, starts, other)
        assert np.array_equal(values, expected) == (t >= 6)


SCREEN = spec_of((84, 84))


def damaged(**changes):
    return make_network(SCREEN, CONFIG).state_dict() | changes


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("tensors", "complaint"),
    [
        (make_network(SCREEN, DuelingConfig()).state_dict(), "do not fit"),
        ({}, "do not fit"),
        (damaged(evil=torch.zeros(1)), "evil"),
        (damaged(**{"value.bias": torch.zeros(2)}), "value.bias"),
        (damaged(**{"value.bias": torch.full((1,), torch.nan)}), "not finite"),
        (damaged(**{"value.bias": torch.full((1,), torch.inf)}), "not finite"),
        (damaged(**{"advantage.bias": torch.tensor([torch.inf, -torch.inf, 0, 0, 0, 0])}), "not finite"),
    ],
)
def test_parameters_that_do_not_fit_are_refused_and_the_old_ones_stay(tensors, complaint, device):
    given = damaged(**{"value.bias": torch.ones(1)})
    acting, old = (policy_of(SCREEN, given, device) for _ in "ab")
    with pytest.raises(WireError, match=complaint):
        acting.load(tensors)
    with pytest.raises(WireError, match=complaint):
        policy_of(SCREEN, tensors, device)
    frames, starts, _ = next(stream(SCREEN, 1))
    values = [policy.values(frames, starts, policy.frame_stack(NUM_ENVS)) for policy in (acting, old)]
    assert np.array_equal(*values)


def test_large_parameters_are_finite_although_their_sum_is_not():
    largest = torch.finfo(torch.float32).max
    policy_of(SCREEN, damaged()).load(damaged(**{"advantage.bias": torch.full((6,), largest)}))


@pytest.mark.parametrize(
    "sizes", [((65_536, 65_536, 65_536), 65_536), ((2**40, 8, 8), 8), ((8, 8, 8), 0), ((-1, 8, 8), 8)]
)
def test_a_description_of_an_absurd_network_takes_no_memory(sizes):
    with pytest.raises(WireError):
        policy_of(SCREEN, damaged(), config=DuelingConfig(*sizes))


def test_a_precision_that_computes_something_else_is_not_used(monkeypatch):
    def wrong(x, kernel, *args, **options):  # as on hardware that computes bfloat16 wrongly
        return right(x, kernel, *args, **options) * (0.8 if x.dtype == torch.bfloat16 else 1)

    right = nn.functional.conv2d
    monkeypatch.setattr(nn.functional, "conv2d", wrong)
    spec = spec_of((84, 84))
    network = make_network(spec, CONFIG)
    acting = policy_of(spec, network.state_dict(), dtype=torch.bfloat16)
    assert acting.dtype == torch.float32
    frames, starts, observations = next(stream(spec, 1))
    values = acting.values(frames, starts, acting.frame_stack(NUM_ENVS))
    assert np.allclose(values, exact_values(network, spec, observations), atol=1e-5)
