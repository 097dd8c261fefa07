"""Ape-X DQN as a family: its numbers with their sources, its presets, and its use of the log. Loads no torch."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from apexrl.agents.contract import Family, Preset, Transitions, Want, check_discrete
from apexrl.config.sections import AlgorithmConfig, Changing, Range, UpdateConfig
from apexrl.config.tables import TableSpec
from apexrl.errors import ConfigError
from apexrl.networks.config import DuelingConfig
from apexrl.types import EnvironmentSpec, StreamSpec


@dataclasses.dataclass(frozen=True)
class ApexAlgorithm(AlgorithmConfig):
    """The numbers that actors and the learner must agree on."""

    gamma: Annotated[float, Range(0, 1)] = 0.99
    """Discount a step (Ape-X)."""
    n_steps: int = 3
    """Rewards in a return before it bootstraps (Ape-X)."""
    value_rescaling: bool = False
    """Learn h(Q) instead of Q, h(x) = sign(x)(sqrt(|x|+1)-1) + 0.001x (R2D2); meant for unclipped rewards."""
    epsilon_base: Annotated[float, Range(most=1)] = 0.4
    """Greatest epsilon of the ladder (Ape-X)."""
    epsilon_exponent: Annotated[float, Range(0)] = 7.0
    """Steepness of the ladder (Ape-X)."""
    evaluation_epsilon: Annotated[float, Range(0, 1)] = 0.001
    """Probability of a random action in evaluations (C51, Dopamine); with 0 a policy that never serves the ball sits a
    game out."""


@dataclasses.dataclass(frozen=True)
class ApexUpdate(UpdateConfig):
    """The learner's numbers for its updates."""

    batch_size: int = 512
    """Transitions in a batch (Ape-X)."""
    optimizer: Literal["adam", "rmsprop"] = "rmsprop"
    """Adam, or centered RMSProp with decay 0.95 (Ape-X)."""
    learning_rate: Changing = 0.00025 / 4
    """Step size (Ape-X)."""
    optimizer_epsilon: float = 1.5e-7
    """Adam adds it to the root of the squared gradients; RMSProp adds it to their variance, inside the root (Ape-X)."""
    target_period_updates: int = 2500
    """Updates between copies into the target network (Ape-X)."""
    munchausen: Annotated[float, Range(0, 1)] = 0.0
    """Share of the scaled log-policy that is added to the reward (Munchausen: 0.9); 0: double Q-learning (Ape-X)."""
    policy_temperature: Annotated[float, Range(1e-6)] = 0.03
    """Temperature of the policy in --munchausen's targets, softmax of Q by it (Munchausen)."""
    table: str = "transitions"
    """Table of the replay that batches come from. Its kind is priority."""


TWO_CORES: Preset = {
    "update": {
        "batch_size": 64,
        "optimizer": "adam",
        "learning_rate": "2.5e-4:0",  # a constant one holds Breakout back: docs/log/games.md
        "optimizer_epsilon": 1e-5,
        "target_period_updates": 500,
    },
    "network": {"channels": (16, 32, 32), "hidden_size": 256},
    "replay": {"capacity": 400_000, "min_size_to_sample": 15_000, "samples_per_insert": 2.5},
}
"""Tuned on Pong with two CPU cores (docs/log/pong.md)."""

GPU: Preset = {
    **TWO_CORES,
    "replay": {**TWO_CORES["replay"], "capacity": 2_000_000},  # the paper's; two cores have no memory for it
    "learning": {"prefetch_batches": 16},  # updates of 64 are short
}
"""For Atari on a machine with a GPU: the numbers that learned on two cores (docs/log/gpu.md)."""

SMALL: Preset = {
    "update": {**TWO_CORES["update"], "batch_size": 128, "learning_rate": 1e-3,
               "target_period_updates": 100},
    "network": {"channels": (16, 32, 32), "hidden_size": 128},
    "replay": {"capacity": 100_000, "min_size_to_sample": 2_000, "samples_per_insert": 8.0},
    "learning": {"publish_period_seconds": 0.2},  # a run takes a minute or two
    "acting": {"environments_per_worker": 8, "environment_groups": 1, "parameter_period_frames": 20},
    "evaluation": {"evaluation_period_seconds": 10.0},
}  # fmt: skip
"""For observations of a few numbers or pixels, on any machine: CartPole, Catch."""


def stream(algorithm: ApexAlgorithm, environment: EnvironmentSpec) -> StreamSpec:
    """Returns the stream of an environment: unrolls overlap so that each start finds its n-step window inside.

    Raises: ConfigError when an action is a vector of numbers.
    """
    check_discrete(environment, takes_masks=True)
    return environment.streamed(algorithm.unroll_starts, overlap_steps=algorithm.n_steps)


def wants(algorithm: ApexAlgorithm, update: ApexUpdate) -> tuple[Want, ...]:
    """Returns the wants of the learner: transitions by priority.

    Raises: ConfigError when flags exclude each other.
    """
    if update.munchausen and algorithm.value_rescaling:
        raise ConfigError("--munchausen adds a log-policy to rewards, --value-rescaling learns h(Q): leave one out")
    return by_priority(algorithm, update)


def by_priority(algorithm: Any, update: Any) -> tuple[Want, ...]:
    """Returns the wants of any algorithm that learns from n-step transitions by priority, as `tables` has them."""
    return (Want(update.table, update.batch_size, Transitions(algorithm.n_steps, algorithm.gamma)),)


def idle(command: Any, stream: StreamSpec) -> Mapping[str, str]:
    """Returns the fields without effect."""
    return {} if command.update.munchausen else {"policy_temperature": "--munchausen"}


def tables(update: Any) -> tuple[TableSpec, ...]:
    """Returns the tables of the replay, of any algorithm that learns from one by priority: its `table`."""
    return (TableSpec(update.table, "priority"),)


FAMILY = Family(
    ApexAlgorithm(),
    DuelingConfig(),
    ApexUpdate(),
    stream,
    wants,
    tables,
    "apexrl.agents.apex_dqn",
    {"gpu": GPU, "two-cores": TWO_CORES, "small": SMALL},
    is_greedy=True,
    exploration_bands=((0.2, "above_0.2"), (0.05, "0.05_to_0.2"), (0.01, "0.01_to_0.05"), (-math.inf, "below_0.01")),
    idle=idle,
)
