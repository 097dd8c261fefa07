"""An algorithm as its paper has it: what an author writes, pure functions of networks and batches.

`Learning` is the learner's half and `Acting` the actor's. Nothing in them knows threads, optimizers, buffers or number
types: `PlainLearner` and `PlainActor` run them, and own all of that.
"""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from apexrl.agents.contract import Batches, Exploration, Extras
from apexrl.config.schedules import schedules_of
from apexrl.networks.torsos import FrameNetwork
from apexrl.types import StreamSpec, StreamUnrolls

SMALLEST_PRIORITY = 1e-6  # an item without any error can still be drawn: 0 would take it out of its table
Networks = Mapping[str, Any]  # by part, to compute with: its module, or a copy that shares the parameters


class Target(NamedTuple):
    """Target networks, and how they follow: copied every `period_updates`, or moved by a share `rate` at each update.

    With both they are moved by that share every `period_updates`. Sources: copies as in DQN (Nature 518, 529), a share
    as in DDPG (arXiv:1509.02971), both as in TD3 (arXiv:1802.09477).
    """

    period_updates: int = 0
    rate: float = 1.0
    parts: tuple[str, ...] = ()  # those that have a target; empty: all

    @property
    def is_soft(self) -> bool:
        """Whether it moves at each update."""
        return not self.period_updates


class PartOptimizer(NamedTuple):
    """The training of a part, where it differs from what the flags say of all."""

    learning_rate: float | None = None  # None: --learning-rate; either changes by the same factor
    max_gradient_norm: float | None = None  # of this part's gradient; None: --max-gradient-norm
    period_updates: int = 1  # it learns in one of so many updates (TD3: 2 for the policy, arXiv:1802.09477)


class RMSPropForm(NamedTuple):
    """The form of RMSProp that a paper means; see `optimizers.RMSProp`."""

    decay: float = 0.95  # of its averages
    centered: bool = True


class Slope(NamedTuple):
    """A loss that is known by its gradient: that of the sum over the batch, by some outputs of the part's network."""

    outputs: Tensor
    gradient: Tensor  # of the shape of the outputs


class Losses(NamedTuple):
    """The losses of a batch and what else an update gives. The engine detaches all but `of_parts`."""

    of_parts: Mapping[str, Tensor | Slope]
    """Sums over the batch, by part. The gradient of each goes to the part of its name, and to no other: so a policy's
    loss may be computed through a critic. Parts that share a loss are given the same tensor."""
    num_terms: Tensor | float  # of the sums: what a mean is divided by
    priorities: Mapping[str, Tensor] = MappingProxyType({})  # by table, as `contract.Outcome` has them
    metrics: Mapping[str, Tensor] = MappingProxyType({})
    rows: Mapping[str, Mapping[str, Tensor]] = MappingProxyType({})
    beside: Callable[[], Mapping[str, Tensor | Slope]] | None = None
    """Gives the losses of the parts that `of_parts` leaves out, which share no graph with those. A CPU computes them in
    a second thread, and only where one of these parts takes a step."""


class Learning:
    """The learner's half of an algorithm. `parts` and `losses` are the paper; what else is here has a default.

    A GPU captures an update once and repeats it: no method branches on the value of a tensor, and a number that changes
    is one of `tensors`, or of `numbers`.
    """

    acting: tuple[str, ...] = ()
    """Parts whose parameters actors get: those of the first part by their names, of the others as PART.NAME."""
    rmsprop = RMSPropForm()  # which one --optimizer rmsprop means
    is_mean = True  # whether a gradient is that of the mean over `Losses.num_terms`, or of the sum
    num_steps = 1  # that an update takes of a draw: `minibatches` gives so many
    called_once: tuple[str, ...] = ()
    """Parts whose layers `losses` calls once each: on a CPU a second thread takes the gradients of their weights.

    Losses depend on these weights by that call alone: a penalty on them, for one, would have no gradient.
    """

    def __init__(self, algorithm: Any, network: Any, update: Any, spec: StreamSpec, device: torch.device):
        """Takes the family's configurations, the stream of the log, and the device that tensors of its own lie on."""
        self.algorithm, self.network, self.update, self.spec, self.device = algorithm, network, update, spec, device
        self.numbers: dict[str, Any] = {  # floats, and scalars on the device
            name: schedule.start if schedule.is_constant else torch.tensor(schedule.start, device=device)
            for name, schedule in schedules_of(update).items()
        }
        """The numbers of `update` that may change, as they are now; the engine fills those that do. For `losses`."""

    @property
    def target(self) -> Target | None:
        """The target networks; None: there are none."""
        return None

    @property
    def optimizers(self) -> Mapping[str, PartOptimizer]:
        """The optimizers of parts that differ from what the flags say."""
        return {}

    def parts(self) -> dict[str, nn.Module]:
        """Returns the networks to be trained, new ones."""
        raise NotImplementedError("write `parts`: the networks by name")

    def from_target(self, target: Networks, batches: Batches) -> Any:
        """Returns what the target networks alone decide; the engine may compute it while another update goes on."""

    def from_online(self, online: Networks, batches: Batches, from_target: Any) -> Any:
        """Returns what the networks decide without a gradient; it may be computed beside the beginning of `losses`."""
        return from_target

    def minibatches(self, batches: Batches, known: Any) -> Iterable[tuple[Batches, Any]]:
        """Yields the batches of each step of an update, with what is known of them, where `num_steps` is not 1.

        `engine.minibatches` shuffles rows. What is known was computed before the first step, with the networks as they
        were then: the place for advantages. `losses` gives metrics that are scalars, and neither priorities nor rows.
        """
        raise NotImplementedError

    def losses(self, online: Networks, batches: Batches, known: Callable[[], Any]) -> Losses:
        """Returns the losses of the batches.

        Args:
          known: returns the result of `from_online`; the later it is called, the more is computed beside.
        """
        raise NotImplementedError("write `losses`")

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors on the device, besides the parts', that updates read or change: checkpoints hold them."""
        return {}


class Acting:
    """The actor's half of an algorithm, for E environments at a time. Only `act` has to be written."""

    network: FrameNetwork
    """The module's `make_network`, in float32 and with the newest parameters; for `priorities`, which may ask it."""
    params_version: int
    """Updates of the learner in these parameters: 0 before the first one."""

    def __init__(self, algorithm: Any, spec: StreamSpec):
        """Takes the numbers that actors and the learner agree on, and the stream of the log."""
        self.algorithm, self.spec = algorithm, spec

    def explore(self, slots: np.ndarray, ladder_size: int) -> Exploration:
        """Returns the exploration [E] of environment slots out of all `ladder_size`: see `contract.Actor.explore`."""
        return np.zeros(len(slots))

    @property
    def evaluation_exploration(self) -> float:
        """The exploration in evaluations, and of whoever plays to show what was learned."""
        return 0.0

    def act(self, values: np.ndarray, exploration: Exploration, rng: np.random.Generator) -> tuple[np.ndarray, Extras]:
        """Returns actions [E] or [E, action size], and extras [E, ...] by name: see `contract.Actor.act`.

        Args:
          values: [E, ..] float32, as the network gives them.
        """
        raise NotImplementedError("write `act`")

    def priorities(self, unrolls: StreamUnrolls, extras: Extras) -> np.ndarray | None:
        """Returns the initial priorities of unrolls: see `contract.Actor.priorities`."""
        return None
