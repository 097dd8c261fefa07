"""Commands: the flags of each program, as sections of the configuration and flags of its own."""

import dataclasses
import math
from typing import Annotated

from apexrl.config.sections import (
    DEFAULT_AGENT,
    LONGEST_SECONDS,
    ActingConfig,
    AlgorithmConfig,
    EnvConfig,
    EvaluationConfig,
    LearningConfig,
    NetworkConfig,
    Range,
    ReplayConfig,
    UpdateConfig,
    WireConfig,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """The flags of all commands."""

    agent: str = DEFAULT_AGENT
    """apex-dqn, apex-dpg, sac, impala, impact, pqn, r2d2, or your own module:name. A run has sac where actions are
    vectors, and another one for some environments: Corridor-v0 has impala, BreakoutNoFrameskip-v4 impact."""
    preset: str = "auto"
    """Defaults of flags that are not given: paper, gpu, two-cores (of a CPU), small (environments). impact has
    vectors and walkers (actions), and apex-dpg td3 and d4pg, too."""
    seed: Annotated[int, Range(0, 2**63 - 1)] = 0
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
    network: str = ""
    """The --network of the learner, whose layers these actors import."""
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
    update: UpdateConfig
    shard: Annotated[int, Range(0, 63)] = 0
    """Which of the --shards this server is: it takes that one's ports, and its part of the replay's numbers."""
    stream: str = ""
    """The only stream that it takes, as JSON: `apexrl train` gives its own. Without, that of the first actor."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnerCommand(Command):
    """Updates the network from sampled batches and publishes it; --from-journal DIR and --guest: from others'."""

    wires: WireConfig = WireConfig()
    algorithm: AlgorithmConfig
    update: UpdateConfig
    network: NetworkConfig
    learning: LearningConfig = LearningConfig()
    learner_hosts: Annotated[int, Range(1, 64)] = 1
    """Hosts with --num-learners each, which meet at the --learner-host and its --meeting-port."""
    learner_host_rank: Annotated[int, Range(0, 63)] = 0
    """Which of the --learner-hosts this is; host 0 publishes, evaluates, and writes the run."""
    ends_at: Annotated[float, Range(0)] = 0.0
    """Seconds since 1970 at which the run is complete, and a falling rate at its end; `apexrl train` gives that of its
    --max-seconds."""
    run_dir: str = "runs/by-hand"
    """Directory of checkpoints and event files; a checkpoint found there is continued."""

    @property
    def team_size(self) -> int:
        """Learners of all hosts together, which make each update."""
        return self.learning.num_learners * self.learner_hosts


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
    learning: LearningConfig = LearningConfig(final_evaluation_seconds=600.0)
    evaluation: EvaluationConfig = EvaluationConfig()
    actor_device: str = "cpu"
    """Where actors compute their actions: cpu, cuda or cuda:N; auto: a GPU when there is one."""
    run_dir: str = ""
    """Directory of this run; by default runs/ENV-NAME-TIME."""
    name: str = ""
    """Name of a new run, in its directory's name and so in TensorBoard; by default the flags that were given."""
    resume: str = ""
    """Continue the run in this directory, with its configuration; flags given here win."""
    trust: bool = False
    """Import also the modules that only the files of an earlier run name, of --resume, --fork, --guest, a journal."""
    from_scratch: bool = False
    """With --resume or --fork: a new network learns from the experience. --resume moves results to DIR/earlier-N."""
    fork: str = ""
    """Begin a new run with the checkpoint, the experience and the flags of this one, which stays; flags here win."""
    at: Annotated[int, Range(0)] = 0
    """With --fork: take the checkpoint of this update, and the experience until then; 0: the newest."""
    from_journal: str = ""
    """Learn without actors from the experience in this journal (journal/ of a run), which stays as it is."""
    guest: str = ""
    """Learn without actors from the experience of the run in this directory, while it goes on; nobody there waits."""
    max_seconds: Annotated[float, Range(0, LONGEST_SECONDS)] = 0.0
    """End after so many seconds, and here the evaluation of the last network; 0: never. Runs on Ray and reproducible
    ones end without it."""
    stop_at_return: Annotated[float | None, Range(-math.inf)] = None
    """End as soon as the mean return of an evaluation is so high."""
    callback: tuple[str, ...] = ()
    """Classes `module:name` that hear of each status and evaluation, and may end the run; may be repeated."""
    tensorboard: bool = True
    """Serve TensorBoard."""
    tensorboard_port: Annotated[int, Range(1, 65535)] = 6006
    """Port of TensorBoard."""
    port_base: Annotated[int, Range(0, 65000)] = 0
    """The run's ports are those from here on; 0: the usual ones, or free ones where those are taken."""
    tensorboard_host: str = "127.0.0.1"
    """Address that TensorBoard listens on."""
    wandb: bool = False
    """Tell Weights & Biases about the run; its variables say how (WANDB_MODE=offline)."""
    mlflow: bool = False
    """Tell MLflow about the run; its variables say where (MLFLOW_TRACKING_URI)."""
    evaluator: bool = True
    """Evaluate while training; with at most 4 cores at a lower priority than the learner."""
    smoke: bool = False
    """A short run through all processes; fails unless all of them have worked within ten minutes."""
    max_restarts: Annotated[int, Range(0)] = 10
    """Restarts of a role that dies, before the run gives up."""
    reproducible: bool = False
    """One process does all in turns on the CPU: the same flags give the same network, bit for bit, on one machine."""
    evaluation_period_updates: int = 1000
    """With --reproducible: updates between evaluations; one is at the start, one at the end."""
    checkpoint_period_updates: int = 1000
    """With --reproducible: updates between checkpoints."""

    @property
    def has_actors(self) -> bool:
        """Whether the run plays itself, or learns from the experience of another one."""
        return not (self.from_journal or self.guest)
