import pytest
import torch
import torch.nn.functional as F

from apexrl.errors import ConfigError
from apexrl.networks.config import DuelingConfig
from apexrl.networks.dueling import make_network
from apexrl.networks.frame_layout import FrameLayout
from apexrl.types import EnvironmentSpec

CONFIG = DuelingConfig(channels=(8, 16, 16), hidden_size=32)


def spec_of(shape, dtype="uint8", stacked=4, actions=5):
    return EnvironmentSpec("Shape-v0", shape, dtype, stacked, actions, 1)


def test_convolution_over_blocks_is_the_one_of_dqn():
    spec = spec_of((84, 84))
    network = make_network(spec, CONFIG)
    torso = network.torso
    screens = torch.randint(0, 256, (3, 4, 84, 84), dtype=torch.uint8)
    x = F.relu(F.conv2d(screens.float() / 255, torso.conv1.weight, torso.conv1.bias, stride=4))
    expected = F.relu(torso.conv3(F.relu(torso.conv2(x)))).flatten(1)
    prepared = network.prepare(FrameLayout.of(spec).store_stacks(screens))
    assert torch.allclose(torso.features(prepared, torso.kernel()), expected, atol=1e-5)


def test_value_and_advantage_are_combined_as_in_the_paper():
    network = make_network(spec_of((6,), "float32", 1), CONFIG)
    x = torch.randn(4, 1, 6)
    torso = network.torso
    features = F.relu(network.hidden(torso.features(network.prepare(x), torso.kernel())))
    value, advantage = network.value(features[:, :32]), network.advantage(features[:, 32:])
    assert torch.allclose(network(x), value + advantage - advantage.mean(1, keepdim=True))


@pytest.mark.parametrize("shape", [(), (3,), (10, 7), (96, 96, 3), (40, 50), (84, 84)])
def test_every_shape_of_observation(shape):
    dtype = "uint8" if len(shape) > 1 else "float32"
    spec = spec_of(shape, dtype, stacked=2)
    observations = torch.zeros(3, 2, *shape, dtype=getattr(torch, dtype))
    q_values = make_network(spec, CONFIG)(FrameLayout.of(spec).store_stacks(observations))
    assert q_values.shape == (3, 5) and q_values.isfinite().all()


def test_bfloat16_values_are_close_to_float32_and_as_fine():
    network = make_network(spec_of((84, 84)), CONFIG)
    stacks = torch.randint(0, 256, (64, 4, 21, 21, 16), dtype=torch.uint8)
    with torch.no_grad():
        exact = network(stacks)
        with torch.autocast("cpu", torch.bfloat16):
            fast = network(stacks)
    assert fast.dtype == torch.float32
    assert (fast - exact).abs().max() < 0.02 * exact.abs().max() + 0.005
    assert len(torch.unique(fast)) > 300  # values of bfloat16 would fall together


def test_a_shape_that_no_network_fits_is_named():
    with pytest.raises(ConfigError, match="neither vectors nor pictures: give a --network"):
        make_network(spec_of((4, 4, 4, 4)), CONFIG)


@pytest.mark.parametrize(
    "sizes", [((65_536, 65_537, 65_536), 65_536), ((2**40, 8, 8), 8), ((8, 8, 8), 0), ((-1, 8, 8), 8)]
)
def test_a_size_that_makes_no_sense_is_named(sizes):
    with pytest.raises(ConfigError, match="makes no sense"):
        make_network(spec_of((84, 84)), DuelingConfig(*sizes))


@pytest.mark.parametrize("shape", [(3,), (10, 7), (84, 84)])
def test_names_of_tensors_are_those_of_earlier_checkpoints(shape):
    layers = {1: ["first", "second"], 10: ["conv1", "conv2"], 84: ["conv1", "conv2", "conv3"]}
    torso = layers[shape[0] if len(shape) > 1 else 1]
    modules = [*(f"torso.{name}" for name in torso), "hidden", "value", "advantage"]
    names = [f"{module}.{part}" for module in modules for part in ("weight", "bias")]
    assert list(make_network(spec_of(shape), CONFIG).state_dict()) == names
