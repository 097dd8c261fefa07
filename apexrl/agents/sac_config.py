"""SAC and CrossQ as a family: numbers with their sources, presets, and their use of the log. Loads no torch."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from apexrl.agents.apex_dpg_config import stream
from apexrl.agents.apex_dqn_config import by_priority, tables
from apexrl.agents.contract import Family, Preset
from apexrl.config.sections import AlgorithmConfig, Changing, Range, UpdateConfig
from apexrl.networks.config import GaussianConfig
from apexrl.types import StreamSpec


@dataclasses.dataclass(frozen=True)
class SacAlgorithm(AlgorithmConfig):
    """The numbers that actors and the learner must agree on."""

    gamma: Annotated[float, Range(0, 1)] = 0.99
    """Discount a step (SAC)."""
    n_steps: int = 1
    """Rewards in a return before it bootstraps (SAC: 1). The entropy of the steps between does not count."""
    unroll_starts: int = 20
    """Transitions that begin in one unroll."""


@dataclasses.dataclass(frozen=True)
class SacUpdate(UpdateConfig):
    """The learner's numbers for its updates."""

    batch_size: int = 256
    """Transitions in a batch (SAC)."""
    optimizer: Literal["adam", "rmsprop"] = "adam"
    """Adam (SAC), or centered RMSProp with decay 0.95."""
    learning_rate: Changing = 3e-4
    """Step size of policy, critics and temperature (SAC)."""
    optimizer_epsilon: float = 1e-8
    """Adam adds it to the root of the squared gradients; RMSProp adds it to their variance, inside the root."""
    target_rate: Annotated[float, Range(1e-6, 1)] = 0.005
    """Share of the way that target critics go at each update (SAC)."""
    policy_period_updates: Annotated[int, Range(1)] = 1
    """Updates of the critics for each of the policy and the temperature (SAC: 1, CrossQ: 3)."""
    entropy_target: Annotated[Changing, Range(-100, 100)] = -1.0
    """Entropy that the temperature aims at, for each number of an action, where those are -1 to 1 (SAC)."""
    first_temperature: Annotated[float, Range(1e-6)] = 1.0
    """Price of entropy at the beginning (SAC)."""
    table: str = "transitions"
    """Table of the replay that batches come from. Its kind is priority."""


PAPER: Preset = {
    "replay": {"capacity": 1_000_000, "min_size_to_sample": 10_000, "samples_per_insert": 256.0,
               "priority_exponent": 0.0, "importance_exponent": 0.0},
}  # fmt: skip
"""SAC: an update of 256 for each step."""

FAST: Preset = {
    "update": {"learning_rate": "1e-3:0", "policy_period_updates": 2, "first_temperature": 0.1},
    "replay": {"capacity": 400_000, "min_size_to_sample": 5_000, "samples_per_insert": 64.0, "priority_exponent": 0.0,
               "importance_exponent": 0.0},
    "learning": {"publish_period_updates": 10, "publish_period_seconds": 0.2},
    "acting": {"environments_per_worker": 8, "environment_groups": 1, "parameter_period_frames": 20},
    "evaluation": {"evaluation_period_seconds": 30.0},
}  # fmt: skip
"""A quarter of SAC's updates with thrice its rate, as simulators are faster than updates."""


def idle(command: Any, stream: StreamSpec) -> Mapping[str, str]:
    """Returns the fields without effect: CrossQ has no targets."""
    return {"target_rate": "--critic-norm none or layer"} if command.network.critic_norm == "batch" else {}


FAMILY = Family(
    SacAlgorithm(),
    GaussianConfig(),
    SacUpdate(),
    stream,
    by_priority,
    tables,
    "apexrl.agents.sac",
    {"paper": PAPER, "gpu": FAST, "two-cores": FAST, "small": FAST},
    idle=idle,
)
