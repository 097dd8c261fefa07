"""The gradients of layers' weights, computed by a second thread while the backward pass goes on. For CPUs.

A backward pass computes two gradients of a layer: that of its input, which the layers before it wait for, and that of
its weights, which only the optimizer waits for. The second thread takes those of weights, in the order in which they
come up. The first thread computes those that are left once its pass has ended: neither waits while there is work.
"""

from collections import Counter
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from apexrl.agents.contract import Spawn
from apexrl.networks.hidden_linear import HiddenLinear
from apexrl.networks.lstm import EpisodicLSTM
from apexrl.networks.own_torso import OwnTorso

PLAIN = (nn.Conv2d.forward, nn.Linear.forward, HiddenLinear.forward)  # computations whose gradients are known here
LEAST_WEIGHTS = 65_536  # of a fully connected layer: that of a smaller one takes less time than to hand it over


class WeightGradients:
    """Differentiates by the parameters of a network's large layers, apart from autograd.

    They require no gradient of autograd any more: a hook sees the gradient of a layer's output. So each pass computes
    with such a layer once, by calling it.
    """

    def __init__(self, network: nn.Module, places: Mapping[nn.Parameter, Tensor], spawn: Spawn):
        """Takes the layers but the first, whose weights a torso scales and turns before it computes with them.

        Those of an LSTM are left to autograd, too: it is called once a step; and so is a module of the user's, a layer
        with a parameter that its author froze or that another one has, too, one that computes with its weights in a way
        of its own, and one behind nothing but frozen layers.

        Args:
          places: where the gradient of each parameter of the network belongs.
        """
        self._places, self._spawn = places, spawn
        torso, parts = getattr(network, "torso", network), set(network.modules())
        parts -= {part for other in parts if isinstance(other, EpisodicLSTM | OwnTorso) for part in other.modules()}
        uses = Counter(parameter for _, parameter in network.named_parameters(remove_duplicate=False))
        left = {next(torso.parameters(), None), *(parameter for parameter, count in uses.items() if count > 1)}
        self._layers = {part for part in parts if _is_taken(part) and left.isdisjoint(part.parameters())}
        self._pending: dict[nn.Module, Callable[[], None]] = {}  # in the order of the backward pass: what ends each
        for layer in self._layers:
            layer.requires_grad_(False)
            layer.register_forward_hook(self._watch)

    def wait_all(self) -> None:
        """Puts all gradients into their places, after the backward pass.

        Raises: TimeoutError when the second thread does not get there in time; whatever a gradient raised.
        """
        pending, self._pending = self._pending, {}
        if pending.keys() != self._layers:
            raise RuntimeError("a large layer of the network was not called: leave its part out of `called_once`")
        for end in reversed(pending.values()):
            end()

    def _watch(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if layer not in self._layers or not torch.is_grad_enabled():
            return output
        if not output.requires_grad:  # all before it is frozen, so no backward pass would come by: it is autograd's
            self._layers.remove(layer)
            layer.requires_grad_(True)
            again: Tensor = layer.forward(*inputs)
            return again
        x = inputs[0].detach()
        output.register_hook(lambda gradient: self._differentiate(layer, x, gradient))
        return output

    def _differentiate(self, layer: nn.Module, x: Tensor, gradient: Tensor) -> None:
        def compute() -> None:
            found = _gradients_of(layer, x.to(gradient.dtype), gradient)
            for parameter, numbers in zip(layer.parameters(), found, strict=True):
                self._places[parameter].copy_(numbers)

        if layer in self._pending:
            raise RuntimeError("a large layer of the network was called twice: leave its part out of `called_once`")
        self._pending[layer] = self._spawn(compute)


def _is_taken(layer: nn.Module) -> bool:
    parameters = dict(layer.named_parameters())
    is_plain = type(layer).forward in PLAIN and parameters.keys() <= {"weight", "bias"}
    if not is_plain or not all(parameter.requires_grad for parameter in parameters.values()):
        return False
    if isinstance(layer, nn.Conv2d):
        return layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    return isinstance(layer, nn.Linear) and layer.weight.numel() >= LEAST_WEIGHTS


@torch.no_grad()
def _gradients_of(layer: nn.Module, x: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
    """Returns the gradients of a layer's parameters, in their order, by those of its output for the input x."""
    if isinstance(layer, nn.Linear):
        gradient, x = gradient.flatten(0, -2), x.flatten(0, -2)
        weight, bias = gradient.t() @ x, gradient.sum(dim=0)
    else:
        assert isinstance(layer, nn.Conv2d)
        size = None if layer.bias is None else list(layer.bias.shape)
        how = layer.stride, layer.padding, layer.dilation, False, (0, 0), layer.groups
        wanted = (False, True, layer.bias is not None)
        _, weight, bias = torch.ops.aten.convolution_backward(
            gradient, x, layer.weight.to(gradient.dtype), size, *how, wanted
        )
    return (weight,) if layer.bias is None else (weight, bias)
