"""The price of entropy, where it is learned."""

import math

import torch
from torch import Tensor, nn


class Temperature(nn.Module):
    """A price above 0, by its logarithm."""

    def __init__(self, first: float):
        super().__init__()
        self.logarithm = nn.Parameter(torch.tensor(math.log(first)))

    @property
    def price(self) -> Tensor:
        """The price, without gradient."""
        return self.logarithm.detach().exp()
