"""PQN as a family: its numbers with their sources, its presets, and its use of the log. Loads no torch."""

import dataclasses
from typing import Annotated, Literal

from apexrl.agents.apex_dqn_config import FAMILY as APEX
from apexrl.agents.contract import Family, Preset, Unrolls, Want, check_discrete
from apexrl.agents.impala_config import tables
from apexrl.agents.replaying.mix import batch_sizes, parts_of
from apexrl.config.sections import AlgorithmConfig, Changing, Range, UpdateConfig
from apexrl.errors import ConfigError
from apexrl.networks.config import NormalizedConfig
from apexrl.types import EnvironmentSpec, StreamSpec


@dataclasses.dataclass(frozen=True)
class PqnAlgorithm(AlgorithmConfig):
    """The numbers that actors and the learner must agree on."""

    unroll_starts: int = 32
    """Transitions in one unroll (PQN)."""
    epsilon_base: Annotated[float, Range(most=1)] = 0.4
    """Greatest epsilon of the ladder (Ape-X)."""
    epsilon_exponent: Annotated[float, Range(0)] = 7.0
    """Steepness of the ladder (Ape-X)."""
    evaluation_epsilon: Annotated[float, Range(0, 1)] = 0.001
    """Probability of a random action in evaluations (C51, Dopamine)."""


@dataclasses.dataclass(frozen=True)
class PqnUpdate(UpdateConfig):
    """The learner's numbers for its updates."""

    batch_size: int = 4
    """Unrolls in a batch: 128 transitions (PQN)."""
    mix: tuple[str, ...] = ("queue=1/2", "uniform@512=1/2")
    """Shares of a batch: queue, new unrolls, each once, and uniform@N, the newest N unrolls again. PQN goes through the
    unrolls of 128 environments twice; queue=1 goes through them once."""
    optimizer: Literal["adam", "rmsprop"] = "adam"
    """Adam (PQN: RAdam), or RMSProp."""
    max_gradient_norm: Changing = 10.0
    """Gradients are scaled down to this norm (PQN)."""
    trace_lambda: Annotated[float, Range(0, 1)] = 0.65
    """Decay of the trace of Q(lambda) (PQN)."""


TWO_CORES: Preset = {
    "update": {"learning_rate": "2.5e-4:0"},
    "network": {"channels": (16, 32, 32), "hidden_size": 256},
    "replay": {"capacity": 200_000, "min_size_to_sample": 2_000},
    "learning": {"publish_period_updates": 1, "publish_period_seconds": 0.2, "prefetch_batches": 2},
    "acting": {"parameter_period_frames": 128},  # an unroll
}
"""For games of Atari on two CPU cores; not tuned."""

SMALL: Preset = {
    "update": {"learning_rate": 1e-3},
    "network": {"channels": (16, 32, 32), "hidden_size": 128},
    "replay": {**TWO_CORES["replay"], "capacity": 100_000},
    "learning": {**TWO_CORES["learning"], "publish_period_seconds": 0.02},  # hundreds of updates a second
    "acting": {"environments_per_worker": 8, "environment_groups": 1, "parameter_period_frames": 20},
    "evaluation": {"evaluation_period_seconds": 10.0},
}
"""For observations of a few numbers or pixels, on any machine: CartPole, Catch."""


def stream(algorithm: PqnAlgorithm, environment: EnvironmentSpec) -> StreamSpec:
    """Returns the stream of an environment: unrolls without overlap.

    Raises: ConfigError when an action is a vector of numbers.
    """
    check_discrete(environment, takes_masks=True)
    return environment.streamed(algorithm.unroll_starts, overlap_steps=0)


def wants(algorithm: PqnAlgorithm, update: PqnUpdate) -> tuple[Want, ...]:
    """Returns the wants of the learner: whole unrolls of each part of the mix.

    Raises: ConfigError when mix and batch size contradict each other, or a part selects its unrolls.
    """
    parts = parts_of(update.mix)
    if others := [part.kind for part in parts if part.kind not in ("queue", "uniform")]:
        raise ConfigError(f"--mix {others[0]}: --agent pqn takes queue and uniform@N")
    sizes = batch_sizes(parts, update.batch_size)
    return tuple(Want(part.name, sizes[part.name], Unrolls()) for part in parts)


FAMILY = Family(
    PqnAlgorithm(),
    NormalizedConfig(),
    PqnUpdate(),
    stream,
    wants,
    tables,
    "apexrl.agents.pqn",
    {"paper": {name: TWO_CORES[name] for name in ("replay", "learning", "acting")}, "gpu": TWO_CORES,
     "two-cores": TWO_CORES, "small": SMALL},
    is_greedy=True,
    exploration_bands=APEX.exploration_bands,
)  # fmt: skip
