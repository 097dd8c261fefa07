"""The parameters of a network in one buffer, and their gradient in another.

Several learners add their gradients up as one tensor, and an optimizer moves all parameters as one.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from apexrl.agents.contract import Leave
from apexrl.agents.weight_gradients import WeightGradients

LINE = 16  # numbers: every parameter begins at a multiple, where a processor's and a GPU's vectors begin
LEAST_COUNT = 1e-9  # a batch of which nothing counts has a gradient of zeros


class Gradient:
    """The gradients of summed losses, of all parameters of a network.

    `buffer` is [P + 1] float32: P gradients, and the number that divides them where a loss is a mean. So the buffers of
    the parts of a batch add up to that of the batch, whatever the sizes of the parts are. `parameters` is [P]: the
    network's own, which move into it. Each of them, and its `grad`, is a view. Zeros between them stay zeros.
    """

    def __init__(self, network: nn.Module, is_mean: bool):
        """Makes the buffers beside the parameters; later the network may not be moved or converted.

        Args:
          is_mean: whether the loss is a mean, or a sum.
        """
        own = list(network.parameters())
        self._own, self._is_mean = own, is_mean
        self._apart: WeightGradients | None = None
        self._starts = [0]
        for parameter in own:
            self._starts.append(self._starts[-1] + -(-parameter.numel() // LINE) * LINE)
        self.buffer = own[0].new_zeros(self._starts[-1] + 1).detach()
        self._gradients, self._count = self.buffer[:-1], self.buffer[-1]
        self.parameters = nn.Parameter(torch.zeros_like(self._gradients))
        self.parameters.grad = self._gradients
        self._views = self.split(self._gradients)
        for parameter, place, view in zip(own, self.split(self.parameters.detach()), self._views, strict=True):
            parameter.data = place.copy_(parameter.detach())
            parameter.grad = view

    def split(self, numbers: Tensor) -> list[Tensor]:
        """Returns the parts of numbers [P] that belong to each parameter, in its shape; views of them."""
        starts = zip(self._own, self._starts, strict=False)
        return [numbers.as_strided(p.shape, p.stride(), numbers.storage_offset() + start) for p, start in starts]

    def use_thread(self, leave: Leave, network: nn.Module) -> None:
        """Lets a second thread compute the gradients of large layers' weights from now on. For CPUs.

        Args:
          network: the one whose parameters these are, or the copy of it that `compute` is given.
        """
        self._apart = WeightGradients(network, dict(zip(network.parameters(), self._views, strict=True)), leave)

    def compute(
        self,
        outputs: Tensor,
        count: Tensor | float,
        output_gradient: Tensor | None = None,
        by: Sequence[Tensor] | None = None,
    ) -> None:
        """Puts the gradient of a summed loss into the buffer, and the number of terms that a mean divides it by.

        Args:
          outputs: the loss; or other numbers, with `output_gradient`, the loss's gradient by them.
          by: the parameters of the copy that was computed with, in the network's order; the network's own when None.
        """
        places = [place for place in zip(by or self._own, self._views, strict=True) if place[0].requires_grad]
        parameters = [parameter for parameter, _ in places]
        gradients = torch.autograd.grad(outputs, parameters, output_gradient, materialize_grads=True)
        if self._apart is not None:
            self._apart.finish()
        groups: dict[tuple[torch.dtype, bool], list[tuple[Tensor, Tensor]]] = {}
        for (_, view), gradient in zip(places, gradients, strict=True):
            is_same = view.stride() == gradient.stride()  # a GPU copies together only what lies alike
            groups.setdefault((gradient.dtype, is_same), []).append((view, gradient))
        for pairs in groups.values():
            torch._foreach_copy_([view for view, _ in pairs], [gradient for _, gradient in pairs])
        self._count.fill_(count)

    @torch.no_grad()
    def clipping(self, max_norm: float) -> tuple[Tensor, Tensor]:
        """Returns the gradient's norm, and the number that it is to be divided by: so its norm is at most that."""
        norm = torch.linalg.vector_norm(self._gradients)
        count = self._count.clamp(min=LEAST_COUNT) if self._is_mean else 1.0
        norm = norm / count
        return norm, count * ((norm + 1e-6) / max_norm).clamp(min=1)
