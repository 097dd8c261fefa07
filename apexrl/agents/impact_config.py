"""IMPACT, which is APPO, as a family: IMPALA's numbers with others of its own. Loads no torch."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from apexrl.agents import impala_config
from apexrl.agents.contract import Family, Preset, Want
from apexrl.agents.impala_config import ImpalaAlgorithm, ImpalaUpdate
from apexrl.agents.replaying.mix import parts_of
from apexrl.config.sections import Changing, Range
from apexrl.errors import ConfigError
from apexrl.networks.config import ActorCriticConfig
from apexrl.types import EnvironmentSpec, StreamSpec


@dataclasses.dataclass(frozen=True)
class ImpactAlgorithm(ImpalaAlgorithm):
    """The numbers that actors and the learner must agree on."""

    unroll_starts: int = 50
    """Transitions in one unroll (APPO)."""


@dataclasses.dataclass(frozen=True)
class ImpactUpdate(ImpalaUpdate):
    """The learner's numbers for its updates."""

    batch_size: int = 10
    """Unrolls in a batch (APPO: 500 steps)."""
    mix: tuple[str, ...] = ("uniform@40=1",)
    """Shares of a batch by kind of replay, as IMPALA has them. uniform@40=1 is IMPACT's circular buffer of 4 batches of
    10 unrolls; --samples-per-insert says how often each of the newest is used (IMPACT: 2)."""
    minibatches: Annotated[int, Range(1, 1024)] = 1
    """Steps of the optimizer that an update takes, each from its part of a batch; targets are computed once."""
    surrogate_clip: Annotated[Changing, Range(0, 1)] = 0.4
    """The policy gains nothing where its ratio leaves 1 by more (IMPACT; PPO: 0.2)."""
    target_rho_bar: float = 2.0
    """Greatest ratio of the actor's policy to the target policy, in the surrogate's ratio (IMPACT)."""
    target_period_updates: int = 8
    """Updates between copies into the target network: about batches in the buffer times uses of each (IMPACT)."""
    learning_rate: Changing = 5e-4
    """Step size (APPO)."""
    optimizer: Literal["adam", "rmsprop"] = "adam"
    """Adam (APPO), or RMSProp with decay 0.99, which is not centered."""
    optimizer_epsilon: float = 1e-8
    """Adam adds it to the root of the squared gradients; RMSProp adds it to their mean, inside the root."""
    reduction: Literal["sum", "mean"] = "mean"
    """Whether losses of a batch are added, or averaged (APPO)."""
    trust_region: Annotated[float, Range(0)] = 0.0
    """Where a mix replays: states are rejected whose KL from the target policy to the one implied by V-trace is not
    below it (LASER); 0: none is rejected."""
    replay_state: str = "stored"
    """The state with which an LSTM begins a replayed unroll: stored, burn-in:N or zero, as IMPALA has them."""


TWO_CORES: Preset = {
    **impala_config.TWO_CORES,
    "algorithm": {"unroll_starts": 20},
    "update": {**impala_config.TWO_CORES["update"], "mix": ("queue=1/4", "uniform=3/4"), "learning_rate": "4e-4:0",
               "trace_lambda": 0.95, "entropy_cost": "0.0015:0.003:6_000_000"},
    "acting": {"environments_per_worker": 16, "parameter_period_frames": 20},
}  # fmt: skip
"""For games of Atari on two CPU cores: the loss on LASER's mix of new and replayed unrolls, see docs/log/pong.md."""

GPU: Preset = {
    **TWO_CORES,
    "update": {**TWO_CORES["update"], "batch_size": 16},
    "replay": {**TWO_CORES["replay"], "capacity": 500_000},
    "learning": {**TWO_CORES["learning"], "publish_period_seconds": 0.1, "prefetch_batches": 16},
    "acting": {**TWO_CORES["acting"], "environments_per_worker": 32},
}
"""For games of Atari on a machine with a GPU: larger batches, for twenty times the frames a second: docs/log/gpu.md."""

SMALL: Preset = {
    **impala_config.SMALL,
    "algorithm": {"unroll_starts": 20},
    "update": {**impala_config.SMALL["update"], "batch_size": 16, "mix": ("uniform@64=1",), "learning_rate": 1e-3,
               "minibatches": 2},
    "replay": {**impala_config.SMALL["replay"], "samples_per_insert": 4.0},
}  # fmt: skip
"""For observations of a few numbers or pixels, on any machine: CartPole, Catch."""


VECTORS: Preset = {
    "algorithm": {"unroll_starts": 64},
    "update": {"batch_size": 16, "mix": ("uniform@64=1",), "minibatches": 8, "target_period_updates": 16,
               "learning_rate": "5e-4:0", "surrogate_clip": 0.2, "trace_lambda": 0.95, "entropy_cost": 0.0,
               "max_gradient_norm": 0.5},
    "network": {"hidden_size": 128, "activation": "tanh", "first_deviation": 0.5},
    "replay": {"capacity": 100_000, "min_size_to_sample": 4_096, "samples_per_insert": 4.0},
    "learning": {"normalize_observations": True, "scale_rewards": True, "publish_period_updates": 1,
                 "publish_period_seconds": 0.1},
    "acting": {"environments_per_worker": 8, "environment_groups": 1, "parameter_period_frames": 64},
    "evaluation": {"evaluation_period_seconds": 15.0},
}  # fmt: skip
"""For actions that are vectors: PPO's clip and trace on MuJoCo (arXiv:1707.06347, table 3), four uses of each step,
observations and rewards in the run's measure. What it learned and where it fails: docs/log/robots.md."""

WALKERS: Preset = {
    **VECTORS,
    "update": {**VECTORS["update"], "batch_size": 256, "mix": ("uniform@1024=1",), "minibatches": 16},
    "replay": {**VECTORS["replay"], "min_size_to_sample": 32_768, "samples_per_insert": 8.0},
}  # fmt: skip
"""For robots that fall: sixteen times as many unrolls in a batch, and eight uses of each step. BipedalWalker begins
later with them and falls less, and HalfCheetah, which cannot fall, learns less: docs/log/robots.md."""


def stream(algorithm: ImpactAlgorithm, environment: EnvironmentSpec) -> StreamSpec:
    """Returns the stream of an environment, whatever its actions are: as IMPALA's.

    Raises: ConfigError when an LSTM is to see actions that are vectors.
    """
    if algorithm.lstm and not environment.num_actions:
        raise ConfigError(
            f"--lstm sees the last action as one of several, and environment {environment.env!r} has actions of "
            f"{len(environment.action_bounds)} numbers: leave it out"
        )
    return impala_config.policy_stream(algorithm, environment)


def check_vectors(update: ImpactUpdate, environment: EnvironmentSpec) -> None:
    """Raises ConfigError when actions are vectors, and flags compare policies over several actions."""
    parts = parts_of(update.mix)
    compares = {
        "--trust-region": bool(update.trust_region),
        "--policy-cloning-cost": bool(update.policy_cloning_cost),
        f"--mix {' '.join(update.mix)}": any(part.rule is not None or part.overwrites_worst for part in parts),
    }
    if not environment.num_actions and (asked := [flag for flag, is_on in compares.items() if is_on]):
        raise ConfigError(f"{asked[0]} compares policies over several actions, and those of environment "
                          f"{environment.env!r} are vectors: leave it out")  # fmt: skip


def wants(algorithm: ImpactAlgorithm, update: ImpactUpdate) -> tuple[Want, ...]:
    """Returns the wants of the learner.

    Raises: ConfigError when flags contradict each other, as IMPALA's do, or walks or minibatches are not possible.
    """
    found = impala_config.wants(algorithm, update)
    if any(want.is_replaced for want in found):
        raise ConfigError(
            "--replay-state walk knows the state of the newest policy alone, and impact has a target policy: give "
            "stored, burn-in:N or zero"
        )
    if update.minibatches > 1:
        for want, part in zip(found, parts_of(update.mix), strict=True):
            if want.num_rows % update.minibatches:
                raise ConfigError(
                    f"--minibatches {update.minibatches} does not divide the {want.num_rows} unrolls of {want.table}: "
                    "give another --batch-size"
                )
            if part.rule is not None or part.overwrites_worst or update.trust_region:
                asked = "--trust-region" if update.trust_region else f"--mix {part.name}"
                raise ConfigError(f"{asked} tells of the rows of a whole batch: give --minibatches 1")
    return found


def idle(command: Any, stream: StreamSpec) -> Mapping[str, str]:
    """Returns the fields without effect.

    Raises: ConfigError when flags do not fit actions that are vectors, or a policy over some has no such entropy.
    """
    check_vectors(command.update, stream)
    fields = dict(impala_config.idle(command, stream))
    if not stream.num_actions:
        fields["evaluation_epsilon"] = "actions to choose from"
    return fields


FAMILY = Family(
    ImpactAlgorithm(),
    ActorCriticConfig("shallow", (32, 64, 64), 512),
    ImpactUpdate(),
    stream,
    wants,
    impala_config.tables,
    "apexrl.agents.impact",
    {
        "paper": {"replay": {"min_size_to_sample": 2_000, "samples_per_insert": 2.0},
                  "learning": {"publish_period_updates": 1}},
        "gpu": GPU,
        "two-cores": TWO_CORES,
        "small": SMALL,
        "vectors": VECTORS,
        "walkers": WALKERS,
    },
    raw_rewards_flag=impala_config.FAMILY.raw_rewards_flag,
    idle=idle,
)  # fmt: skip
