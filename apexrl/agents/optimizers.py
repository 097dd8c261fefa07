"""The learner's optimizers: their state is made beforehand, and nothing in a step waits for a device.

Both obey an attribute `found_inf`, a float32 scalar on the device: where it is 1, a step changes no parameter and no
state, not even by a gradient that is not finite. The learning rate may be a tensor on the device: a captured graph
repeats a step, so a rate that changes is filled into that tensor.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from apexrl.config import UpdateConfig

DECAY = 0.95  # the decay of RMSProp's averages


class RMSProp(torch.optim.Optimizer):
    """RMSProp with epsilon inside the root: rate * g / sqrt(E[g^2] + epsilon).

    The centered one divides by the gradient's variance instead: sqrt(E[g^2] - E[g]^2 + epsilon). Rounding may put the
    variance of a nearly constant gradient below zero; zero is taken then. `torch.optim.RMSprop` adds epsilon outside
    the root, where the papers' numbers mean something else: Ape-X's 1.5e-7 is hundreds of times smaller there.

    Source: plain as in IMPALA, arXiv:1802.01561; centered as in Ape-X, arXiv:1803.00933, section 6.1, and
    arXiv:1308.0850, equations 38 to 41. All averages begin at 0, as in optax; TensorFlow's E[g^2] begins at 1.
    """

    found_inf: Tensor | None = None

    def __init__(self, parameters: Iterable[Tensor], lr: float, alpha: float, eps: float, centered: bool):
        """Makes the averages, which decay by `alpha` in a step, for each parameter."""
        super().__init__(parameters, {"lr": lr, "alpha": alpha, "eps": eps, "centered": centered})
        averages = ("square_avg", "grad_avg") if centered else ("square_avg",)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = _zero_slots(parameter, averages)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Moves every parameter that has a gradient; takes no closure."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                self._move(parameters, [parameter.grad for parameter in parameters], group)

    def _move(self, parameters: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> None:
        decays, ones = ([number] * len(parameters) for number in (group["alpha"], 1.0))
        if self.found_inf is not None:
            is_lost = self.found_inf > 0
            ones = [1 - self.found_inf] * len(parameters)
            decays = [torch.full_like(self.found_inf, group["alpha"]).masked_fill_(is_lost, 1)] * len(parameters)
            for gradient in gradients:
                gradient.masked_fill_(is_lost, 0)
        torch._foreach_add_(self._slots(parameters, "step"), ones)
        squares = self._slots(parameters, "square_avg")
        torch._foreach_mul_(squares, decays)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - group["alpha"])
        if group["centered"]:
            means = self._slots(parameters, "grad_avg")
            torch._foreach_mul_(means, decays)
            torch._foreach_add_(means, gradients, alpha=1 - group["alpha"])
            roots = torch._foreach_addcmul(squares, means, means, -1)
            torch._foreach_clamp_min_(roots, 0)
            torch._foreach_add_(roots, group["eps"])
        else:
            roots = torch._foreach_add(squares, group["eps"])
        torch._foreach_sqrt_(roots)
        if isinstance(group["lr"], Tensor):
            moves = torch._foreach_div(gradients, roots)
            torch._foreach_mul_(moves, group["lr"])
            torch._foreach_sub_(parameters, moves)
        else:
            torch._foreach_addcdiv_(parameters, gradients, roots, -group["lr"])

    def _slots(self, parameters: list[Tensor], name: str) -> list[Tensor]:
        return [self.state[parameter][name] for parameter in parameters]


def make_optimizer(
    config: UpdateConfig,
    network: nn.Module,
    decay: float = DECAY,
    centered: bool = True,
) -> torch.optim.Optimizer:
    """Returns the optimizer that the configuration names, with its state: nothing of it is made in a later step.

    Args:
      decay: of RMSProp's averages; Adam has its own.
      centered: whether RMSProp divides by the root of the variance, or of the mean square; Adam takes neither.
    """
    parameters = list(network.parameters())
    optimizer: torch.optim.Optimizer
    if config.optimizer == "rmsprop":
        optimizer = RMSProp(parameters, config.learning_rate, decay, config.optimizer_epsilon, centered)
    else:
        on_gpu = parameters[0].device.type == "cuda"
        epsilon = config.optimizer_epsilon
        optimizer = torch.optim.Adam(parameters, config.learning_rate, eps=epsilon, fused=True, capturable=on_gpu)
        for parameter in parameters:
            # As Adam makes it itself in its first step, which a captured graph would repeat each time.
            optimizer.state[parameter] = _zero_slots(parameter, ("exp_avg", "exp_avg_sq"))
    if config.learning_rate_schedule != "constant":  # each step reads it anew; Adam's constructor would read its value
        optimizer.param_groups[0]["lr"] = torch.tensor(config.learning_rate, device=parameters[0].device)
    return optimizer


def schedule_rate(optimizer: torch.optim.Optimizer, config: UpdateConfig, share: float) -> None:
    """Sets the learning rate for a share 0 to 1 of a run, where it follows a schedule."""
    rate = optimizer.param_groups[0]["lr"]
    if isinstance(rate, Tensor):
        rate.fill_(config.learning_rate * (1 - share))


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
