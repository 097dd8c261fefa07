import numpy as np
import pytest
import torch
import torch.nn.functional as F

from apexrl.config import NetworkConfig
from apexrl.errors import ConfigError
from apexrl.networks.dueling import make_network
from apexrl.networks.screens import blocks
from apexrl.types import StreamSpec
from tests.streams import slow_screens

CONFIG = NetworkConfig(channels=(8, 16, 16), hidden_size=32)


def spec_of(shape, dtype="uint8", stacked=4, actions=5):
    return StreamSpec("Shape-v0", shape, dtype, stacked, actions, 1)


def test_convolution_over_blocks_is_the_one_of_dqn():
    network = make_network(spec_of((84, 84)), CONFIG)
    torso = network.torso
    screens = torch.randint(0, 256, (3, 4, 84, 84), dtype=torch.uint8)
    x = F.relu(F.conv2d(screens.float() / 255, torso.conv1.weight, torso.conv1.bias, stride=4))
    expected = F.relu(torso.conv3(F.relu(torso.conv2(x)))).flatten(1)
    assert torch.allclose(torso(network.prepare(screens)), expected, atol=1e-5)
    stored = torch.stack([blocks(screens[:, h]) for h in range(4)], dim=1)
    assert np.array_equal(slow_screens(stored), screens)
    assert torch.allclose(torso(network.prepare(stored)), expected, atol=1e-5)


def test_value_and_advantage_are_combined_as_in_the_paper():
    network = make_network(spec_of((6,), "float32", 1), CONFIG)
    x = torch.randn(4, 1, 6)
    features = F.relu(network.hidden(network.torso(network.prepare(x))))
    value, advantage = network.value(features[:, :32]), network.advantage(features[:, 32:])
    assert torch.allclose(network(x), value + advantage - advantage.mean(1, keepdim=True))


@pytest.mark.parametrize("shape", [(), (3,), (10, 7), (96, 96, 3), (40, 50), (84, 84)])
def test_every_shape_of_observation(shape):
    dtype = "uint8" if len(shape) > 1 else "float32"
    spec = spec_of(shape, dtype, stacked=2)
    observations = torch.zeros(3, 2, *shape, dtype=getattr(torch, dtype))
    q_values = make_network(spec, CONFIG)(observations)
    assert q_values.shape == (3, 5) and q_values.isfinite().all()


def test_bfloat16_values_are_close_to_float32_and_as_fine():
    network = make_network(spec_of((84, 84)), CONFIG)
    screens = torch.randint(0, 256, (64, 4, 84, 84), dtype=torch.uint8)
    with torch.no_grad():
        exact = network(screens)
        with torch.autocast("cpu", torch.bfloat16):
            fast = network(screens)
    assert fast.dtype == torch.float32
    assert (fast - exact).abs().max() < 0.02 * exact.abs().max() + 0.005
    assert len(torch.unique(fast)) > 300  # values of bfloat16 would fall together


def test_a_shape_that_no_network_fits_is_named():
    with pytest.raises(ConfigError, match="only vectors and pictures"):
        make_network(spec_of((4, 4, 4, 4)), CONFIG)
