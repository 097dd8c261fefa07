"""Ape-X DPG, TD3 and D4PG as a family: numbers with their sources, presets, use of the log. Loads no torch."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from apexrl.agents.apex_dqn_config import by_priority, tables
from apexrl.agents.contract import Family, Preset, Want, check_continuous
from apexrl.config.sections import AlgorithmConfig, Changing, Range, UpdateConfig
from apexrl.errors import ConfigError
from apexrl.networks.config import DeterministicConfig
from apexrl.types import EnvironmentSpec, StreamSpec


@dataclasses.dataclass(frozen=True)
class DpgAlgorithm(AlgorithmConfig):
    """The numbers that actors and the learner must agree on."""

    gamma: Annotated[float, Range(0, 1)] = 0.99
    """Discount a step (Ape-X)."""
    n_steps: int = 5
    """Rewards in a return before it bootstraps (Ape-X DPG: 5, TD3: 1)."""
    unroll_starts: int = 20
    """Transitions that begin in one unroll."""
    noise_least: Annotated[float, Range(0)] = 0.3
    """Deviation of the noise of the calmest environment, as a share of half an action's range."""
    noise_most: Annotated[float, Range(0)] = 0.3
    """Deviation of the noise of the wildest environment; those between lie on a ladder (Ape-X DPG: all have 0.3)."""


@dataclasses.dataclass(frozen=True)
class DpgUpdate(UpdateConfig):
    """The learner's numbers for its updates."""

    batch_size: int = 256
    """Transitions in a batch (Ape-X DPG)."""
    optimizer: Literal["adam", "rmsprop"] = "adam"
    """Adam (Ape-X DPG, TD3), or centered RMSProp with decay 0.95."""
    learning_rate: Changing = 1e-4
    """Step size of policy and critics (Ape-X DPG)."""
    optimizer_epsilon: float = 1e-8
    """Adam adds it to the root of the squared gradients; RMSProp adds it to their variance, inside the root."""
    target_period_updates: int = 100
    """Updates between copies into the target networks (Ape-X DPG), where they do not follow by --target-rate."""
    target_rate: Annotated[float, Range(0, 1)] = 0.0
    """Share of the way that target networks go at each update (TD3: 0.005); 0: they are copied."""
    policy_period_updates: Annotated[int, Range(1)] = 1
    """Updates of the critics for each of the policy (TD3: 2)."""
    target_noise: Annotated[float, Range(0)] = 0.0
    """Deviation of noise on the target policy's actions, as a share of half their range (TD3: 0.2)."""
    target_noise_clip: Annotated[float, Range(0)] = 0.5
    """Most of that noise (TD3)."""
    action_gradient_clip: Annotated[float, Range(0)] = 1.0
    """Most of each slope by which a critic moves the policy's action, where those are -1 to 1 (Ape-X DPG); 0: it is not
    clipped."""
    table: str = "transitions"
    """Table of the replay that batches come from. Its kind is priority."""


SWIFT: Preset = {
    "algorithm": {"n_steps": 3, "noise_least": 0.05, "noise_most": 0.4},
    "update": {
        "batch_size": 256,
        "learning_rate": 3e-4,
        "target_rate": 0.005,
        "policy_period_updates": 2,
        "target_noise": 0.2,
        "action_gradient_clip": 0.0,
    },
    "replay": {"capacity": 400_000, "min_size_to_sample": 5_000, "samples_per_insert": 64.0, "priority_exponent": 0.0,
               "importance_exponent": 0.0},
    "learning": {"publish_period_updates": 10, "publish_period_seconds": 0.2},
    "acting": {"environments_per_worker": 8, "environment_groups": 1, "parameter_period_frames": 20},
    "evaluation": {"evaluation_period_seconds": 15.0},
}  # fmt: skip
"""TD3 with LayerNorm, a ladder of noise over the environments, returns of three steps, and a quarter of its updates."""

TD3: Preset = {
    "algorithm": {"n_steps": 1, "noise_least": 0.1, "noise_most": 0.1},
    "network": {"hidden_size": 256, "critics": 2, "layer_norm": False},
    "update": {**SWIFT["update"], "max_gradient_norm": 1e9, "target_noise_clip": 0.5},
    "replay": {"capacity": 1_000_000, "min_size_to_sample": 25_000, "samples_per_insert": 256.0,
               "priority_exponent": 0.0, "importance_exponent": 0.0},
}  # fmt: skip
"""TD3 (arXiv:1802.09477) with the numbers of its authors' code: the paper's batch is 100, its rate 1e-3."""

D4PG: Preset = {
    "algorithm": {"n_steps": 5, "noise_least": 0.3, "noise_most": 0.3},
    "network": {"critics": 1, "layer_norm": False, "atoms": 101},
    "update": {"batch_size": 256, "learning_rate": 1e-4, "target_period_updates": 100, "action_gradient_clip": 0.0},
    "replay": {"capacity": 1_000_000, "samples_per_insert": 1.0, "priority_exponent": 0.6},
}  # fmt: skip
"""D4PG (arXiv:1804.08617): a categorical critic of 101 atoms from -150 to 150, as on dm_control (arXiv:1801.00690)."""

PAPER: Preset = {"network": {"critics": 1, "initial_priorities": "critic"},
                 "replay": {"capacity": 1_000_000, "samples_per_insert": 1.0}}  # fmt: skip
"""Ape-X DPG. The sizes of its layers are ours: the paper states them for its own tasks."""


def stream(algorithm: DpgAlgorithm, environment: EnvironmentSpec) -> StreamSpec:
    """Returns the stream of an environment: unrolls overlap so that each start finds its n-step window inside.

    Raises: ConfigError when an action is one of several.
    """
    check_continuous(environment)
    return environment.streamed(algorithm.unroll_starts, overlap_steps=algorithm.n_steps)


def wants(algorithm: DpgAlgorithm, update: DpgUpdate) -> tuple[Want, ...]:
    """Returns the wants of the learner: transitions by priority.

    Raises: ConfigError when the ladder of noise runs backwards.
    """
    if algorithm.noise_least > algorithm.noise_most:
        raise ConfigError(
            f"--noise-least {algorithm.noise_least:g} is above --noise-most {algorithm.noise_most:g}: give less of the "
            "one or more of the other"
        )
    return by_priority(algorithm, update)


def idle(command: Any, stream: StreamSpec) -> Mapping[str, str]:
    """Returns the fields without effect."""
    update, network = command.update, command.network
    fields = {}
    if update.target_rate:
        fields["target_period_updates"] = "--target-rate 0"
    if not update.target_noise:
        fields["target_noise_clip"] = "--target-noise"
    if not network.atoms:
        fields |= {"least_return": "--atoms", "most_return": "--atoms"}
    if network.initial_priorities == "critic" and not command.replay.priority_exponent:
        fields["initial_priorities"] = "--priority-exponent"
    return fields


FAMILY = Family(
    DpgAlgorithm(),
    DeterministicConfig(),
    DpgUpdate(),
    stream,
    wants,
    tables,
    "apexrl.agents.apex_dpg",
    {"paper": PAPER, "gpu": SWIFT, "two-cores": SWIFT, "small": SWIFT, "td3": TD3, "d4pg": D4PG},
    is_greedy=True,
    exploration_bands=((0.2, "above_0.2"), (0.1, "0.1_to_0.2"), (-math.inf, "below_0.1")),
    idle=idle,
)
