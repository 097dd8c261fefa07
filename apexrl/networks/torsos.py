"""Torsos, the first part of every network: from stacks of frames to features. The frames' shape decides which.

A torso gives its first layer's weights apart from its features, so that an actor computes them once for many calls.
"""

import abc
import math
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apexrl.config.sections import NetworkConfig
from apexrl.errors import ConfigError
from apexrl.networks.config import Activation, TorsoKind
from apexrl.networks.frame_layout import SMALLEST_SCREEN, FrameLayout
from apexrl.networks.hidden_linear import HiddenLinear
from apexrl.networks.normalizer import Normalizer
from apexrl.networks.own_torso import OwnTorso
from apexrl.types import FORBIDDEN, EnvironmentSpec

LARGEST_LAYER = 65_536  # channels or units
ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {"relu": F.relu, "tanh": torch.tanh}


def check_sizes(config: NetworkConfig, *sizes: int) -> None:
    """Compares the sizes of a network's layers with those that make sense, before any layer takes memory.

    Raises: ConfigError when a size is below 1 or above LARGEST_LAYER.
    """
    if not all(1 <= size <= LARGEST_LAYER for size in sizes):
        raise ConfigError(f"a network of {config} makes no sense: sizes are 1 to {LARGEST_LAYER}")


class Torso(Protocol):
    """A module from prepared stacks of frames (`FrameLayout.prepare`) to features."""

    layout: FrameLayout
    num_features: int

    def kernel(self) -> Tensor:
        """Returns the first layer's weights as `features` takes them."""
        ...

    def features(self, prepared: Tensor, kernel: Tensor) -> Tensor:
        """Returns [B, num_features] of a prepared input."""
        ...

    def to(self, dtype: torch.dtype) -> object:
        """Converts the parameters to a type in which to compute."""
        ...


def make_torso(
    spec: EnvironmentSpec,
    conv_channels: tuple[int, int, int],
    hidden_size: int,
    kind: TorsoKind = "shallow",
    own: NetworkConfig | None = None,
    activation: Activation = "relu",
) -> Torso:
    """Returns the torso for the frames of a spec: convolutions for pictures, a perceptron for vectors.

    Args:
      kind: which convolutions look at screens; pictures too small for them have one torso of their own.
      own: the network's configuration; the user's module, where it names one, takes the place of all others.
      activation: a perceptron's; convolutions have rectifiers.
    Raises: ConfigError when the shape of the frames is not supported, or the user's module does not work.
    """
    if own is not None and own.network:
        return OwnTorso(spec, own)
    shape = spec.frame_shape
    if len(shape) <= 1:
        return Perceptron(spec, hidden_size, activation)
    if len(shape) > 3:
        raise ConfigError(
            f"{spec.env} has observations {shape}, which are neither vectors nor pictures: give a --network of your "
            "own, or --wrapper gymnasium.wrappers:FlattenObservation"
        )
    if min(shape[:2]) >= SMALLEST_SCREEN:
        return ResidualTorso(spec, conv_channels) if kind == "deep" else NatureTorso(spec, conv_channels)
    return SmallTorso(spec, conv_channels)


class NatureTorso(nn.Module):
    """The three convolutions of DQN over stacked screens.

    A uint8 screen is not divided by 255: the first layer's weights are, which is the same and keeps the pixels exact
    in bfloat16. Source: Nature 518, 529 (2015).
    """

    def __init__(self, spec: EnvironmentSpec, conv_channels: tuple[int, int, int]):
        super().__init__()
        self.layout = FrameLayout.of(spec)
        self.conv1 = nn.Conv2d(_input_channels(spec), conv_channels[0], 8, 4)
        self.conv2 = nn.Conv2d(conv_channels[0], conv_channels[1], 4, 2)
        self.conv3 = nn.Conv2d(conv_channels[1], conv_channels[2], 3, 1)
        self._scale = _input_scale(spec)
        self.num_features = conv_channels[2] * math.prod(_after_convolutions(size) for size in spec.frame_shape[:2])

    def kernel(self) -> Tensor:
        """Returns the first layer's weights as `features` takes them."""
        return self.layout.kernel(self.conv1.weight * self._scale)

    def features(self, prepared: Tensor, kernel: Tensor) -> Tensor:
        """Returns [B, num_features] of prepared stacks."""
        x = F.relu(F.conv2d(prepared, kernel, self.conv1.bias, stride=self.layout.stride))
        return F.relu(self.conv3(F.relu(self.conv2(x)))).flatten(1)


class ResidualTorso(nn.Module):
    """The deep residual network of IMPALA over stacked screens: three sections, each of half the height and width.

    The fully connected layer after it belongs to the network. Source: arXiv:1802.01561, figure 3, right.
    """

    def __init__(self, spec: EnvironmentSpec, channels: tuple[int, int, int]):
        super().__init__()
        self.layout = FrameLayout.of(spec)
        self.first = _Section(_input_channels(spec), channels[0])
        self.others = nn.Sequential(_Section(channels[0], channels[1]), _Section(channels[1], channels[2]))
        self._scale = _input_scale(spec)
        self.num_features = channels[2] * math.prod(-(-size // 8) for size in spec.frame_shape[:2])

    def kernel(self) -> Tensor:
        """Returns the first layer's weights as `features` takes them."""
        return self.first.conv.weight * self._scale

    def features(self, prepared: Tensor, kernel: Tensor) -> Tensor:
        """Returns [B, num_features] of prepared stacks."""
        x = F.conv2d(self.layout.pixels(prepared), kernel, self.first.conv.bias, padding=1)
        return F.relu(self.others(self.first.after_conv(x))).flatten(1)


class _Section(nn.Module):
    """A convolution, a maximum over 3x3 pixels with stride 2, and two residual blocks."""

    def __init__(self, channels_in: int, channels: int):
        super().__init__()
        self.conv = nn.Conv2d(channels_in, channels, 3, padding=1)
        self.blocks = nn.Sequential(_ResidualBlock(channels), _ResidualBlock(channels))

    def forward(self, x: Tensor) -> Tensor:
        return self.after_conv(self.conv(x))

    def after_conv(self, x: Tensor) -> Tensor:
        """Returns the result of the layers after the convolution."""
        halved: Tensor = self.blocks(F.max_pool2d(x, 3, stride=2, padding=1))
        return halved


class _ResidualBlock(nn.Module):
    """Two convolutions that keep the size, each after a rectifier; their result is added to their input."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(F.relu(self.conv1(F.relu(x))))


class SmallTorso(nn.Module):
    """Two 3x3 convolutions that keep the size, for pictures too small for those of DQN."""

    def __init__(self, spec: EnvironmentSpec, conv_channels: tuple[int, int, int]):
        super().__init__()
        self.layout = FrameLayout.of(spec)
        self.conv1 = nn.Conv2d(_input_channels(spec), conv_channels[0], 3, padding=1)
        self.conv2 = nn.Conv2d(conv_channels[0], conv_channels[1], 3, padding=1)
        self._scale = _input_scale(spec)
        self.num_features = conv_channels[1] * math.prod(spec.frame_shape[:2])

    def kernel(self) -> Tensor:
        """Returns the first layer's weights as `features` takes them."""
        return self.conv1.weight * self._scale

    def features(self, prepared: Tensor, kernel: Tensor) -> Tensor:
        """Returns [B, num_features] of prepared stacks."""
        x = F.relu(F.conv2d(prepared, kernel, self.conv1.bias, padding=1))
        return F.relu(self.conv2(x)).flatten(1)


class Perceptron(nn.Module):
    """Two layers for frames that are vectors; a stack is one vector after the other."""

    def __init__(self, spec: EnvironmentSpec, hidden_size: int, activation: Activation = "relu"):
        super().__init__()
        self.layout = FrameLayout.of(spec)
        self.activation = ACTIVATIONS[activation]
        self.first = nn.Linear(spec.stacked_frames * spec.frame_size, hidden_size)
        self.second = HiddenLinear(hidden_size, hidden_size)
        self.num_features = hidden_size

    def kernel(self) -> Tensor:
        """Returns the first layer's weights as `features` takes them."""
        return self.first.weight

    def features(self, prepared: Tensor, kernel: Tensor) -> Tensor:
        """Returns [B, num_features] of prepared stacks."""
        hidden = self.activation(F.linear(prepared, kernel, self.first.bias))
        return self.activation(self.second(hidden))


class FrameNetwork(nn.Module, abc.ABC):
    """A network over stacks of frames: a torso, and heads of its own. Learners train it, and a `Policy` runs it."""

    memory_size = 0
    """Numbers of each environment that `step` takes from earlier steps. 0: the frames are all that it needs."""

    def __init__(self, torso: Torso):
        super().__init__()
        self.torso = torso
        self.normalizer: Normalizer | None = None  # an actor's, where its parameters have one

    def forward(self, stacks: Tensor) -> Tensor:
        """Returns the values [B, ..] of stacks [B, H, *stored]: see `FrameLayout`."""
        return self.values(self.prepare(stacks))

    def prepare(self, stacks: Tensor) -> Tensor:
        """Returns stacks [B, H, *stored] as the first layer takes them; two networks may share the result."""
        first = next(self.parameters())  # the torso's
        return self.normalized(self.torso.layout.prepare(stacks, _compute_dtype(first)))

    def normalized(self, prepared: Tensor) -> Tensor:
        """Returns prepared stacks in the measure of the run, where the network has it."""
        return prepared if self.normalizer is None else self.normalizer.prepared(prepared)

    def values(self, prepared: Tensor, memory: Tensor | None = None, kernel: Tensor | None = None) -> Tensor:
        """Returns the values [B, ..] of prepared stacks.

        Args:
          memory: as `step` takes it; without, those of an episode's first step.
          kernel: the first layer's, as the frames lie; by default that for stacks whose oldest frame is the first.
        """
        features = self.torso.features(prepared, self.torso.kernel() if kernel is None else kernel)
        return self.masked(self.heads(features) if memory is None else self.step(features, memory), prepared)

    def masked(self, values: Tensor, frames: Tensor) -> Tensor:
        """Returns values [.., X], of which the first A are FORBIDDEN where the mask of the actions has 0.

        The greatest value, a softmax and its entropy keep to the mask by this alone. One that allows nothing, as there
        may be after the end of an episode, forbids nothing.

        Args:
          frames: [.., numbers] that end in those of the newest frame, as prepared stacks do.
        """
        size = self.torso.layout.mask_size
        if not size:
            return values
        mask, of_actions = frames[..., -size:], values[..., :size]
        of_actions = of_actions.masked_fill(mask < mask.amax(dim=-1, keepdim=True), FORBIDDEN)
        return torch.cat([of_actions, values[..., size:]], dim=-1)

    @abc.abstractmethod
    def heads(self, features: Tensor) -> Tensor:
        """Returns the values [B, ..] float32 of the torso's features."""

    def step(self, features: Tensor, memory: Tensor) -> Tensor:
        """Returns the values [B, ..] float32 of features, for a memory [B, memory_size] float32 of earlier steps."""
        raise NotImplementedError(f"{type(self).__name__} has no memory")

    def compute_in(self, dtype: torch.dtype) -> None:
        """Converts all layers but those whose results need float32. A network without it acts in float32."""
        raise NotImplementedError(f"{type(self).__name__} computes in float32")

    @property
    def has_fast_layers(self) -> bool:
        """Whether `compute_in` converts some."""
        return type(self).compute_in is not FrameNetwork.compute_in


def _input_channels(spec: EnvironmentSpec) -> int:
    colours = spec.frame_shape[2] if len(spec.frame_shape) == 3 else 1
    return spec.stacked_frames * colours


def _input_scale(spec: EnvironmentSpec) -> float:
    return 1 / 255 if spec.frame_dtype == "uint8" else 1.0


def _compute_dtype(weight: Tensor) -> torch.dtype:
    """Returns the type that the layer of a weight computes in: autocast's where it is on."""
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


def _after_convolutions(size: int) -> int:
    return (((size - 8) // 4 + 1) - 4) // 2 + 1 - 2
