"""Configuration: frozen dataclasses with the papers' defaults. Every command line is made from them (`flags.py`).

A preset replaces some of the defaults: the paper's numbers stand where there is a GPU, numbers tuned on two CPU cores
where there is none, and others for environments of a few numbers. What is given on the command line wins.
"""

import dataclasses
from typing import Any, Literal, NamedTuple, cast

from apexrl.errors import ConfigError

TableKind = Literal["priority", "uniform", "fifo"]
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
    """A game of Atari begins with 0 to `noop_max` - 1 no-op frames (ale-py); the first FIRE takes the place of one."""
    fire_at_reset: bool = True
    """A game of Atari that has FIRE begins with it, before the no-ops (ale-py's default); DQN begins without."""


@dataclasses.dataclass(frozen=True)
class AgentConfig:
    """What the actors and the learner must agree on."""

    gamma: float = 0.99
    """Discount a step (Ape-X)."""
    n_steps: int = 3
    """Rewards in a return before it bootstraps (Ape-X)."""
    unroll_starts: int = 80
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
    tables: tuple[str, ...] = ("transitions=priority",)
    """Tables over the log, each NAME=KIND or NAME=KIND:SAMPLES_PER_INSERT:MIN_SIZE. Kinds: priority (transitions),
    uniform and fifo (whole unrolls). Actors wait for the learner of each; 0 samples an insert: nobody waits."""
    journal_dir: str = "auto"
    """Directory where acknowledged experience is kept; off: in memory only. auto: in the directory of a run on one
    machine, else off."""
    journal_flush_seconds: float = 1.0
    """What a power cut may take of the journal; 0: nothing is acknowledged before the disk has it."""
    journal_snapshot_seconds: float = 60.0
    """Seconds between snapshots of the priorities beside the journal."""


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
    """Adam adds it to the root of the squared gradients; RMSProp adds it to their variance, inside the root (Ape-X)."""
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
    keys: str = ""
    """Directory of CURVE keys (`python -m apexrl.tools.keys DIR`): encrypts, and talks to their owners only."""


@dataclasses.dataclass(frozen=True)
class ActingConfig:
    """How actors act."""

    num_workers: int = 1
    """Actor processes on this host."""
    environments_per_worker: int = 64
    """Environments of one process."""
    environment_groups: int = 2
    """Parts of a process's environments: while one steps, the actions for the next are chosen."""
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
    table: str = "transitions"
    """Table of the replay that batches come from; of the kind priority."""
    learner_threads: int = 1
    """CPU threads of the learner's tensor operations. Without a GPU two such computations go on side by side."""
    memory_gb: float = 0.0
    """Gigabytes that experience may take on this host; 0: what is free, of the machine and of its control group."""
    prefetch_batches: int = 8
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
    """How a policy is evaluated: whole games, unclipped, nearly without exploration."""

    episodes: int = 10
    """Games in an evaluation."""
    evaluation_epsilon: float = 0.001
    """Probability of a random action (C51, Dopamine); with 0 a policy that never serves the ball sits a game out."""
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
    device: str = "cpu"
    """Where actions are computed: cpu, cuda or cuda:N; auto: a GPU when there is one."""
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
    actor_device: str = "cpu"
    """Where actors compute their actions: cpu, cuda or cuda:N; auto: a GPU when there is one."""
    run_dir: str = ""
    """Directory of this run; by default runs/ENV-TIME."""
    resume: str = ""
    """Continue the run in this directory, with its configuration; flags given here win."""
    from_scratch: bool = False
    """With --resume: train a new network on the run's experience. Earlier results move to DIR/earlier-N."""
    max_seconds: float = 0.0
    """End after so many seconds; 0: never."""
    tensorboard: bool = True
    """Serve TensorBoard."""
    tensorboard_port: int = 6006
    """Port of TensorBoard."""
    tensorboard_host: str = "127.0.0.1"
    """Address that TensorBoard listens on."""
    evaluator: bool = True
    """Evaluate while training; with at most 4 cores at a lower priority than the learner."""
    smoke: bool = False
    """A short run through all processes; fails unless all of them have worked within ten minutes."""
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
    "environment_groups": 1,
    "evaluation_period_seconds": 10.0,
}
"""For observations of a few numbers or pixels, on any machine: CartPole, Catch."""

PRESETS: dict[str, dict[str, Any]] = {"paper": {}, "two-cores": TWO_CORES, "small": SMALL}


class TableConfig(NamedTuple):
    """One table of the replay; its numbers count transitions, or unrolls if the table holds those."""

    kind: TableKind
    samples_per_insert: float
    min_size_to_sample: int


def tables_of(config: ReplayConfig, unroll_starts: int) -> dict[str, TableConfig]:
    """Returns the tables by name. A fifo gives each unroll once, from the first on, unless it says otherwise.

    Raises: ConfigError when one is not NAME=KIND or NAME=KIND:SAMPLES_PER_INSERT:MIN_SIZE, or two have one name.
    """
    tables: dict[str, TableConfig] = {}
    for text in config.tables:
        name, _, rest = text.partition("=")
        kind, *numbers = rest.split(":")
        samples_per_insert, min_size = config.samples_per_insert, config.min_size_to_sample
        if kind == "uniform":
            min_size = max(min_size // unroll_starts, 1)
        elif kind == "fifo":
            samples_per_insert, min_size = 1.0, 1
        try:
            if numbers:
                samples_per_insert, min_size = float(numbers[0]), int(numbers[1])
        except (ValueError, IndexError):
            kind = ""
        if kind not in ("priority", "uniform", "fifo") or not name or len(numbers) > 2 or name in tables:
            raise ConfigError(
                f"--tables {text}: give NAME=KIND or NAME=KIND:SAMPLES_PER_INSERT:MIN_SIZE, each name once, "
                "with the kind priority, uniform or fifo"
            )
        if not (0 <= samples_per_insert < float("inf") and 1 <= min_size <= config.capacity):
            raise ConfigError(f"--tables {text}: samples an insert from 0, a size from 1 to --capacity are needed")
        tables[name] = TableConfig(cast(TableKind, kind), samples_per_insert, min_size)
    if not tables:
        raise ConfigError("--tables: at least one is needed")
    return tables
