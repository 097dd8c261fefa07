"""Critics: the values of actions that are vectors."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from apexrl.networks.action_range import RangedModule
from apexrl.networks.config import CriticNorm, VectorConfig
from apexrl.networks.frame_layout import FrameLayout
from apexrl.networks.hidden_linear import HiddenLinear
from apexrl.networks.torsos import make_torso
from apexrl.types import EnvironmentSpec

BATCH_SHARE = 0.01  # of a batch in the running statistics of batch normalization (CrossQ: 1 - 0.99)
NORMS: dict[CriticNorm, Callable[[int], nn.Module]] = {
    "none": lambda size: nn.Identity(),
    "layer": nn.LayerNorm,
    "batch": lambda size: nn.BatchNorm1d(size, momentum=BATCH_SHARE),
}


class Critics(nn.Module):
    """One value of each action, or more of them by networks of their own.

    Of a distribution of returns over the atoms [N] of a `support` the value is the mean. Batch normalization takes its
    running statistics, but in `joint`, which learns them.
    """

    support: Tensor | None

    def __init__(self, spec: EnvironmentSpec, config: VectorConfig, norm: CriticNorm, support: Tensor | None = None):
        super().__init__()
        num_outputs = 1 if support is None else len(support)
        self.each = nn.ModuleList(Critic(spec, config, norm, num_outputs) for _ in range(config.critics))
        self.register_buffer("support", support, persistent=False)
        self.eval()

    def forward(self, observations: Tensor, actions: Tensor) -> Tensor:
        """Returns the values [C, B] of actions [B, size] at stacks [B, H, *stored]."""
        return self.values_of(self.outputs(observations, actions))

    def outputs(self, observations: Tensor, actions: Tensor) -> Tensor:
        """Returns [C, B, 1], or the logits of atoms [C, B, N], as `forward` takes its arguments."""
        return torch.stack([critic(observations, actions) for critic in self.each])

    def values_of(self, outputs: Tensor) -> Tensor:
        """Returns the values [...] of outputs [..., N]."""
        return outputs.squeeze(-1) if self.support is None else self.mean_of(outputs.softmax(dim=-1))

    def mean_of(self, probabilities: Tensor) -> Tensor:
        """Returns the means [...] of distributions [..., N] over the atoms, in float32 where autocast is on."""
        assert self.support is not None
        return (probabilities * self.support).sum(dim=-1)

    def least_of(self, outputs: Tensor) -> Tensor:
        """Returns the least values [B] of outputs [C, B, N]; with atoms the probabilities [B, N] that have them."""
        least = self.values_of(outputs).min(dim=0)
        if self.support is None:
            return least.values
        index = least.indices[None, :, None].expand(1, -1, outputs.shape[2])
        return outputs.softmax(dim=2).gather(0, index).squeeze(0)

    def joint(self, steps: tuple[Tensor, Tensor], next_steps: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Returns the values [C, B] of stacks and actions, and of the next ones, normalized as one batch of 2 B.

        Source: CrossQ (arXiv:1902.05605).
        """
        self.train()
        values, next_values = self(*map(torch.cat, zip(steps, next_steps, strict=True))).chunk(2, dim=1)
        self.eval()
        return values, next_values


class Critic(RangedModule):
    """The value of an action, which joins the observation where it is a vector, or else the features of a torso."""

    def __init__(self, spec: EnvironmentSpec, config: VectorConfig, norm: CriticNorm, num_outputs: int):
        super().__init__()
        self.layout, size = FrameLayout.of(spec), config.hidden_size
        has_torso, num_numbers = len(spec.frame_shape) > 1 or config.network, spec.stacked_frames * spec.frame_size
        self.torso = make_torso(spec, config.channels, size, own=config) if has_torso else None
        num_features = num_numbers if self.torso is None else self.torso.num_features
        self.take_range(spec)
        num_inputs = num_features + len(spec.action_bounds)
        layers: list[nn.Module] = [NORMS[norm](num_inputs)] if norm == "batch" else []
        for layer in (nn.Linear(num_inputs, size), HiddenLinear(size, size)):
            normed = [NORMS[norm](size), nn.ReLU()]  # CrossQ normalizes what the next layer takes
            layers += [layer, *(reversed(normed) if norm == "batch" else normed)]
        self.layers = nn.Sequential(*layers, nn.Linear(size, num_outputs))

    def forward(self, observations: Tensor, actions: Tensor) -> Tensor:
        """Returns the outputs [B, N] for actions [B, size] at stacks [B, H, *stored]."""
        features = self.layout.prepare(observations, torch.float32)
        if self.torso is not None:
            features = self.torso.features(features, self.torso.kernel())
        scaled = (actions - self.center) / self.reach  # its layers see -1 to 1
        with torch.autocast(features.device.type, enabled=False):
            outputs: Tensor = self.layers(torch.cat([features.float(), scaled], dim=1))
        return outputs
