"""The gradient of a network in one buffer: several learners add theirs up, then all of them divide, clip and step."""

import torch
from torch import Tensor, nn


class Gradient:
    """The gradients of summed losses, of all parameters of a network. Each parameter's `grad` is a view of the buffer.

    `buffer` is [P + 1] float32: P gradients, and the number that divides them where a loss is a mean. So the buffers of
    the parts of a batch add up to that of the batch, whatever the sizes of the parts are.
    """

    def __init__(self, network: nn.Module, is_mean: bool):
        """Makes the buffer beside the parameters, which have to stay where they are.

        Args:
          is_mean: whether the loss is a mean, or a sum.
        """
        parameters = list(network.parameters())
        device = parameters[0].device
        self._is_mean = is_mean
        self.buffer = torch.zeros(sum(parameter.numel() for parameter in parameters) + 1, device=device)
        self._gradients, self._count = self.buffer[:-1], self.buffer[-1]
        start = 0
        for parameter in parameters:
            parameter.grad = self._gradients.as_strided(parameter.shape, parameter.stride(), start)
            start += parameter.numel()

    def compute(self, loss: Tensor, count: Tensor | float) -> None:
        """Puts the gradient of a summed loss into the buffer, and the number of terms that a mean divides it by."""
        self._gradients.zero_()
        loss.backward()
        self._count.fill_(count)

    @torch.no_grad()
    def clip(self, max_norm: float) -> Tensor:
        """Divides the gradients where the loss is a mean, and scales them down to a norm; returns the norm before."""
        norm = torch.linalg.vector_norm(self._gradients)
        scale = torch.ones_like(norm)
        if self._is_mean:
            scale = 1 / self._count.masked_fill(self._count == 0, 1)
            norm = norm * scale
        self._gradients.mul_(scale * (max_norm / (norm + 1e-6)).clamp(max=1))
        return norm
