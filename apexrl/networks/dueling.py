"""Dueling Q-networks: Nature's convolutions for screens, smaller ones for small pictures, a perceptron for vectors."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apexrl.config import NetworkConfig
from apexrl.errors import ConfigError
from apexrl.networks.screens import SMALLEST_SCREEN, blocks, channels, in_blocks, kernel_over_blocks, stacked_blocks
from apexrl.types import StreamSpec


def make_network(spec: StreamSpec, config: NetworkConfig) -> "DuelingNetwork":
    """Returns the dueling network for the observations of a spec.

    Raises: ConfigError when the shape of the frames is not supported.
    """
    shape = spec.frame_shape
    if len(shape) <= 1:
        return DuelingNetwork(_Perceptron(spec, config.hidden_size), config.hidden_size, spec.num_actions)
    if len(shape) > 3:
        raise ConfigError(f"{spec.env} has observations {shape}: only vectors and pictures are supported")
    big = min(shape[:2]) >= SMALLEST_SCREEN
    torso = (_ScreenTorso if big else _SmallPictureTorso)(spec, config.channels)
    return DuelingNetwork(torso, config.hidden_size, spec.num_actions)


class Torso(nn.Module):
    """Observations into features.

    What comes before the weights is apart, so that two networks may share it, and so is the first layer's kernel, so
    that actors need not compute it for each observation.
    """

    num_features: int
    in_blocks = False  # takes `blocks` of the frames

    def prepare(self, observations: Tensor) -> Tensor:
        """Returns observations [B, H, *frame] in the layout and type that the first layer takes.

        Screens may come in blocks too, as the frame store keeps them: [B, H, h/4, w/4, 16].
        """
        raise NotImplementedError

    def kernel(self) -> Tensor:
        """Returns the first layer's weights as `features` takes them."""
        raise NotImplementedError

    def features(self, prepared: Tensor, kernel: Tensor) -> Tensor:
        """Returns [B, num_features]."""
        raise NotImplementedError

    def forward(self, prepared: Tensor) -> Tensor:
        """Returns [B, num_features]."""
        return self.features(prepared, self.kernel())


class DuelingNetwork(nn.Module):
    """Q = V + A - mean(A), each from a hidden layer of its own; the two layers are computed as one.

    Source: arXiv:1511.06581.
    """

    def __init__(self, torso: "Torso", hidden_size: int, num_actions: int):
        super().__init__()
        self.torso = torso
        self.hidden = nn.Linear(torso.num_features, 2 * hidden_size)
        self.value = nn.Linear(hidden_size, 1)
        self.advantage = nn.Linear(hidden_size, num_actions)

    def prepare(self, observations: Tensor) -> Tensor:
        """Returns observations [B, H, *frame] in the layout and type that the first layer takes, for `values`."""
        return self.torso.prepare(observations)

    def forward(self, observations: Tensor) -> Tensor:
        """Returns [B, A] action values of observations [B, H, *frame]."""
        return self.values(self.prepare(observations))

    def values(self, prepared: Tensor) -> Tensor:
        """Returns [B, A] action values of prepared observations; two networks may share these."""
        return self.heads(self.torso(prepared))

    def heads(self, features: Tensor) -> Tensor:
        """Returns [B, A] action values of the torso's features."""
        features = F.relu(self.hidden(features))
        # In bfloat16 values near 1 differ by steps of 0.008, as much as the actions of Pong: the last layer is float32.
        with torch.autocast(features.device.type, enabled=False):
            value, advantage = features.float().chunk(2, dim=1)
            advantage = self.advantage(advantage)
            return self.value(value) + advantage - advantage.mean(dim=1, keepdim=True)


class _Perceptron(Torso):
    """Two layers for observations that are vectors; one stacked vector after the other."""

    def __init__(self, spec: StreamSpec, hidden_size: int):
        super().__init__()
        self.first = nn.Linear(spec.stacked_frames * spec.frame_size, hidden_size)
        self.second = nn.Linear(hidden_size, hidden_size)
        self.num_features = hidden_size

    def prepare(self, observations: Tensor) -> Tensor:
        return observations.flatten(1).to(self.first.weight.dtype)

    def kernel(self) -> Tensor:
        return self.first.weight

    def features(self, prepared: Tensor, kernel: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(F.linear(prepared, kernel, self.first.bias))))


class _ScreenTorso(Torso):
    """The three convolutions of DQN over stacked screens.

    A uint8 screen is not divided by 255: the first layer's weights are, which is the same and keeps the pixels exact
    in bfloat16. Source: Nature 518, 529 (2015).
    """

    def __init__(self, spec: StreamSpec, channels: tuple[int, int, int]):
        super().__init__()
        height, width = spec.frame_shape[:2]
        self.conv1 = nn.Conv2d(_input_channels(spec), channels[0], 8, 4)
        self.conv2 = nn.Conv2d(channels[0], channels[1], 4, 2)
        self.conv3 = nn.Conv2d(channels[1], channels[2], 3, 1)
        self._scale = _input_scale(spec)
        self.in_blocks = in_blocks(spec)
        self.num_features = channels[2] * math.prod(_after_convolutions(size) for size in (height, width))

    def prepare(self, observations: Tensor) -> Tensor:
        dtype = _compute_dtype(self.conv1.weight)
        if not self.in_blocks:
            return _as_channels(observations).to(dtype)
        if observations.dim() == 4:
            observations = blocks(observations.flatten(0, 1)).unflatten(0, observations.shape[:2])
        return channels(stacked_blocks(observations).to(dtype))

    def kernel(self) -> Tensor:
        weight = self.conv1.weight * self._scale
        return kernel_over_blocks(weight) if self.in_blocks else weight

    def features(self, prepared: Tensor, kernel: Tensor) -> Tensor:
        x = F.conv2d(prepared, kernel, self.conv1.bias, stride=1 if self.in_blocks else 4)
        return F.relu(self.conv3(F.relu(self.conv2(F.relu(x))))).flatten(1)


class _SmallPictureTorso(Torso):
    """Two 3x3 convolutions that keep the size, for pictures too small for DQN's."""

    def __init__(self, spec: StreamSpec, channels: tuple[int, int, int]):
        super().__init__()
        self.conv1 = nn.Conv2d(_input_channels(spec), channels[0], 3, padding=1)
        self.conv2 = nn.Conv2d(channels[0], channels[1], 3, padding=1)
        self._scale = _input_scale(spec)
        self.num_features = channels[1] * math.prod(spec.frame_shape[:2])

    def prepare(self, observations: Tensor) -> Tensor:
        return _as_channels(observations).to(_compute_dtype(self.conv1.weight))

    def kernel(self) -> Tensor:
        return self.conv1.weight * self._scale

    def features(self, prepared: Tensor, kernel: Tensor) -> Tensor:
        x = F.relu(F.conv2d(prepared, kernel, self.conv1.bias, padding=1))
        return F.relu(self.conv2(x)).flatten(1)


def _input_channels(spec: StreamSpec) -> int:
    colours = spec.frame_shape[2] if len(spec.frame_shape) == 3 else 1
    return spec.stacked_frames * colours


def _input_scale(spec: StreamSpec) -> float:
    return 1 / 255 if spec.frame_dtype == "uint8" else 1.0


def _as_channels(observations: Tensor) -> Tensor:
    """[B, H, height, width] stays; of [B, H, height, width, colour] the colours become channels."""
    if observations.dim() == 5:
        return observations.permute(0, 1, 4, 2, 3).flatten(1, 2)
    return observations


def _compute_dtype(weight: Tensor) -> torch.dtype:
    """The type that the layer of a weight computes in: autocast's where it is on."""
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


def _after_convolutions(size: int) -> int:
    return (((size - 8) // 4 + 1) - 4) // 2 + 1 - 2
