"""A fully connected layer whose products a CPU may compute in bfloat16, from parameters in float32."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from apexrl.networks.device import cpu_has_bfloat16

LEAST_SIZE = 128  # of a side: smaller products cost less than what is cast


class HiddenLinear(nn.Linear):
    """A layer between hidden ones: it computes in float32 until `compute_fast`.

    What observations and actions go into, and what values come out of, needs the precision of float32; the layers
    between have most of the work. Policies that act compute in float32.
    """

    is_fast = False

    def compute_fast(self) -> None:
        """Has products computed in bfloat16 from now on, where the layer is large enough and the CPU can."""
        self.is_fast = min(self.weight.shape) >= LEAST_SIZE and cpu_has_bfloat16()

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns [..., out] float32 for inputs [..., in]."""
        if not self.is_fast:
            return super().forward(inputs)
        numbers = (inputs, self.weight, self.bias)
        return F.linear(*(tensor.to(torch.bfloat16) for tensor in numbers)).float()
