"""Copies of networks with their large layers in the type that autocast computes in, for updates on a GPU.

Autocast casts each weight where it is used, and its gradient back: each is a kernel to be started. Here one operation
casts all weights, and one all gradients. The numbers are the same to the bit.
"""

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from apexrl.networks.torsos import FrameNetwork


class CastCopies:
    """Networks by part to compute with: copies that share float32 parameters and buffers with those that are trained.

    The first layer's weight is shared, too: a torso scales it before it is cast. A network that does not say what may
    be converted is its own copy: autocast casts its layers.
    """

    def __init__(self, networks: Mapping[str, nn.Module], dtype: torch.dtype | None):
        """Makes the copies of networks whose parameters stay where they are; the networks themselves without a type."""
        self.networks: dict[str, nn.Module] = {}
        self._cast: list[Tensor] = []
        self._exact: list[Tensor] = []
        for name, network in networks.items():
            self.networks[name] = network
            if dtype is not None and isinstance(network, FrameNetwork) and network.has_fast_layers:
                self.networks[name] = self._converted(network, dtype)
        self.parameters = {name: list(network.parameters()) for name, network in self.networks.items()}

    @torch.no_grad()
    def cast(self) -> dict[str, nn.Module]:
        """Takes the parameters as they are now; returns the networks."""
        if self._cast:
            torch._foreach_copy_(self._cast, self._exact)
        return self.networks

    def _converted(self, network: FrameNetwork, dtype: torch.dtype) -> FrameNetwork:
        copied = copy.deepcopy(network)
        copied.compute_in(dtype)
        for index, (own, exact) in enumerate(zip(copied.parameters(), network.parameters(), strict=True)):
            if index == 0 or own.dtype == exact.dtype:
                own.data = exact.data
            else:
                self._cast.append(own)
                self._exact.append(exact)
        for name, buffer in network.named_buffers(remove_duplicate=False):
            layer, _, own_name = name.rpartition(".")
            setattr(copied.get_submodule(layer), own_name, buffer)
        return copied
