"""The contract between an algorithm and the processes that run it.

An agent is mathematics: it owns networks and an optimizer. The process that runs it owns threads, streams, graphs,
sockets and files. A `Family` names everything that the processes must know of an algorithm; `families.py` lists them.
"""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np

from apexrl.config.sections import AlgorithmConfig, LearningConfig, NetworkConfig, UpdateConfig
from apexrl.config.tables import TableSpec
from apexrl.errors import ConfigError
from apexrl.types import EnvironmentSpec, StreamSpec, StreamUnrolls

if TYPE_CHECKING:  # replay.py loads families, and no torch
    import torch
    from torch import Tensor, nn

    from apexrl.networks.headers import ParametersHeader
    from apexrl.networks.parameters import Parameters

Exploration = np.ndarray  # [E] float64, in the agent's own measure: an epsilon, a noise scale
Bands = tuple[tuple[float, str], ...]  # each its least exploration, and its name in metrics; the greatest first
State = Any  # the state of E environments; only the agent looks into it
Extras = dict[str, np.ndarray]  # by name: [E, ...], computed from each observation
LAST_BATCH = "last_batch."  # begins the names of a learner's tensors that belong to its last batch


class Observation(NamedTuple):
    """The present of E environments, as an agent sees it before it acts."""

    frames: np.ndarray  # [E, *frame]: the newest of each
    starts: np.ndarray  # [E] bool: whether it begins an episode
    rewards: np.ndarray  # [E] float32: from the step that led here; 0 where an episode begins


class Actor(Protocol):
    """Chooses actions for vectors of environments. Owned by one thread."""

    @property
    def header(self) -> "ParametersHeader":
        """The header of the parameters in use: their version, and the run whose learner made them."""
        ...

    def load(self, parameters: "Parameters") -> None:
        """Replaces the parameters.

        Raises: WireError when they do not fit; the old ones stay in use.
        """
        ...

    def initial_state(self, num_envs: int) -> State:
        """Returns the state of E environments that begin now, for the first `act`."""
        ...

    def explore(self, slots: np.ndarray, ladder_size: int) -> Exploration:
        """Returns the exploration of environment slots [E] out of the `ladder_size` slots of the whole cluster."""
        ...

    @property
    def evaluation_exploration(self) -> float:
        """The exploration of each environment of an evaluation."""
        ...

    def act(
        self, observation: Observation, exploration: Exploration, state: State, rng: np.random.Generator
    ) -> tuple[np.ndarray, Extras, State]:
        """Returns actions [E] or [E, action size], extras, and the state for the next call.

        Actions are whole numbers of a discrete space, or vectors. The log holds vectors as the environment takes them:
        clipped to its bounds. Extras that the stream's spec names go to the log. The others stay here, for
        `priorities`.
        """
        ...

    def priorities(self, unrolls: StreamUnrolls, extras: Extras) -> np.ndarray | None:
        """Returns the initial priorities [P, E] of complete unrolls; None where the algorithm has none.

        Args:
          extras: those that `act` gave and the log does not hold: [T + 1, E, ...].
        """
        ...


class Transitions(NamedTuple):
    """A view of the log: transitions, each with the return of up to n steps."""

    n_steps: int
    gamma: float


class Unrolls(NamedTuple):
    """A view of the log: whole unrolls."""

    burn_in_unrolls: int = 0
    """Unrolls of the same stream before each one, which batches hold too: (this + 1) B rows, those furthest before in
    front. They have weight 0 where they are not held."""
    is_named: bool = False
    """Whether batches have extras `number` and `previous` [B] int64: the numbers of an unroll and of the one before it
    in its stream, -1 where there is none."""


class Want(NamedTuple):
    """Batches of one table, as a learner needs them."""

    table: str
    batch_size: int  # transitions or unrolls, by the view; the server hands out so many
    view: Transitions | Unrolls
    num_chosen: int = 0  # rows that the family's `RowStrategy` makes of them; 0: as many
    is_replaced: bool = False
    """Whether the `RowStrategy` takes other unrolls than the table handed out, of any age: the table can have neither a
    capacity nor priorities, and a learner follows one shard."""

    @property
    def num_rows(self) -> int:
        """Rows of the batches that an update gets."""
        return self.num_chosen or self.batch_size

    def num_transitions(self, spec: StreamSpec) -> int:
        """Returns the transitions of a batch that an update gets."""
        return self.num_rows * (1 if isinstance(self.view, Transitions) else spec.unroll_starts)


class Chosen(NamedTuple):
    """The rows of one batch."""

    keys: np.ndarray  # [b] int64
    weights: np.ndarray  # [b] float32
    metrics: Mapping[str, float] = MappingProxyType({})  # reported as learner/selection/TABLE/NAME


class RowStrategy(Protocol):
    """Chooses the rows of the batches of one log. Owned by the thread that follows the log."""

    def choose(self, table: str, keys: np.ndarray, weights: np.ndarray, num_updates: int) -> Chosen:
        """Returns the rows to learn from, where a table handed out some; few of them may be held no more.

        Args:
          keys: [B] int64: numbers of unrolls, or of transitions, by the view.
          weights: [B] float32: their importance weights.
          num_updates: that the learner has made.
        """
        ...

    def learn(self, results: "ResultsByTable") -> None:
        """Takes what an update has found of its rows: `Outcome.rows`."""
        ...


ResultsByTable = Mapping[str, tuple[np.ndarray, Mapping[str, np.ndarray]]]
"""By table: the keys [M] of an update's rows, and its results [M, ...] for them by name."""


class TransitionBatch(NamedTuple):
    """B transitions on the learner's device; observations and rewards in the measure of the run, where it has one."""

    observation: "Tensor"  # [B, H, *frame], frames as `networks.frame_layout` stores them
    action: "Tensor"  # [B] int64, or [B, action size] float32
    n_step_return: "Tensor"  # [B] float32
    discount: "Tensor"  # [B] float32: gamma ** steps, 0 where terminated
    next_observation: "Tensor"  # [B, H, *frame]
    weight: "Tensor"  # [B] float32: importance weight; 0 where a row only fills the batch


class UnrollBatch(NamedTuple):
    """B whole unrolls on the learner's device, time first; normalized as those are."""

    observation: "Tensor"  # [T + 1, B, H, *frame]
    action: "Tensor"  # [T, B] int64, or [T, B, action size] float32
    reward: "Tensor"  # [T, B] float32
    discount: "Tensor"  # [T, B] float32: the environment's own, 0 where terminated
    start: "Tensor"  # [T + 1, B] bool: the observation begins an episode; the step that led to it was a reset
    extras: "dict[str, Tensor]"  # by name: [T, B, ...], [T + 1, B, ...], or [B, ...] of the first observation
    weight: "Tensor"  # [B] float32: importance weight; 0 where a row only fills the batch


Batch = TransitionBatch | UnrollBatch
Batches = Mapping[str, Any]  # by table: a `TransitionBatch` or an `UnrollBatch`, as was wanted


class Outcome(NamedTuple):
    """The results of a step, as tensors that may still be on their way.

    Where an update takes several steps there are neither priorities nor rows, and the metrics are scalars: their means
    count.
    """

    priorities: "dict[str, Tensor]"  # by table: [B] float32, of the last B rows; absent for tables without priorities
    metrics: "dict[str, Tensor]"
    """Always the same names; probability_NAME of an action, a scalar, is shown to people. Scalars; or, where one table
    is wanted, numbers [B] or [B, n] of its rows. The host reduces those when they are reported: to their mean over the
    rows that do not only fill the batch, or to their greatest where the name ends in _max."""
    rows: "Mapping[str, Mapping[str, Tensor]]" = MappingProxyType({})
    """By table and name: results [B] or [B, n] of each unroll, for the family's `RowStrategy`. Of `rejected_share`, the
    share of an unroll that the trust region rejects, metrics are made."""


Spawn = Callable[[Callable[[], None]], Callable[[], None]]
"""Gives work to a second thread, which begins it in that order. The returned function makes sure that it is done: it
waits, or does the work itself where the thread has not begun."""


class Learner(Protocol):
    """One update of an algorithm: tensors in, tensors out. No method waits for the device.

    An update takes `num_steps` steps from one draw, each of one of its `minibatches`: `gradients` and then `apply`, and
    several learners add their gradients up in between. A GPU captures it once and repeats it: a number that changes,
    such as a learning rate, is a tensor that `schedule` fills.
    """

    num_steps: int
    """Optimizer steps of an update: 1, but for algorithms that go through a draw in minibatches, or several times."""

    @property
    def gradient(self) -> "Tensor":
        """One buffer, always the same: `gradients` fills it, learners may add theirs up in it, `apply` reads it.

        `agents.engine.gradient.Gradient` makes it: gradients of summed losses, and the number that divides them.
        """
        ...

    has_side_work: bool
    """Whether a second thread pays on a CPU: it computes `from_target` and `from_online`. Only then it is told of by
    `use_thread`."""

    def use_thread(self, spawn: Spawn) -> None:
        """Takes the way to that thread, before the first update: `gradients` may leave it a part of its work, too."""
        ...

    def schedule(self, numbers: Mapping[str, float]) -> None:
        """Takes the numbers of the configuration that may change, by field, as they are now, before an update.

        Those that follow a schedule are filled into their tensors. `from_target` may be at work in its thread: it reads
        no such number.
        """
        ...

    def from_target(self, batches: Batches) -> Any:
        """Returns what the target network alone decides of batches: only `copy_target` outdates it."""
        ...

    def from_online(self, batches: Batches, from_target: Any) -> Any:
        """Returns the results that batches can have during `gradients`, with the parameters as they are now.

        Only one of this and `gradients` draws random numbers: either may come first, and they share a generator.
        """
        ...

    def minibatches(self, batches: Batches, known: Callable[[], Any]) -> Iterable[tuple[Batches, Callable[[], Any]]]:
        """Yields the batches of each step, and what is known of them; in an update of one step, what it was given."""
        ...

    def gradients(self, batches: Batches, known: Callable[[], Any]) -> Outcome:
        """Leaves the gradients of the loss in the buffer `gradient`.

        Args:
          known: returns the result of `from_online`, which it waits for.
        """
        ...

    def apply(self) -> "dict[str, Tensor]":
        """Takes the optimizer's step; returns its metrics, with the `gradient_norm`.

        Gradients that are not finite change nothing.
        """
        ...

    def is_copy_due(self, num_updates: int) -> bool:
        """Returns whether `copy_target` is due after so many updates."""
        ...

    def copy_target(self) -> None:
        """Copies the online network into the target network, which `from_target` reads."""
        ...

    def acting_tensors(self) -> "dict[str, Tensor]":
        """Returns the parameters that actors need, by name."""
        ...

    def learning_tensors(self) -> "dict[str, Tensor]":
        """Returns all other tensors that an update reads or changes, by name: targets, the optimizer's state.

        Names that begin with `LAST_BATCH` are of the last batch alone. A checkpoint goes on without them where they
        are of other shapes.
        """
        ...


class Implementation(Protocol):
    """The module of a family, which loads torch: `Family.module` names it.

    Where the learner does not take what the tables hand out, it also has `make_rows(algorithm, update, order)`: from
    the `StreamOrder` of the unrolls of a log it makes a `RowStrategy`, or None.
    """

    def make_network(self, spec: StreamSpec, network: Any) -> "nn.Module":
        """Returns a new network whose parameters actors get, on torch's current device.

        Raises: ConfigError when it does not take the observations, or a size makes no sense.
        """
        ...

    def make_actor(self, algorithm: Any, parameters: "Parameters", device: "torch.device") -> Actor:
        """Returns an actor.

        Raises: WireError when the parameters are not those of the network that their header describes.
        """
        ...

    def make_learner(
        self, algorithm: Any, network: Any, update: Any, spec: StreamSpec, device: "torch.device"
    ) -> Learner:
        """Returns a learner with new networks.

        Raises: ConfigError when the network does not take the observations.
        """
        ...


Section = Literal["env", "algorithm", "network", "update", "acting", "learning", "replay", "evaluation"]
Preset = Mapping[Section, Mapping[str, Any]]


Idle = Callable[[Any, StreamSpec], Mapping[str, str]]
"""From a RunCommand and its stream to the fields that have no effect there, with what would give them one.

It raises ConfigError when a number is impossible with such a stream.
"""


class Family(NamedTuple):
    """Everything that the processes must know of an algorithm. Loads no torch."""

    algorithm: AlgorithmConfig  # defaults that actors and the learner must agree on
    network: NetworkConfig  # defaults of the network's sizes; they travel with the parameters
    update: UpdateConfig  # defaults of how the learner updates
    stream: Callable[[Any, EnvironmentSpec], StreamSpec]  # from the algorithm's configuration
    wants: Callable[[Any, Any], tuple[Want, ...]]  # from the configurations of algorithm and update
    tables: Callable[[Any], tuple[TableSpec, ...]]  # from the update's: what replay.py serves unless told otherwise
    module: str  # its Implementation; loaded by actors and learners only
    presets: Mapping[str, Preset] = MappingProxyType({})  # a `PresetName` that is missing is the defaults
    raw_rewards_flag: Callable[[Any], str] = lambda update: ""  # of the update's: one that takes no clipped rewards
    is_greedy: bool = False  # whether it takes the best action, up to exploration: it learns no random policy
    exploration_bands: Bands = ()  # by which returns of training games are told apart; () where all explore alike
    divided_sizes: tuple[str, ...] = ()  # of the update's, beside batch_size: each of several learners has its part
    idle: Idle = lambda command, stream: {}


def check_discrete(environment: EnvironmentSpec, *, takes_masks: bool = False) -> None:
    """Raises ConfigError when an action is a vector of numbers, for algorithms that choose one of several.

    Args:
      takes_masks: the algorithm leaves out actions whose value or logit is FORBIDDEN; else --action-mask is refused.
    """
    if not environment.num_actions:
        raise ConfigError(
            f"environment {environment.env!r} has actions of {len(environment.action_bounds)} numbers, and this "
            "algorithm chooses one of several: give --agent sac, apex-dpg or impact"
        )
    if environment.mask_size and not takes_masks:
        raise ConfigError("this algorithm does not keep to --action-mask: leave it out, or give --agent apex-dqn")


def check_continuous(environment: EnvironmentSpec) -> None:
    """Raises ConfigError when an action is one of several, for algorithms that choose a vector of numbers."""
    if environment.num_actions:
        raise ConfigError(
            f"environment {environment.env!r} has {environment.num_actions} actions to choose from, and this algorithm "
            "chooses numbers: give --agent apex-dqn or impala"
        )


def check_normalizable(environment: EnvironmentSpec, learning: LearningConfig) -> None:
    """Raises ConfigError when observations are to be normalized that are no vectors."""
    shape, dtype = environment.frame_shape, environment.frame_dtype
    if learning.normalize_observations and len(shape) > 1:
        raise ConfigError(
            f"--normalize-observations: this is for vectors, and environment {environment.env!r} has observations "
            f"{shape} of {dtype}: leave it out, or say --no-normalize-observations where the preset has it"
        )
