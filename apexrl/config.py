"""Configuration: frozen dataclasses with the papers' defaults. Every command line is made from them (`flags.py`).

An algorithm brings its own dataclasses for the sections `algorithm`, `network` and `update`, and its presets. A preset
replaces some of the defaults, and the command line wins over both.
"""

import dataclasses
import math
from typing import Annotated, Literal, NamedTuple, cast

from apexrl.errors import ConfigError

TableKind = Literal["priority", "uniform", "fifo"]
PresetName = Literal["auto", "paper", "two-cores", "small"]
DEFAULT_AGENT = "apex-dqn"


@dataclasses.dataclass(frozen=True)
class Range:
    """The values that a number may have, as in `Annotated[float, Range(0, 1)]`. Both bounds are included.

    A field that names no range takes finite numbers above 0.
    """

    least: float | None = None  # none: above 0
    most: float = math.inf

    def wanted(self, number: float) -> str:
        """Returns the range in words, or an empty string when the number is in it."""
        if not math.isfinite(number):
            return "a finite number"
        if self.least is None and number <= 0:
            return "more than 0"
        if self.least is not None and number < self.least:
            return f"at least {self.least:g}"
        return "" if number <= self.most else f"at most {self.most:g}"


@dataclasses.dataclass(frozen=True)
class EnvConfig:
    """Which environment, and how it is presented to the agent."""

    env: str = "PongNoFrameskip-v4"
    """A Gymnasium id with discrete actions: PongNoFrameskip-v4, ALE/Breakout-v5, CartPole-v1, Catch-v0, Corridor-v0.
    `module:Id` imports the module that registers it first."""
    clip_rewards: Literal["auto", "yes", "no"] = "auto"
    """Train on the sign of the reward (Ape-X); auto: for Atari only. Reported returns are never clipped."""
    life_loss_terminal: bool = True
    """A lost life ends the episode for learning; the game goes on (Atari, training only)."""
    max_episode_frames: int = 108_000
    """Emulator frames after which a game is truncated: 30 minutes of Atari."""
    noop_max: Annotated[int, Range(0)] = 30
    """A game of Atari begins with 0 to `noop_max` - 1 no-op frames (ale-py); the first FIRE takes the place of one."""
    fire_at_reset: bool = True
    """A game of Atari that has FIRE begins with it, before the no-ops (ale-py's default); DQN begins without."""


@dataclasses.dataclass(frozen=True)
class AlgorithmConfig:
    """The numbers that actors and the learner must agree on; each family adds its own."""

    gamma: Annotated[float, Range(0, 1)] = 0.99
    """Discount a step."""
    unroll_starts: int = 80
    """Transitions that begin in one unroll."""


@dataclasses.dataclass(frozen=True)
class NetworkConfig:
    """The sizes of a network; each family has its own."""


@dataclasses.dataclass(frozen=True)
class UpdateConfig:
    """The learner's numbers for its updates; each family has its own, and adds others."""

    batch_size: int = 512
    """Transitions in a batch."""
    optimizer: Literal["adam", "rmsprop"] = "rmsprop"
    """Adam, or RMSProp."""
    learning_rate: float = 0.00025
    """Step size."""
    optimizer_epsilon: float = 1e-5
    """Adam adds it to the root of the squared gradients; RMSProp adds it to their variance, inside the root."""
    max_gradient_norm: float = 40.0
    """Gradients are scaled down to this norm."""


@dataclasses.dataclass(frozen=True)
class ReplayConfig:
    """The replay's numbers."""

    capacity: int = 2_000_000
    """Transitions kept; a soft limit (Ape-X)."""
    min_size_to_sample: int = 50_000
    """Transitions before the first batch (Ape-X)."""
    samples_per_insert: Annotated[float, Range(0)] = 0.8
    """Times that a transition is sampled on average; 0: actors and learner run free. Ape-X measured about 0.8."""
    priority_exponent: Annotated[float, Range(0, 1)] = 0.6
    """Exponent of the priorities in sampling (the papers' alpha)."""
    importance_exponent: Annotated[float, Range(0, 1)] = 0.4
    """Exponent of the importance weights (the papers' beta)."""
    eviction_period_batches: int = 100
    """The excess over the capacity is removed, oldest first, after this many batches (Ape-X), or when it gets large."""
    tables: tuple[str, ...] = ()
    """Tables over the log; none given: those of --agent. Each is NAME=KIND:SAMPLES_PER_INSERT:MIN_SIZE:CAPACITY, where
    numbers may be left out. Kinds: priority (transitions), uniform and fifo (whole unrolls). Actors wait for the
    learner of each; 0 samples an insert: nobody waits. A uniform table may have a capacity of its own, in unrolls."""
    journal_dir: str = "auto"
    """Directory where acknowledged experience is kept; off: in memory only. auto: in the directory of a run on one
    machine, else off."""
    journal_flush_seconds: Annotated[float, Range(0)] = 1.0
    """Seconds of experience that a power cut may take from the journal; 0: all that it acknowledges is on the disk."""
    journal_snapshot_seconds: float = 60.0
    """Seconds between snapshots of the priorities beside the journal."""


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
    """Learner's port for the metrics of all roles."""
    shards: Annotated[int, Range(1, 64)] = 1
    """Replay servers, each with its part of the experience and of the actors. Shard s has the ports --actor-port + 2 s
    and --batch-port + 2 s."""
    meeting_port: int = 52003
    """Port of the first learner's host where several learners meet."""
    patience_seconds: float = 600.0
    """Seconds that a role waits for another before it gives up."""
    keys: str = ""
    """Directory of CURVE keys (`apexrl keys DIR`): encrypts, and talks to their owners only."""

    def of_shard(self, shard: int) -> "WireConfig":
        """Returns the same with the ports of a shard's replay server."""
        return dataclasses.replace(self, actor_port=self.actor_port + 2 * shard, batch_port=self.batch_port + 2 * shard)


@dataclasses.dataclass(frozen=True)
class ActingConfig:
    """The actors' numbers."""

    num_workers: int = 1
    """Actor processes on this host."""
    environments_per_worker: int = 64
    """Environments of one process."""
    environment_groups: int = 2
    """Parts of a process's environments: while one steps, the actions for the next are chosen."""
    parameter_period_frames: int = 400
    """Frames of one environment between looks for newer parameters (Ape-X)."""
    compression_level: int = 1
    """zstd level of an unroll's block."""


@dataclasses.dataclass(frozen=True)
class LearningConfig:
    """The learner's process: device, memory, and the ends of its work."""

    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    num_learners: Annotated[int, Range(1, 64)] = 1
    """Learner processes on this host, started by torchrun. Each follows its part of the --shards and learns from its
    part of every batch; they add their gradients up."""
    learner_devices: str = ""
    """Devices of several learners, such as cuda:0,cuda:1; by default each has a GPU of its own, or all compute on the
    CPU where there is none."""
    learner_threads: int = 1
    """CPU threads of the learner's tensor operations. Without a GPU two such computations go on side by side."""
    memory_gb: Annotated[float, Range(0)] = 0.0
    """Gigabytes that experience may take on this host; 0: the free memory of the machine and of its control group."""
    prefetch_batches: int = 8
    """Batches gathered ahead of the update."""
    publish_period_updates: int = 25
    """Updates between publications of the parameters (Ape-X codes)."""
    publish_period_seconds: Annotated[float, Range(0)] = 0.2
    """Least seconds between publications: a fast learner makes many updates in that time."""
    checkpoint_period_seconds: float = 60.0
    """Seconds between checkpoints."""
    keep_checkpoints: Annotated[int, Range(0)] = 0
    """The newest so many checkpoints are kept, each under its update, for --fork RUN --at UPDATE."""
    total_updates: Annotated[int, Range(0)] = 0
    """End after so many updates; 0: never."""
    total_frames: Annotated[int, Range(0)] = 0
    """End after so many environment frames; 0: never."""


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """Evaluations: whole games, unclipped, nearly without exploration."""

    episodes: int = 10
    """Games in an evaluation."""
    evaluation_epsilon: Annotated[float, Range(0, 1)] = 0.001
    """Probability of a random action (C51, Dopamine); with 0 a policy that never serves the ball sits a game out."""
    evaluation_period_seconds: Annotated[float, Range(0)] = 60.0
    """Seconds from one evaluation's start to the next, while training."""
    checkpoint: str = ""
    """Play this checkpoint once instead of following the learner."""
    record_dir: str = ""
    """Write a video of the first game of each evaluation here."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """The flags of all commands."""

    agent: str = DEFAULT_AGENT
    """The algorithm: apex-dqn, impala, or module:name of your own. With --env Corridor-v0 the default is impala."""
    preset: PresetName = "auto"
    """Defaults of flags that are not given: the paper's, those for two CPU cores, or those for small environments."""
    seed: Annotated[int, Range(0)] = 0
    """Seed of everything random."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActorCommand(Command):
    """Plays environments and sends prioritized experience to the replay server."""

    env: EnvConfig = EnvConfig()
    wires: WireConfig = WireConfig()
    algorithm: AlgorithmConfig
    acting: ActingConfig = ActingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    device: str = "cpu"
    """Where actions are computed: cpu, cuda or cuda:N; auto: a GPU when there is one."""
    evaluate: bool = False
    """Evaluate instead of exploring: follow the learner, or play --checkpoint."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerCommand(ActorCommand):
    """Plays as one of several actor processes of a host; the process that starts them sets its flags."""

    worker_index: Annotated[int, Range(0)] = -1
    """Number of this process among the workers of its host; has to be given."""
    parameter_endpoint: str = ""
    """Where to fetch parameters instead of the learner."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayCommand(Command):
    """Keeps the log of experience and decides what is sampled."""

    wires: WireConfig = WireConfig()
    replay: ReplayConfig = ReplayConfig()


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnerCommand(Command):
    """Updates the network from sampled batches and publishes it; --from-journal DIR and --guest: from others'."""

    wires: WireConfig = WireConfig()
    algorithm: AlgorithmConfig
    update: UpdateConfig
    network: NetworkConfig
    learning: LearningConfig = LearningConfig()
    run_dir: str = "runs/by-hand"
    """Directory of checkpoints and event files; a checkpoint found there is continued."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfflineCommand(LearnerCommand):
    """Updates the network from the experience of others: of a journal, or of a run that goes on (--guest)."""

    replay: ReplayConfig = ReplayConfig()
    from_journal: str = ""
    """The journal of a replay server (journal/ of a run); it stays as it is."""
    guest: bool = False
    """Follow the replay of a run that goes on, with tables of our own; nobody there waits for us."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunCommand(Command):
    """Trains on this machine: replay, learner, actors, evaluator and TensorBoard."""

    env: EnvConfig = EnvConfig()
    wires: WireConfig = WireConfig()
    algorithm: AlgorithmConfig
    acting: ActingConfig = ActingConfig()
    replay: ReplayConfig = ReplayConfig()
    update: UpdateConfig
    network: NetworkConfig
    learning: LearningConfig = LearningConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    actor_device: str = "cpu"
    """Where actors compute their actions: cpu, cuda or cuda:N; auto: a GPU when there is one."""
    run_dir: str = ""
    """Directory of this run; by default runs/ENV-TIME."""
    resume: str = ""
    """Continue the run in this directory, with its configuration; flags given here win."""
    from_scratch: bool = False
    """With --resume or --fork: train a new network on the run's experience. With --resume, earlier results move to
    DIR/earlier-N."""
    fork: str = ""
    """Begin a new run with the newest checkpoint, the experience and the configuration of the run in this directory,
    which stays as it is; flags given here win."""
    at: Annotated[int, Range(0)] = 0
    """With --fork: take the checkpoint of this update, and the experience until then; 0: the newest."""
    from_journal: str = ""
    """Learn without actors from the experience in this journal (journal/ of a run), which stays as it is."""
    guest: str = ""
    """Learn without actors from the experience of the run in this directory, while it goes on; nobody there waits."""
    max_seconds: Annotated[float, Range(0)] = 0.0
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
    max_restarts: Annotated[int, Range(0)] = 10
    """Restarts of a role that dies, before the run gives up."""
    reproducible: bool = False
    """One process acts, stores and learns in turns on the CPU, slower: the same flags give the same network, bit for
    bit, on the same machine and versions."""
    evaluation_period_updates: int = 1000
    """With --reproducible: updates between evaluations; one is at the start, one at the end."""
    checkpoint_period_updates: int = 1000
    """With --reproducible: updates between checkpoints."""

    @property
    def has_actors(self) -> bool:
        """Whether the run plays itself, or learns from the experience of another one."""
        return not (self.from_journal or self.guest)


class TableConfig(NamedTuple):
    """One table of the replay; its numbers count transitions, or unrolls if the table holds those."""

    kind: TableKind
    samples_per_insert: float
    min_size_to_sample: int
    capacity: int = 0  # unrolls, the newest; 0: all that the log holds


def tables_of(config: ReplayConfig, unroll_starts: int, has_unroll_priorities: bool = False) -> dict[str, TableConfig]:
    """Returns the tables by name. A fifo gives each unroll once, from the first on, unless it says otherwise.

    Raises: ConfigError when one is not NAME=KIND:SAMPLES_PER_INSERT:MIN_SIZE:CAPACITY, or two have one name.
    """
    tables: dict[str, TableConfig] = {}
    for text in config.tables:
        name, _, rest = text.partition("=")
        kind, *numbers = rest.split(":")
        samples_per_insert, min_size = config.samples_per_insert, config.min_size_to_sample
        if kind == "uniform" or (kind == "priority" and has_unroll_priorities):
            min_size = max(min_size // unroll_starts, 1)
        elif kind == "fifo":
            samples_per_insert, min_size = 1.0, 1
        given = dict(zip(("samples", "size", "capacity"), numbers, strict=False))
        try:
            samples_per_insert = float(given.get("samples") or samples_per_insert)
            min_size = int(given.get("size") or min_size)
            capacity = int(given.get("capacity") or 0)
        except ValueError:
            kind = ""
        if kind not in ("priority", "uniform", "fifo") or not name or len(numbers) > 3 or name in tables:
            raise ConfigError(
                f"--tables {text}: give NAME=KIND:SAMPLES_PER_INSERT:MIN_SIZE:CAPACITY, each name once, with the kind "
                "priority, uniform or fifo; numbers may be left out"
            )
        if not (0 <= samples_per_insert < float("inf") and 1 <= min_size <= config.capacity):
            raise ConfigError(f"--tables {text}: samples an insert from 0, a size from 1 to --capacity are needed")
        if capacity < 0 or (given.get("capacity") and (kind != "uniform" or not capacity)):
            raise ConfigError(f"--tables {text}: only a uniform table has a capacity of its own, 1 unroll or more")
        tables[name] = TableConfig(cast(TableKind, kind), samples_per_insert, min_size, capacity)
    if not tables:
        raise ConfigError("--tables: at least one is needed")
    return tables


def part_of(config: ReplayConfig, num_shards: int) -> ReplayConfig:
    """Returns the numbers of one of several replay servers that share the experience equally."""
    if num_shards == 1:
        return config
    tables = []
    for text in config.tables:
        kind, *numbers = text.split(":")
        parts = [str(-(-int(n) // num_shards)) if i and n.isdecimal() else n for i, n in enumerate(numbers)]
        tables.append(":".join([kind, *parts]))
    capacity, min_size = (-(-n // num_shards) for n in (config.capacity, config.min_size_to_sample))
    return dataclasses.replace(config, capacity=capacity, min_size_to_sample=min_size, tables=tuple(tables))
