"""Configuration: frozen dataclasses with the papers' defaults. Every command line is made from them.

A preset replaces some of the defaults: the paper's numbers stand where there is a GPU, numbers tuned on two CPU cores
where there is none, and others for environments of a few numbers. What is given on the command line wins.
"""

import dataclasses
import math
import shutil
import sys
from typing import Any, Literal, TypeVar

import tyro

from apexrl.errors import ConfigError

T = TypeVar("T")
Preset = Literal["auto", "paper", "two-cores", "small"]


@dataclasses.dataclass(frozen=True)
class EnvConfig:
    """Which environment, and how it is presented to the agent."""

    env: str = "PongNoFrameskip-v4"
    """A Gymnasium id with discrete actions: PongNoFrameskip-v4, ALE/Breakout-v5, CartPole-v1, Catch-v0.
    `module:Id` imports the module that registers it first."""
    clip_rewards: Literal["auto", "yes", "no"] = "auto"
    """Train on the sign of the reward (Ape-X); auto: for Atari only. Reported returns are never clipped."""
    life_loss_terminal: bool = True
    """A lost life ends the episode for learning; the game goes on (Atari, training only)."""
    max_episode_frames: int = 108_000
    """Emulator frames after which a game is truncated: 30 minutes of Atari."""
    noop_max: int = 30
    """Most no-op frames at the start of an Atari game."""


@dataclasses.dataclass(frozen=True)
class AgentConfig:
    """What the actors and the learner must agree on."""

    gamma: float = 0.99
    """Discount a step (Ape-X)."""
    n_steps: int = 3
    """Rewards in a return before it bootstraps (Ape-X)."""
    unroll_starts: int = 64
    """Transitions that begin in one unroll."""
    value_rescaling: bool = False
    """Learn h(Q) instead of Q, h(x) = sign(x)(sqrt(|x|+1)-1) + 0.001x (R2D2); meant for unclipped rewards."""


@dataclasses.dataclass(frozen=True)
class ReplayConfig:
    """The replay's numbers."""

    capacity: int = 2_000_000
    """Transitions kept; a soft limit (Ape-X)."""
    min_size_to_sample: int = 50_000
    """Transitions before the first batch (Ape-X)."""
    samples_per_insert: float = 0.8
    """Times that a transition is sampled on average; 0: actors and learner run free. Ape-X measured about 0.8."""
    priority_exponent: float = 0.6
    """How far priorities shape sampling (the papers' alpha)."""
    importance_exponent: float = 0.4
    """How far importance weights correct for it (the papers' beta)."""
    eviction_period_batches: int = 100
    """The excess over the capacity is removed, oldest first, after this many batches (Ape-X), or when it gets large."""


@dataclasses.dataclass(frozen=True)
class UpdateConfig:
    """How the learner updates the network."""

    batch_size: int = 512
    """Transitions in a batch (Ape-X)."""
    optimizer: Literal["adam", "rmsprop"] = "rmsprop"
    """Adam, or centered RMSProp with decay 0.95 (Ape-X)."""
    learning_rate: float = 0.00025 / 4
    """Step size (Ape-X)."""
    optimizer_epsilon: float = 1.5e-7
    """Added to the denominator (Ape-X)."""
    max_gradient_norm: float = 40.0
    """Gradients are scaled down to this norm (Ape-X)."""
    target_period_updates: int = 2500
    """Updates between copies into the target network (Ape-X)."""


@dataclasses.dataclass(frozen=True)
class NetworkConfig:
    """Sizes of the network."""

    channels: tuple[int, int, int] = (32, 64, 64)
    """Channels of the three convolutions (DQN)."""
    hidden_size: int = 512
    """Units of each dueling stream (DQN), and of the layers of a perceptron."""


@dataclasses.dataclass(frozen=True)
class WireConfig:
    """Where the roles find each other."""

    replay_host: str = "127.0.0.1"
    """Host of the replay server."""
    learner_host: str = "127.0.0.1"
    """Host of the learner."""
    bind_host: str = "127.0.0.1"
    """Address that servers listen on; 0.0.0.0 for other hosts to reach them."""
    actor_port: int = 51001
    """Replay server's port for actors."""
    batch_port: int = 51002
    """Replay server's port for learners."""
    parameter_port: int = 52001
    """Learner's port for parameters."""
    metrics_port: int = 52002
    """Learner's port for the figures of all roles."""
    patience_seconds: float = 600.0
    """How long a role waits for another before it gives up."""


@dataclasses.dataclass(frozen=True)
class ActingConfig:
    """How actors act."""

    num_workers: int = 1
    """Actor processes on this host."""
    environments_per_worker: int = 32
    """Environments that one process steps together."""
    epsilon_base: float = 0.4
    """Greatest epsilon of the ladder (Ape-X)."""
    epsilon_exponent: float = 7.0
    """How steeply the ladder falls (Ape-X)."""
    parameter_period_frames: int = 400
    """Frames of one environment between looks for newer parameters (Ape-X)."""
    compression_level: int = 1
    """zstd level of an unroll's block."""


@dataclasses.dataclass(frozen=True)
class LearningConfig:
    """How the learner runs."""

    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    learner_threads: int = 1
    """CPU threads of the learner's tensor operations."""
    prefetch_batches: int = 4
    """Batches gathered ahead of the update."""
    publish_period_updates: int = 25
    """Updates between publications of the parameters (Ape-X codes)."""
    checkpoint_period_seconds: float = 60.0
    """Seconds between checkpoints."""
    total_updates: int = 0
    """End after so many updates; 0: never."""
    total_frames: int = 0
    """End after so many environment frames; 0: never."""


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """How a policy is evaluated: whole games, unclipped, without exploration."""

    episodes: int = 10
    """Games in an evaluation."""
    evaluation_epsilon: float = 0.0
    """Probability of a random action."""
    evaluation_period_seconds: float = 60.0
    """Seconds from one evaluation's start to the next, while training."""
    checkpoint: str = ""
    """Play this checkpoint once instead of following the learner."""
    record_dir: str = ""
    """Write a video of the first game of each evaluation here."""


@dataclasses.dataclass(frozen=True)
class ActorCommand:
    """Plays environments and sends prioritized experience to the replay server."""

    env: EnvConfig = EnvConfig()
    wires: WireConfig = WireConfig()
    agent: AgentConfig = AgentConfig()
    acting: ActingConfig = ActingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    evaluate: bool = False
    """Evaluate instead of exploring: follow the learner, or play --checkpoint."""
    seed: int = 0
    """Seed of environments and exploration."""
    preset: Preset = "auto"
    """Defaults of what is not given: the paper's, those for two CPU cores, or those for small environments."""
    worker_index: int = -1
    """Number of this process among the workers of its host; set by the one that starts them."""
    parameter_endpoint: str = ""
    """Where to fetch parameters instead of the learner; set by the process that relays them."""


@dataclasses.dataclass(frozen=True)
class ReplayCommand:
    """Keeps the log of experience and decides what is sampled."""

    wires: WireConfig = WireConfig()
    replay: ReplayConfig = ReplayConfig()
    seed: int = 0
    """Seed of the sampling."""
    preset: Preset = "auto"
    """Defaults of what is not given: the paper's, those for two CPU cores, or those for small environments."""


@dataclasses.dataclass(frozen=True)
class LearnerCommand:
    """Updates the network from sampled batches and publishes it."""

    wires: WireConfig = WireConfig()
    agent: AgentConfig = AgentConfig()
    update: UpdateConfig = UpdateConfig()
    network: NetworkConfig = NetworkConfig()
    learning: LearningConfig = LearningConfig()
    run_dir: str = "runs/by-hand"
    """Directory of checkpoints and event files; a checkpoint found there is continued."""
    seed: int = 0
    """Seed of the network."""
    preset: Preset = "auto"
    """Defaults of what is not given: the paper's, those for two CPU cores, or those for small environments."""


@dataclasses.dataclass(frozen=True)
class RunCommand:
    """Trains on this machine: replay, learner, actors, evaluator and TensorBoard."""

    env: EnvConfig = EnvConfig()
    wires: WireConfig = WireConfig()
    agent: AgentConfig = AgentConfig()
    acting: ActingConfig = ActingConfig()
    replay: ReplayConfig = ReplayConfig()
    update: UpdateConfig = UpdateConfig()
    network: NetworkConfig = NetworkConfig()
    learning: LearningConfig = LearningConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    run_dir: str = ""
    """Directory of this run; by default runs/ENV-TIME."""
    resume: str = ""
    """Continue the run in this directory, with its configuration; flags given here win."""
    max_seconds: float = 0.0
    """End after so many seconds; 0: never."""
    tensorboard: bool = True
    """Serve TensorBoard."""
    tensorboard_port: int = 6006
    """Port of TensorBoard."""
    tensorboard_host: str = "127.0.0.1"
    """Address that TensorBoard listens on."""
    evaluator: bool = True
    """Evaluate while training."""
    smoke: bool = False
    """A short run through all processes, to see that everything works here."""
    max_restarts: int = 10
    """How often a role that dies is started again."""
    seed: int = 0
    """Seed of everything."""
    preset: Preset = "auto"
    """Defaults of what is not given: the paper's, those for two CPU cores, or those for small environments."""


TWO_CORES: dict[str, Any] = {
    "batch_size": 64,
    "optimizer": "adam",
    "learning_rate": 2.5e-4,
    "optimizer_epsilon": 1e-5,
    "target_period_updates": 500,
    "capacity": 400_000,
    "min_size_to_sample": 15_000,
    "samples_per_insert": 2.5,
    "channels": (16, 32, 32),
    "hidden_size": 256,
}
"""Tuned on Pong with two CPU cores (docs/benchmarks.md)."""

SMALL = TWO_CORES | {
    "batch_size": 128,
    "learning_rate": 1e-3,
    "target_period_updates": 100,
    "capacity": 100_000,
    "min_size_to_sample": 2_000,
    "samples_per_insert": 8.0,
    "hidden_size": 128,
    "environments_per_worker": 8,
    "evaluation_period_seconds": 10.0,
}
"""For observations of a few numbers or pixels, on any machine: CartPole, Catch."""

PRESETS: dict[str, dict[str, Any]] = {"paper": {}, "two-cores": TWO_CORES, "small": SMALL}


def with_defaults(command: T, defaults: dict[str, Any]) -> T:
    """Returns the command with the fields of these names, at any depth, replaced."""
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(command):  # type: ignore[arg-type]
        value = getattr(command, field.name)
        if dataclasses.is_dataclass(value):
            changes[field.name] = with_defaults(value, defaults)
        elif field.name in defaults:
            changes[field.name] = defaults[field.name]
    return dataclasses.replace(command, **changes)  # type: ignore[type-var]


def parse(command: type[T], arguments: list[str] | None = None) -> T:
    """Returns the command that the arguments describe, on top of its preset; ends the program when they are wrong.

    The preset auto is the paper's where there is an NVIDIA GPU, else that for two cores.

    Raises: ConfigError when a number is outside its range, or two contradict each other.
    """
    preset = parse_onto(command(), arguments).preset  # type: ignore[attr-defined]
    if preset == "auto":
        preset = "paper" if shutil.which("nvidia-smi") else "two-cores"
    parsed = parse_onto(with_defaults(command(), PRESETS[preset]), arguments)
    check_together(parsed)
    return dataclasses.replace(parsed, preset=preset)  # type: ignore[type-var]


def parse_onto(default: T, arguments: list[str] | None = None) -> T:
    """Returns the default with what the arguments change; ends the program with a message when they are malformed.

    Raises: ConfigError when a number is outside its range.
    """
    command = tyro.cli(
        type(default),
        args=sys.argv[1:] if arguments is None else arguments,
        default=default,
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
    )
    check_ranges(command)
    return command


MAY_BE_ZERO = {
    *("samples_per_insert", "priority_exponent", "importance_exponent", "gamma", "noop_max", "seed", "max_restarts"),
    *("epsilon_exponent", "evaluation_epsilon", "evaluation_period_seconds", "total_updates", "total_frames"),
    "max_seconds",
}
AT_MOST_ONE = {"gamma", "epsilon_base", "evaluation_epsilon", "priority_exponent", "importance_exponent"}


def check_ranges(config: Any) -> None:
    """Raises ConfigError when a number is not finite, or negative, or zero where that means nothing."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        flag = "--" + field.name.replace("_", "-")
        if dataclasses.is_dataclass(value):
            check_ranges(value)
            continue
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, bool) or not isinstance(number, int | float) or field.name == "worker_index":
                continue
            if not math.isfinite(number) or number < 0 or (number == 0 and field.name not in MAY_BE_ZERO):
                bound = "at least" if field.name in MAY_BE_ZERO else "more than"
                raise ConfigError(f"{flag} {number} makes no sense: it has to be {bound} 0")
            if field.name in AT_MOST_ONE and number > 1:
                raise ConfigError(f"{flag} {number} makes no sense: it has to be at most 1")


def check_together(command: Any) -> None:
    """Raises ConfigError when numbers contradict each other; only a command on top of its preset can tell."""
    replay = getattr(command, "replay", None)
    if replay is not None and replay.min_size_to_sample > replay.capacity:
        raise ConfigError(f"--min-size-to-sample {replay.min_size_to_sample} is more than --capacity {replay.capacity}")


def to_flags(command: Any) -> list[str]:
    """Returns arguments from which `parse` makes this command, whose preset is not auto; defaults are left out."""
    return ["--preset", command.preset, *_flags(command, with_defaults(type(command)(), PRESETS[command.preset]))]


def _flags(config: Any, default: Any) -> list[str]:
    flags: list[str] = []
    for field in dataclasses.fields(config):
        value, usual = getattr(config, field.name), getattr(default, field.name)
        name = "--" + field.name.replace("_", "-")
        if dataclasses.is_dataclass(value):
            flags += _flags(value, usual)
        elif value == usual or field.name == "preset":
            continue
        elif isinstance(value, bool):
            flags.append(name if value else name.replace("--", "--no-", 1))
        elif isinstance(value, tuple):
            flags += [name, *map(str, value)]
        else:
            flags += [name, str(value)]
    return flags
