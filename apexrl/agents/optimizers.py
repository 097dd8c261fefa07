"""The learner's optimizers: their state is made beforehand, and nothing in a step waits for a device.

Both obey an attribute `found_inf`, a float32 scalar on the device: where it is 1, a step changes no parameter and no
state, not even by a gradient that is not finite.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from apexrl.config import UpdateConfig

DECAY = 0.95  # the decay of RMSProp's averages


class CenteredRMSprop(torch.optim.Optimizer):
    """RMSProp by the gradient's variance, with epsilon inside the root: rate * g / sqrt(E[g^2] - E[g]^2 + epsilon).

    `torch.optim.RMSprop` adds epsilon outside the root, where the paper's 1.5e-7 is hundreds of times smaller. Rounding
    may put the variance of a nearly constant gradient below zero; zero is taken then.

    Source: arXiv:1803.00933, section 6.1; arXiv:1308.0850, equations 38 to 41, as in TensorFlow and optax.
    """

    found_inf: Tensor | None = None

    def __init__(self, parameters: Iterable[Tensor], lr: float, alpha: float, eps: float):
        """Makes the averages, which decay by `alpha` in a step, for each parameter."""
        super().__init__(parameters, {"lr": lr, "alpha": alpha, "eps": eps})
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = _zero_slots(parameter, ("square_avg", "grad_avg"))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Moves every parameter that has a gradient; takes no closure."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                self._move(parameters, [parameter.grad for parameter in parameters], group)

    def _move(self, parameters: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> None:
        slots = [self.state[parameter] for parameter in parameters]
        steps, squares, means = ([slot[name] for slot in slots] for name in ("step", "square_avg", "grad_avg"))
        decays, ones = ([number] * len(parameters) for number in (group["alpha"], 1.0))
        if self.found_inf is not None:
            is_lost = self.found_inf > 0
            ones = [1 - self.found_inf] * len(parameters)
            decays = [torch.full_like(self.found_inf, group["alpha"]).masked_fill_(is_lost, 1)] * len(parameters)
            for gradient in gradients:
                gradient.masked_fill_(is_lost, 0)
        torch._foreach_add_(steps, ones)
        torch._foreach_mul_(squares, decays)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - group["alpha"])
        torch._foreach_mul_(means, decays)
        torch._foreach_add_(means, gradients, alpha=1 - group["alpha"])
        roots = torch._foreach_addcmul(squares, means, means, -1)
        torch._foreach_clamp_min_(roots, 0)
        torch._foreach_add_(roots, group["eps"])
        torch._foreach_sqrt_(roots)
        torch._foreach_addcdiv_(parameters, gradients, roots, -group["lr"])


def make_optimizer(config: UpdateConfig, network: nn.Module) -> torch.optim.Optimizer:
    """Returns the optimizer that the configuration names, with its state: nothing of it is made in a later step."""
    parameters = list(network.parameters())
    rate, epsilon = config.learning_rate, config.optimizer_epsilon
    if config.optimizer == "rmsprop":
        return CenteredRMSprop(parameters, rate, DECAY, epsilon)
    on_gpu = parameters[0].device.type == "cuda"
    adam = torch.optim.Adam(parameters, rate, eps=epsilon, fused=True, capturable=on_gpu)
    for parameter in parameters:
        # As Adam makes it itself in its first step, which a captured graph would repeat each time.
        adam.state[parameter] = _zero_slots(parameter, ("exp_avg", "exp_avg_sq"))
    return adam


def step_where_finite(optimizer: torch.optim.Optimizer, gradient_norm: Tensor) -> None:
    """Takes a step that changes nothing when the gradient's norm is not finite: the batch is at fault."""
    optimizer.found_inf = (~gradient_norm.isfinite()).float()  # type: ignore[attr-defined]
    optimizer.step()


def optimizer_tensors(optimizer: torch.optim.Optimizer, network: nn.Module) -> dict[str, Tensor]:
    """Returns the optimizer's state by names that are the same in every process: `optimizer.INDEX.NAME`."""
    return {
        f"optimizer.{index}.{name}": tensor
        for index, parameter in enumerate(network.parameters())
        for name, tensor in optimizer.state[parameter].items()
    }


def _zero_slots(parameter: Tensor, names: tuple[str, ...]) -> dict[str, Tensor]:
    zeros = {name: torch.zeros_like(parameter, requires_grad=False) for name in names}
    return {"step": torch.zeros((), device=parameter.device), **zeros}
