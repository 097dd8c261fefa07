"""A copy of a network with its large layers in the type that autocast computes in, for updates on a GPU.

Autocast casts each weight where it is used, and its gradient back: each is a kernel to be started. Here one operation
casts all weights, and one all gradients. The numbers are the same to the bit.
"""

import copy
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from apexrl.networks.torsos import FrameNetwork

N = TypeVar("N", bound=FrameNetwork)


class CastCopy(Generic[N]):
    """A network to compute with: a copy that shares all float32 parameters with the network that is trained.

    The first layer's weight is shared, too: a torso scales it before it is cast.
    """

    def __init__(self, network: N, dtype: torch.dtype | None):
        """Makes the copy of a network whose parameters stay where they are; `network` itself without a type."""
        self.network = network if dtype is None else copy.deepcopy(network)
        self.parameters: list[nn.Parameter] = list(self.network.parameters())
        self._cast: list[Tensor] = []
        self._exact: list[Tensor] = []
        if dtype is None:
            return
        self.network.compute_in(dtype)
        for index, (own, exact) in enumerate(zip(self.parameters, network.parameters(), strict=True)):
            if index == 0 or own.dtype == exact.dtype:
                own.data = exact.data
            else:
                self._cast.append(own)
                self._exact.append(exact)

    @torch.no_grad()
    def cast(self) -> None:
        """Takes the network's parameters as they are now."""
        if self._cast:
            torch._foreach_copy_(self._cast, self._exact)
