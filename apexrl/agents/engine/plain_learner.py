"""Runs the learner's half of a plain algorithm: everything that is fast, and everything that all algorithms share."""

import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from apexrl.agents.contract import Batches, Outcome, Spawn
from apexrl.agents.engine.cast_copy import CastCopies
from apexrl.agents.engine.gradient import Gradient
from apexrl.agents.engine.optimizers import make_optimizer, optimizer_tensors, set_rate, step_where_finite
from apexrl.agents.engine.plain import Learning, Losses, PartOptimizer
from apexrl.config.schedules import Schedule
from apexrl.errors import ApexError
from apexrl.networks.device import autocast_for, copied_dtype, lay_out
from apexrl.networks.hidden_linear import HiddenLinear
from apexrl.networks.parameters import why_no_parameters
from apexrl.networks.recurrent import RecurrentNetwork


class PlainLearner:
    """A `contract.Learner` of a `Learning`: its networks, targets, gradients and optimizers.

    `online` and `target` are the networks of `learning` by part, with the parameters as they are trained, in float32.
    """

    def __init__(self, learning: Learning):
        self.learning = learning
        spec, device = learning.spec, learning.device
        self._precision = autocast_for(device, spec)
        self.online = _laid_out(learning.parts(), device)
        _check_names(learning, self.online)
        _check_parameters(self.online)
        if fault := why_no_parameters(self.acting_tensors()):
            raise ApexError(f"`acting` names a part that actors cannot get: {fault}")
        if device.type == "cpu" and spec.action_bounds:  # other batches of vectors are small, and so are their products
            # Those with logged densities are left out: in bfloat16 a ratio on policy would not be 1.
            parts = (part.modules() for part in self.online.values() if not isinstance(part, RecurrentNetwork))
            for layer in itertools.chain.from_iterable(parts):
                if isinstance(layer, HiddenLinear):
                    layer.compute_fast()
        self.target = _copies_of(self.online, learning)
        trained = {name: part for name, part in self.online.items() if next(part.parameters(), None) is not None}
        self._gradient = Gradient(trained, learning.is_mean)
        dtype = copied_dtype(device, spec)
        self._online_copies, self._target_copies = (
            CastCopies(dict(n.items()), dtype) for n in (self.online, self.target)
        )
        self._settings = {name: learning.optimizers.get(name, PartOptimizer()) for name in trained}
        self._optimizers = {
            name: make_optimizer(
                learning.update, self._gradient.parts[name].parameters, learning.rmsprop, setting.learning_rate
            )
            for name, setting in self._settings.items()
        }
        has_delays = any(setting.period_updates > 1 for setting in self._settings.values())
        self._num_updates = torch.zeros((), dtype=torch.int64, device=device) if has_delays else None
        self._step = 0  # of the update's `num_steps`, the one to come
        self._spawn: Spawn | None = None
        self._side_parts = () if spec.has_small_frames else learning.called_once  # else it costs more than it saves

    @property
    def has_side_work(self) -> bool:
        has_delays = self._num_updates is not None  # a thread computes losses beside only where they are due
        return bool(self._side_parts) or _has_known(self.learning) or has_delays

    @property
    def gradient(self) -> Tensor:
        return self._gradient.buffer

    def use_thread(self, spawn: Spawn) -> None:
        """Leaves gradients of weights to the thread, and the losses that an algorithm computes beside."""
        self._spawn = spawn
        for name in self._side_parts:
            self._gradient.parts[name].use_thread(spawn, self._online_copies.networks[name])

    def schedule(self, numbers: Mapping[str, float]) -> None:
        """Sets the learning rates, and the algorithm's other numbers that change."""
        rate, start = numbers["learning_rate"], Schedule.of(self.learning.update.learning_rate).start
        for name, optimizer in self._optimizers.items():
            own = self._settings[name].learning_rate
            set_rate(optimizer, rate if own is None else own * (rate / start))
        for name, number in self.learning.numbers.items():
            if isinstance(number, Tensor):
                number.fill_(numbers[name])

    @torch.no_grad()
    def from_target(self, batches: Batches) -> Any:
        """Returns what the target networks alone decide; None where they move at each update, which outdates it."""
        target = self.learning.target
        return None if target is None or target.is_soft else self._from_target(batches)

    @torch.no_grad()
    def from_online(self, batches: Batches, from_target: Any) -> Any:
        target = self.learning.target
        if target is not None and target.is_soft:
            from_target = self._from_target(batches)
        with self._precision():
            return self.learning.from_online(self._online_copies.networks, batches, from_target)

    @property
    def num_steps(self) -> int:
        return self.learning.num_steps

    def minibatches(self, batches: Batches, known: Callable[[], Any]) -> Iterator[tuple[Batches, Callable[[], Any]]]:
        """Yields the batches of each step; several steps wait for what is known of the draw before the first one.

        Raises: ApexError when the algorithm gives another number of them.
        """
        self._step = 0
        if self.num_steps == 1:
            yield batches, known
            return
        self._online_copies.cast()  # `known` computes with them, and the last step has moved what they copy
        with torch.no_grad():
            steps = list(self.learning.minibatches(batches, known()))
        if len(steps) != self.num_steps:
            raise ApexError(f"`minibatches` gives {len(steps)} of a draw, `num_steps` is {self.num_steps}: mend one")
        for minibatch, known_of_it in steps:
            yield minibatch, functools.partial(_given, known_of_it)

    def gradients(self, batches: Batches, known: Callable[[], Any]) -> Outcome:
        """Computes the gradients of the algorithm's losses."""
        online, known = self._online_copies.cast(), functools.cache(known)
        with self._precision():
            losses = self.learning.losses(online, batches, known)
        if not isinstance(losses, Losses):
            raise ApexError(f"`losses` gives a {type(losses).__name__}: give Losses")
        known()  # what nobody asked for may still be at work
        names = [name for name in self._settings if losses.beside is None or name in losses.of_parts]
        end = self._begin(losses.beside, [name for name in self._settings if name not in names])
        self._gradient.compute(losses.of_parts, losses.num_terms, self._online_copies.parameters, names)
        end()
        return _detached(losses)

    def _begin(self, beside: Callable[[], Mapping[str, Any]] | None, names: list[str]) -> Callable[[], None]:
        """Begins with the gradients of parts whose losses are computed beside the others'.

        Returns: a function that ends it. Where none of these parts takes a step, it makes their gradients zeros.
        """

        def compute() -> None:
            assert beside is not None
            with self._precision():
                losses = beside()
            self._gradient.compute(losses, None, self._online_copies.parameters, names)

        def clear() -> None:
            for name in names:
                self._gradient.parts[name].clear()

        if beside is None:
            return clear
        if self._spawn is None:  # it may be captured: the graph computes them in each update
            return compute
        coming = 1 if self._num_updates is None else int(self._num_updates) + (self._step == 0)
        is_due = any(coming % self._settings[name].period_updates == 0 for name in names)
        return self._spawn(compute) if is_due else clear

    def apply(self) -> dict[str, Tensor]:
        """Clips the gradients and takes a step of each part's optimizer; the last step of an update moves soft targets.

        A part that is not due takes none of the steps of an update.
        """
        if self._num_updates is not None and self._step == 0:
            self._num_updates += 1
        self._step = (self._step + 1) % self.num_steps
        norms = []
        for name, optimizer in self._optimizers.items():
            period, part = self._settings[name].period_updates, self._gradient.parts[name]
            is_due = None if period == 1 or self._num_updates is None else self._num_updates % period == 0
            own = self._settings[name].max_gradient_norm
            most = self.learning.numbers["max_gradient_norm"] if own is None else own
            norm = step_where_finite(optimizer, part, most, is_due)
            norms.append(norm if is_due is None else torch.where(is_due, norm, 0.0))
        if self._step == 0 and self.learning.target is not None and self.learning.target.is_soft:
            self._follow(self.learning.target.rate)
        return {"gradient_norm": norms[0] if len(norms) == 1 else torch.stack(norms).norm()}

    def is_copy_due(self, num_updates: int) -> bool:
        target = self.learning.target
        return target is not None and not target.is_soft and num_updates % target.period_updates == 0

    def copy_target(self) -> None:
        """Moves the target networks by their rate, which is a copy unless the algorithm says less."""
        target = self.learning.target
        assert target is not None
        self._follow(target.rate)

    def acting_tensors(self) -> dict[str, Tensor]:
        first, *others = self.learning.acting
        return self.online[first].state_dict() | _prefixed({name: self.online[name].state_dict() for name in others})

    def learning_tensors(self) -> dict[str, Tensor]:
        learning = self.learning
        others = [name for name in self.online if name not in learning.acting]
        target = _named({name: part.state_dict() for name, part in self.target.items()})
        parts = self._gradient.parts
        optimizers = _named({name: optimizer_tensors(own, parts[name]) for name, own in self._optimizers.items()})
        tensors = _prefixed({name: self.online[name].state_dict() for name in others})
        tensors |= {f"target.{name}": tensor for name, tensor in target.items()}
        tensors |= {f"optimizer.{name}": tensor for name, tensor in optimizers.items()}
        if self._num_updates is not None:
            tensors["num_updates"] = self._num_updates
        return tensors | learning.tensors()

    def _from_target(self, batches: Batches) -> Any:
        with self._precision():
            return self.learning.from_target(self._target_copies.cast(), batches)

    @torch.no_grad()
    def _follow(self, rate: float) -> None:
        """Moves the targets' parameters by a share of the way, and copies what else is in the networks."""
        pairs = [(part, self.online[name]) for name, part in self.target.items()]
        followers: list[Tensor] = [tensor for part, _ in pairs for tensor in part.parameters()]
        leaders: list[Tensor] = [tensor for _, part in pairs for tensor in part.parameters()]
        if rate < 1:
            torch._foreach_lerp_(followers, leaders, rate)
        else:
            torch._foreach_copy_(followers, leaders)
        for part, own in pairs:
            for buffer, leader in zip(part.buffers(), own.buffers(), strict=True):
                buffer.copy_(leader)


def learner_of(kind: Callable[..., Learning]) -> Callable[..., PlainLearner]:
    """Returns the `make_learner` of an algorithm's module: see `contract.Implementation`."""
    return lambda *sections: PlainLearner(kind(*sections))


def _given(known: Any) -> Any:
    return known


def _check_names(learning: Learning, parts: nn.ModuleDict) -> None:
    """Raises ApexError when an algorithm names a part that there is not, none for actors, or two tensors alike."""
    if not learning.acting:
        raise ApexError(f"`acting` names no part: actors need at least one of {', '.join(parts)}")
    target = () if learning.target is None else learning.target.parts
    named = {"acting": learning.acting, "called_once": learning.called_once, "target": target,
             "optimizers": learning.optimizers}  # fmt: skip
    for what, names in named.items():
        if unknown := [name for name in names if name not in parts]:
            raise ApexError(f"`{what}` names {unknown[0]}, which is none of `parts`: they are {', '.join(parts)}")
    if (copies := learning.target) is not None:
        if not isinstance(copies.period_updates, int) or copies.period_updates < 0:
            raise ApexError(f"`target` has period_updates {copies.period_updates!r}: give a whole number, or a rate=")
        if not 0 < copies.rate <= 1:
            raise ApexError(f"`target` has rate {copies.rate!r}: give a share above 0, and at most 1")
    taken = {name.split(".")[0] for name in parts[learning.acting[0]].state_dict()}
    if both := taken.intersection(learning.acting[1:]):
        raise ApexError(f"`acting` names {min(both)}, and {learning.acting[0]} has a tensor of that name: rename one")


def _check_parameters(parts: nn.ModuleDict) -> None:
    """Raises ApexError when two parts share a parameter, for each has a buffer of its own, or one is not float32."""
    owners: dict[nn.Parameter, str] = {}
    for name, part in parts.items():
        for own_name, parameter in part.named_parameters():
            if parameter.dtype != torch.float32:
                raise ApexError(f"`parts` has {name}.{own_name} of {parameter.dtype}: give float32")
            if (owner := owners.setdefault(parameter, name)) != name:
                raise ApexError(f"`parts` {owner} and {name} share {own_name}: make what they share a part of its own")


def _laid_out(parts: dict[str, nn.Module], device: torch.device) -> nn.ModuleDict:
    made = nn.ModuleDict(parts).to(device)
    lay_out(made)
    return made


def _copies_of(online: nn.ModuleDict, learning: Learning) -> nn.ModuleDict:
    """Returns the target networks, as far as there are any."""
    if learning.target is None:
        return nn.ModuleDict()
    names = learning.target.parts or tuple(online)
    return nn.ModuleDict({name: copy.deepcopy(online[name]).requires_grad_(False) for name in names})


def _has_known(learning: Learning) -> bool:
    """Returns whether the algorithm tells what needs no gradient: a second thread computes it."""
    own = type(learning)
    return own.from_target is not Learning.from_target or own.from_online is not Learning.from_online


def _detached(losses: Losses) -> Outcome:
    """Returns the results without their gradients.

    Raises: ApexError when one is no tensor.
    """

    def detached(kind: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        for name, tensor in tensors.items():
            if not isinstance(tensor, Tensor):
                raise ApexError(f"`losses` gives {kind} of {name} as a {type(tensor).__name__}: give a tensor")
        return {name: tensor.detach() for name, tensor in tensors.items()}

    rows = {table: detached("results", named) for table, named in losses.rows.items()}
    return Outcome(detached("priorities", losses.priorities), detached("the metric", losses.metrics), rows)


def _named(by_part: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Returns the tensors of a single part by their names, those of several as PART.NAME."""
    return dict(*by_part.values()) if len(by_part) == 1 else _prefixed(by_part)


def _prefixed(by_part: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {f"{part}.{name}": tensor for part, named in by_part.items() for name, tensor in named.items()}
