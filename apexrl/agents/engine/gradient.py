"""The parameters of networks in one buffer a part, and the gradients of all parts in one.

Several learners add their gradients up as one tensor, and an optimizer moves all parameters of a part as one.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from apexrl.agents.contract import Spawn
from apexrl.agents.engine.plain import Slope
from apexrl.agents.engine.weight_gradients import WeightGradients
from apexrl.errors import ApexError

LINE = 16  # numbers: every parameter begins at a multiple, where a processor's and a GPU's vectors begin
LEAST_COUNT = 1e-9  # a batch of which nothing counts has a gradient of zeros


class Gradient:
    """The gradients of summed losses, of all parts of an algorithm's networks.

    `buffer` is [P + 1] float32: P gradients, one part after the other, and the number that divides them where a loss is
    a mean. So the buffers of the parts of a batch add up to that of the batch, whatever the sizes of the parts are.
    """

    def __init__(self, parts: Mapping[str, nn.Module], is_mean: bool):
        """Makes the buffers beside the parameters; later the networks may not be moved or converted.

        Args:
          is_mean: whether the loss is a mean, or a sum.
        """
        sizes = [sum(map(_room_of, part.parameters())) for part in parts.values()]
        like = next(parameter for part in parts.values() for parameter in part.parameters())
        self.buffer = like.new_zeros(sum(sizes) + 1).detach()
        self._count = self.buffer[-1]
        pieces = zip(parts.items(), self.buffer[:-1].split(sizes), strict=True)
        self.parts = {
            name: PartGradient(part, piece, self._count if is_mean else None) for (name, part), piece in pieces
        }

    def compute(
        self,
        losses: Mapping[str, Tensor | Slope],
        count: Tensor | float | None,
        by: Mapping[str, Sequence[Tensor]] | None = None,
        names: Collection[str] | None = None,
    ) -> None:
        """Puts the gradients of summed losses into the buffer, and the number of terms that a mean divides them by.

        Two threads may do so at a time for different parts.

        Args:
          losses: of each part; of parts that share one, the same tensor.
          count: the number of terms; None: it stays.
          by: the parameters of the copies that were computed with, by part, in the networks' order; those of the
            networks where None.
          names: the parts whose losses they are; None: all.
        Raises: ApexError when they are not the losses of these parts.
        """
        due = sorted(self.parts if names is None else names)
        if sorted(losses) != due:
            raise ApexError(f"`losses` gives losses of the parts {sorted(losses)}; `parts` are {due}")
        for name, loss in losses.items():
            _check(name, loss)
        if isinstance(count, Tensor) and count.ndim:
            raise ApexError(f"`losses` gives num_terms of the shape {list(count.shape)}: give one number")
        together: dict[tuple[int, int], list[str]] = {}
        for name, loss in losses.items():
            outputs, slope = _outputs_of(loss)
            together.setdefault((id(outputs), id(slope)), []).append(name)
        for number, sharing in enumerate(together.values(), start=1):
            outputs, slope = _outputs_of(losses[sharing[0]])
            places = [place for name in sharing for place in self.parts[name].places(None if by is None else by[name])]
            parameters = [parameter for parameter, _ in places]
            keeps = number < len(together)
            found = torch.autograd.grad(outputs, parameters, slope, retain_graph=keeps, materialize_grads=True)
            for name in sharing:
                self.parts[name].wait_all()
            _copy([view for _, view in places], found)
        if count is not None:
            self._count.fill_(count)


class PartGradient:
    """The gradients of one part, a piece [P] of the buffer.

    `parameters` is [P]: the network's own, which move into it. Each of them, and its `grad`, is a view. Zeros between
    them stay zeros.
    """

    def __init__(self, network: nn.Module, gradients: Tensor, count: Tensor | None):
        """Takes the piece of the buffer, and the scalar that divides it; None where nothing does."""
        own = list(network.parameters())
        self._own, self._gradients, self._count = own, gradients, count
        self._side_weights: WeightGradients | None = None
        self._starts = [0]
        for parameter in own:
            self._starts.append(self._starts[-1] + _room_of(parameter))
        self.parameters = nn.Parameter(torch.zeros_like(gradients))
        self.parameters.grad = gradients
        self._views = self.split(gradients)
        for parameter, place, view in zip(own, self.split(self.parameters.detach()), self._views, strict=True):
            parameter.data = place.copy_(parameter.detach())
            parameter.grad = view

    def split(self, numbers: Tensor) -> list[Tensor]:
        """Returns the parts of numbers [P] that belong to each parameter, in its shape; views of them."""
        starts = zip(self._own, self._starts, strict=False)
        return [numbers.as_strided(p.shape, p.stride(), numbers.storage_offset() + start) for p, start in starts]

    def use_thread(self, spawn: Spawn, network: nn.Module) -> None:
        """Lets a second thread compute the gradients of large layers' weights from now on. For CPUs.

        Args:
          network: the one whose parameters these are, or the copy of it that is computed with.
        """
        self._side_weights = WeightGradients(network, dict(zip(network.parameters(), self._views, strict=True)), spawn)

    def places(self, by: Sequence[Tensor] | None) -> list[tuple[Tensor, Tensor]]:
        """Returns the parameters that autograd differentiates by, those of a copy where given, and their gradients."""
        return [place for place in zip(by or self._own, self._views, strict=True) if place[0].requires_grad]

    def clear(self) -> None:
        """Makes them zeros."""
        self._gradients.zero_()

    def wait_all(self) -> None:
        """Waits for the gradients that the second thread computes."""
        if self._side_weights is not None:
            self._side_weights.wait_all()

    @torch.no_grad()
    def clipping(self, max_norm: float) -> tuple[Tensor, Tensor]:
        """Returns the gradient's norm, and the number that it is to be divided by: so its norm is at most that."""
        norm = torch.linalg.vector_norm(self._gradients)
        count = 1.0 if self._count is None else self._count.clamp(min=LEAST_COUNT)
        norm = norm / count
        return norm, count * ((norm + 1e-6) / max_norm).clamp(min=1)


def _check(name: str, loss: Any) -> None:
    """Raises ApexError when the loss of a part is none."""
    if not isinstance(loss, Tensor | Slope):
        raise ApexError(f"`losses` gives a loss of {name} as a {type(loss).__name__}: give a tensor, or a Slope")
    outputs, slope = _outputs_of(loss)
    if slope is not None and slope.shape != outputs.shape:
        shapes = f"a gradient {list(slope.shape)} of outputs {list(outputs.shape)}"
        raise ApexError(f"`losses` gives a Slope of {name} with {shapes}: they need one shape")
    if slope is None and outputs.ndim:
        raise ApexError(f"`losses` gives a loss of {name} that has the shape {list(outputs.shape)}: sum it up")
    if not outputs.requires_grad:
        raise ApexError(f"`losses` gives a loss of {name} that depends on no parameter")


def _room_of(parameter: Tensor) -> int:
    """Returns the numbers that a parameter takes up in a buffer."""
    return -(-parameter.numel() // LINE) * LINE


def _outputs_of(loss: Tensor | Slope) -> tuple[Tensor, Tensor | None]:
    return (loss.outputs, loss.gradient) if isinstance(loss, Slope) else (loss, None)


def _copy(views: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Copies gradients into their places: a GPU copies together only what is of one type and lies alike."""
    groups: dict[tuple[torch.dtype, bool], tuple[list[Tensor], list[Tensor]]] = {}
    for view, gradient in zip(views, gradients, strict=True):
        places, found = groups.setdefault((gradient.dtype, view.stride() == gradient.stride()), ([], []))
        places.append(view)
        found.append(gradient)
    for places, found in groups.values():
        torch._foreach_copy_(places, found)
