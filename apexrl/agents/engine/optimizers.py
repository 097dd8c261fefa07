"""The learner's optimizers: they move all parameters as one, and nothing in a step waits for a device.

Both obey two attributes, float32 scalars on the device. `grad_scale` divides the gradient. `found_inf` is 1 where a
step changes no parameter and no state, not even by a gradient that is not finite. The learning rate may be a tensor on
the device: a captured graph repeats a step, so a rate that changes is filled into that tensor.
"""

from typing import Any

import torch
from torch import Tensor

from apexrl.agents.engine.gradient import PartGradient
from apexrl.agents.engine.plain import RMSPropForm
from apexrl.config.schedules import Schedule
from apexrl.config.sections import UpdateConfig

PIECE = 65_536  # numbers: a processor's cache holds this much of a gradient, its averages and parameters


class RMSProp(torch.optim.Optimizer):
    """RMSProp with epsilon inside the root: rate * g / sqrt(E[g^2] + epsilon).

    The centered one divides by the gradient's variance instead: sqrt(E[g^2] - E[g]^2 + epsilon). Rounding may put the
    variance of a nearly constant gradient below zero; zero is taken then. `torch.optim.RMSprop` adds epsilon outside
    the root, where the papers' numbers mean something else: Ape-X's 1.5e-7 is hundreds of times smaller there.

    Source: plain as in IMPALA, arXiv:1802.01561; centered as in Ape-X, arXiv:1803.00933, section 6.1, and
    arXiv:1308.0850, equations 38 to 41. All averages begin at 0, as in optax; TensorFlow's E[g^2] begins at 1.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(self, parameters: Tensor, lr: float, alpha: float, eps: float, centered: bool):
        """Makes the averages of parameters [P], which decay by `alpha` in a step."""
        super().__init__([parameters], {"lr": lr, "alpha": alpha, "eps": eps, "centered": centered})
        self.state[parameters] = _zero_slots(parameters, ("square_avg", "grad_avg") if centered else ("square_avg",))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Moves the parameters by their gradient, which it scales in place; takes no closure."""
        (group,) = self.param_groups
        (parameters,) = group["params"]
        step, *averages = self.state[parameters].values()
        lost = torch.zeros_like(step) if self.found_inf is None else self.found_inf
        scale = torch.ones_like(step) if self.grad_scale is None else self.grad_scale
        factor = (1 / scale).masked_fill_(lost > 0, 0)
        decay = torch.full_like(step, group["alpha"]).masked_fill_(lost > 0, 1)
        step.add_(1 - lost)
        # On a CPU one piece after the other: it stays in the cache from the first operation to the last.
        size = PIECE if parameters.device.type == "cpu" else len(parameters)
        tensors = (parameters, parameters.grad, *averages)
        for own, gradient, *means in zip(*(tensor.split(size) for tensor in tensors), strict=True):
            gradient.mul_(factor).nan_to_num_(0.0)  # 0 times infinity, where the gradient is lost
            self._move(group, decay, own, gradient, *means)

    def _move(
        self, group: dict[str, Any], decay: Tensor, parameters: Tensor, gradient: Tensor, square: Tensor, *mean: Tensor
    ) -> None:
        """Moves a piece of the parameters, and its means of the squared gradient and of the gradient."""
        share = 1 - group["alpha"]
        variance = square.mul_(decay).addcmul_(gradient, gradient, value=share)
        if group["centered"]:
            mean[0].mul_(decay).add_(gradient, alpha=share)
            variance = torch.addcmul(square, mean[0], mean[0], value=-1).clamp_min_(0)
        inverse_roots = variance.add(group["eps"]).rsqrt_()
        if isinstance(group["lr"], Tensor):
            parameters.sub_(inverse_roots.mul_(gradient).mul_(group["lr"]))
        else:
            parameters.addcmul_(gradient, inverse_roots, value=-group["lr"])


def make_optimizer(
    config: UpdateConfig, parameters: Tensor, form: RMSPropForm, own_rate: float | None = None
) -> torch.optim.Optimizer:
    """Returns the optimizer that the configuration names, with its state: nothing of it is made in a later step.

    Args:
      parameters: [P], those of `PartGradient`.
      form: of RMSProp; Adam has one form.
      own_rate: where another learning rate than the configuration's starts.
    """
    optimizer: torch.optim.Optimizer
    schedule = Schedule.of(config.learning_rate)
    rate = schedule.start if own_rate is None else own_rate
    if config.optimizer == "rmsprop":
        optimizer = RMSProp(parameters, rate, form.decay, config.optimizer_epsilon, form.centered)
    else:
        on_gpu, epsilon = parameters.device.type == "cuda", config.optimizer_epsilon
        optimizer = torch.optim.Adam([parameters], rate, eps=epsilon, fused=True, capturable=on_gpu)
        # As Adam makes it itself in its first step, which a captured graph would repeat each time.
        optimizer.state[parameters] = _zero_slots(parameters, ("exp_avg", "exp_avg_sq"))
    if not schedule.is_constant:  # each step reads it anew; Adam's constructor would read its value
        optimizer.param_groups[0]["lr"] = torch.tensor(rate, device=parameters.device)
    return optimizer


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Sets the learning rate, where it may change."""
    if isinstance(tensor := optimizer.param_groups[0]["lr"], Tensor):
        tensor.fill_(rate)


def step_where_finite(
    optimizer: torch.optim.Optimizer, gradient: PartGradient, max_norm: float, is_due: Tensor | None = None
) -> Tensor:
    """Takes a step by the clipped gradient; returns the gradient's norm before.

    A gradient whose norm is not finite changes nothing: the batch is at fault.

    Args:
      is_due: scalar bool, whether the step is to be taken; None: it is.
    """
    norm, divisor = gradient.clipping(max_norm)
    is_lost = ~(norm < torch.inf)
    optimizer.grad_scale = divisor  # type: ignore[attr-defined]
    optimizer.found_inf = (is_lost if is_due is None else is_lost | ~is_due).float()  # type: ignore[attr-defined]
    optimizer.step()
    return norm


def optimizer_tensors(optimizer: torch.optim.Optimizer, gradient: PartGradient) -> dict[str, Tensor]:
    """Returns the optimizer's state by names that are the same in every process: `step`, and `INDEX.NAME`."""
    step, *averages = optimizer.state[gradient.parameters].items()
    tensors = {"step": step[1]}
    for name, average in averages:
        tensors |= {f"{index}.{name}": part for index, part in enumerate(gradient.split(average))}
    return tensors


def _zero_slots(parameters: Tensor, names: tuple[str, ...]) -> dict[str, Tensor]:
    zeros = {name: torch.zeros_like(parameters, requires_grad=False) for name in names}
    return {"step": torch.zeros((), device=parameters.device), **zeros}
