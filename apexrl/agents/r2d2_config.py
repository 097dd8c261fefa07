"""R2D2 as a family: its numbers with their sources, its presets, and its use of the log. Loads no torch."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from apexrl.agents import apex_dqn_config
from apexrl.agents.apex_dqn_config import ApexAlgorithm
from apexrl.agents.contract import Family, Preset, Unrolls, Want, check_discrete
from apexrl.agents.recurrence import burn_in_unrolls, recurrent_fields
from apexrl.config.sections import Changing, Range, UpdateConfig
from apexrl.errors import ConfigError
from apexrl.networks.config import ActorCriticConfig
from apexrl.types import EnvironmentSpec, StreamSpec


@dataclasses.dataclass(frozen=True)
class R2d2Algorithm(ApexAlgorithm):
    """The numbers that actors and the learner must agree on."""

    gamma: Annotated[float, Range(0, 1)] = 0.997
    """Discount a step (R2D2)."""
    unroll_starts: int = 40
    """Transitions that begin in one unroll, and the steps from one sequence to the next (R2D2)."""
    n_steps: int = 5
    """Rewards in a return before it bootstraps (R2D2)."""
    value_rescaling: bool = True
    """Learn h(Q) instead of Q, h(x) = sign(x)(sqrt(|x|+1)-1) + 0.001x (R2D2)."""
    lstm_size: int = 512
    """Units of the LSTM (R2D2)."""
    max_share: Annotated[float, Range(0, 1)] = 0.9
    """Share of the greatest error in the priority of a sequence; the rest is that of the mean (R2D2's eta)."""


@dataclasses.dataclass(frozen=True)
class R2d2Update(UpdateConfig):
    """The learner's numbers for its updates."""

    batch_size: int = 64
    """Sequences in a batch (R2D2)."""
    sequence_unrolls: Annotated[int, Range(1, 16)] = 2
    """Unrolls of a stream in one sequence, the drawn one last: sequences of 80 steps overlap by 40 (R2D2), and the log
    holds each step once. A sample learns from so many unrolls: --samples-per-insert counts drawn ones."""
    replay_state: str = "burn-in:40"
    """The state with which a sequence begins: burn-in:N, stored or zero. burn-in:N takes the state stored N steps
    earlier, and the newest parameters through them (R2D2: 40); N is a multiple of --unroll-starts. stored is the
    actor's."""
    optimizer: Literal["adam", "rmsprop"] = "adam"
    """Adam (R2D2), or centered RMSProp with decay 0.95."""
    learning_rate: Changing = 1e-4
    """Step size (R2D2)."""
    optimizer_epsilon: float = 1e-3
    """Adam adds it to the root of the squared gradients (R2D2); RMSProp adds it to their variance, inside the root."""
    target_period_updates: int = 2500
    """Updates between copies into the target network (R2D2)."""
    table: str = "sequences"
    """Table of the replay that batches come from. Its kind is priority."""


PAPER: Preset = {
    "env": {"clip_rewards": "no", "life_loss_terminal": False},
    "replay": {"capacity": 4_000_000, "samples_per_insert": 0.4, "priority_exponent": 0.9, "importance_exponent": 0.6},
    "acting": {"parameter_period_frames": 1600},  # 400 steps
}
"""The numbers of R2D2's authors for Atari: steps are learned 0.8 times on average, in two sequences each."""

TWO_CORES: Preset = {
    "algorithm": {"gamma": 0.99, "unroll_starts": 20, "lstm_size": 256},
    "update": {"batch_size": 8, "replay_state": "burn-in:20", "learning_rate": "2.5e-4:0", "optimizer_epsilon": 1e-5,
               "target_period_updates": 500},
    "network": {"channels": (16, 32, 32), "hidden_size": 256},
    "replay": {"capacity": 400_000, "min_size_to_sample": 15_000, "samples_per_insert": 1.0, "priority_exponent": 0.9,
               "importance_exponent": 0.6},
}  # fmt: skip
"""For games of Atari on two CPU cores, from Ape-X's numbers there: rewards are clipped."""

SMALL: Preset = {
    "algorithm": {"gamma": 0.99, "unroll_starts": 20, "lstm_size": 128},
    "update": {**TWO_CORES["update"], "batch_size": 32, "learning_rate": 1e-3, "sequence_unrolls": 1,
               "target_period_updates": 100},
    "network": {"channels": (16, 32, 32), "hidden_size": 128},
    "replay": {**TWO_CORES["replay"], "capacity": 100_000, "min_size_to_sample": 2_000, "samples_per_insert": 8.0},
    "learning": {"publish_period_seconds": 0.2},
    "acting": {"environments_per_worker": 8, "environment_groups": 1, "parameter_period_frames": 20},
    "evaluation": {"evaluation_period_seconds": 10.0},
}  # fmt: skip
"""For observations of a few numbers or pixels, on any machine: MemoryCatch."""


def stream(algorithm: R2d2Algorithm, environment: EnvironmentSpec) -> StreamSpec:
    """Returns the stream of an environment: unrolls of one priority, with the state before each.

    Raises: ConfigError when an action is a vector of numbers.
    """
    check_discrete(environment, takes_masks=True)
    fields = recurrent_fields(algorithm.lstm_size)
    return environment.streamed(algorithm.unroll_starts, algorithm.n_steps, fields, has_unroll_priorities=True)


def wants(algorithm: R2d2Algorithm, update: R2d2Update) -> tuple[Want, ...]:
    """Returns the wants of the learner: unrolls by priority, with those before them.

    Raises: ConfigError when --replay-state is none that is known, or walks.
    """
    if update.replay_state == "walk":
        raise ConfigError(
            "--replay-state walk goes on where the last batch ended, and r2d2 learns from what priorities draw: "
            "give burn-in:N, stored or zero"
        )
    before = burn_in_unrolls(update.replay_state, algorithm.unroll_starts, ("stored", "zero"))
    return (Want(update.table, update.batch_size, Unrolls(before + update.sequence_unrolls - 1)),)


def idle(command: Any, stream: StreamSpec) -> Mapping[str, str]:
    """Returns the fields without effect."""
    return {"first_deviation": "actions that are vectors"}


FAMILY = Family(
    R2d2Algorithm(),
    ActorCriticConfig("shallow", (32, 64, 64), 512),
    R2d2Update(),
    stream,
    wants,
    apex_dqn_config.tables,
    "apexrl.agents.r2d2",
    {"paper": PAPER, "gpu": TWO_CORES, "two-cores": TWO_CORES, "small": SMALL},
    is_greedy=True,
    exploration_bands=apex_dqn_config.FAMILY.exploration_bands,
    idle=idle,
)
