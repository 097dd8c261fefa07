"""The range of actions that are vectors, as the networks of policies and critics compute with it."""

import torch
from torch import Tensor, nn

from apexrl.bounds import range_of
from apexrl.types import EnvironmentSpec


class RangedModule(nn.Module):
    """A network that knows the range of actions: they are center + reach * x, where x is -1 to 1."""

    center: Tensor
    reach: Tensor

    def take_range(self, spec: EnvironmentSpec) -> None:
        """Takes the range of a spec's actions as buffers, which are not among the parameters."""
        for name, numbers in zip(("center", "reach"), range_of(spec.action_bounds), strict=True):
            self.register_buffer(name, torch.tensor(numbers), persistent=False)
