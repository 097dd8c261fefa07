"""Configuration: frozen dataclasses with the papers' defaults. Every command line is made from them (`flags.py`).

An algorithm brings its own sections `algorithm`, `network` and `update`, and presets. The command line wins over both.
"""

import dataclasses
import decimal
import json
import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from apexrl.errors import MALFORMED, ConfigError

PresetName = Literal["auto", "paper", "gpu", "two-cores", "small"]  # of all algorithms; a family may have others
DEFAULT_AGENT = "apex-dqn"
Changing = float | str  # a number, or as START:END:FRAMES its way through a run: `schedules.Schedule`
MULTIPLES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}
LONGEST_VARIANT = 2000  # characters; the wire takes no more
MAX_DIGITS = 100  # of a number that a person writes
GREATEST = 1e15  # of numbers without an end of their own: sums of several fit messages and files, which end at 2**53
LONGEST_SECONDS = 1e9  # 31 years; clocks of the operating system take ten times as many
MOST_FRAMES = 2_000_000_000  # of a game, which ale-py counts in 32 bits
KWARGS_EXAMPLE = """give e.g. --env-kwargs '{"continuous": false}'"""


@dataclasses.dataclass(frozen=True)
class Range:
    """The values of a number, such as `Annotated[float, Range(0, 1)]`, both ends included: by default all above 0."""

    least: float | None = None  # none: above 0
    most: float = GREATEST

    def wanted(self, number: float) -> str:
        """Returns the range in words, or an empty string when the number is in it."""
        if isinstance(number, float) and not math.isfinite(number):
            return "a finite number"
        if self.least is None and number <= 0:
            return "more than 0"
        if self.least is not None and number < self.least:
            return f"at least {self.least:g}"
        return "" if number <= self.most else f"at most {self.most:g}"


def whole_number(text: str) -> int:
    """Returns a whole number as people write it: 200000, 200_000, 2e5, 5M, 0.5k.

    Raises: ValueError when it is none.
    """
    found = re.fullmatch(r"([-+]?[\d_]*\.?\d*(?:[eE][-+]?\d{1,2})?)([kKMG]?)", text)
    try:
        is_short = len(text) <= MAX_DIGITS
        number = decimal.Decimal(found[1]) * MULTIPLES[found[2].replace("K", "k")] if found and is_short else None
    except decimal.InvalidOperation:
        number = None
    if number is None or number != int(number):
        raise ValueError(f"{text:.100} is no whole number: give one like 200000, 200_000, 2e5 or 5M")
    return int(number)


@dataclasses.dataclass(frozen=True)
class EnvConfig:
    """Which environment, and how it is presented to the agent."""

    env: str = "PongNoFrameskip-v4"
    """A Gymnasium id, as ALE/Breakout-v5, CartPole-v1, Catch-v0; `module:Id` imports a module first, also from here."""
    env_kwargs: str = ""
    """Arguments of the environment as a JSON object, such as {"continuous": false}; "{copy}" is a copy's number."""
    wrapper: tuple[str, ...] = ()
    """Functions or classes `module:name` that take an environment and return one, innermost first; may be repeated."""
    grayscale: bool = False
    """Make colour pictures gray (not Atari's, which are)."""
    resize: tuple[int, ...] = ()
    """Pixels of a side to which pictures are scaled, or height and width (not Atari's, which are 84x84)."""
    frame_stack: Annotated[int, Range(0, 64)] = 0
    """Frames in one observation; 0: 4 for Atari, 1 for all others."""
    clip_rewards: Literal["auto", "yes", "no"] = "auto"
    """Train on the sign of the reward (Ape-X); auto: for Atari only. Reported returns are never clipped."""
    life_loss_terminal: bool = True
    """A lost life ends the episode for learning; the game goes on (Atari, training only)."""
    max_episode_frames: Annotated[int, Range(1, MOST_FRAMES)] = 108_000
    """Emulator frames after which a game is truncated: 30 minutes of Atari."""
    noop_max: Annotated[int, Range(0, MOST_FRAMES)] = 30
    """A game of Atari begins with 0 to `noop_max` - 1 no-op frames (ale-py); the first FIRE takes the place of one."""
    fire_at_reset: bool = True
    """A game of Atari that has FIRE begins with it, before the no-ops (ale-py's default); DQN begins without."""
    repeat_action_probability: Annotated[float, Range(0, 0.99)] = 0.0
    """Probability that the last action is taken again (sticky actions, arXiv:1709.06009: 0.25); 0: as the id has it."""
    step_deadline_seconds: Annotated[float, Range(0, LONGEST_SECONDS)] = 120.0
    """Seconds after which a step that has not returned is named and ends its process, which starts again; 0: never."""
    action_mask: str = ""
    """Key of the observation's part that says which actions are allowed now, 1 or 0 each; `info:KEY`: of the info."""

    @property
    def kwargs(self) -> dict[str, Any]:
        """The arguments of the environment. Raises ConfigError when they are no JSON object."""
        try:
            given = json.loads(self.env_kwargs or "{}")
        except MALFORMED as error:
            raise ConfigError(f"--env-kwargs {self.env_kwargs}: this is no JSON ({error}); {KWARGS_EXAMPLE}") from error
        if isinstance(given, dict):
            return given
        raise ConfigError(f"--env-kwargs {self.env_kwargs}: this is no JSON object; {KWARGS_EXAMPLE}")

    @property
    def variant(self) -> str:
        """The settings that make it another environment than its id alone, as JSON, or "".

        Raises: ConfigError when they are too long to be told to other processes; as `kwargs` does.
        """
        names = ("wrapper", "grayscale", "resize", "repeat_action_probability", "action_mask")
        settings = {"env_kwargs": self.kwargs} | {name: getattr(self, name) for name in names}
        changed = {name: value for name, value in settings.items() if value}
        text = json.dumps(changed, sort_keys=True) if changed else ""
        if len(text) > LONGEST_VARIANT:
            raise ConfigError(
                f"--env-kwargs and --wrapper make {len(text)} characters, {LONGEST_VARIANT} are the most: "
                "register an id of your own with these arguments"
            )
        return text

    @classmethod
    def of_variant(cls, env: str, variant: str, frame_stack: int) -> "EnvConfig":
        """Returns the configuration of an environment with the settings of a `variant`, which came out of a file.

        Raises: ConfigError when these are no such settings.
        """
        try:
            settings = json.loads(variant or "{}")
            kwargs, wrapper, resize = (settings.get(name, ()) for name in ("env_kwargs", "wrapper", "resize"))
            text, size = json.dumps(kwargs) if kwargs else "", tuple(map(int, resize))
            repeats, gray = float(settings.get("repeat_action_probability", 0)), bool(settings.get("grayscale"))
            mask = str(settings.get("action_mask", ""))
            return cls(env, text, tuple(map(str, wrapper)), gray, size, frame_stack, repeat_action_probability=repeats,
                       action_mask=mask)  # fmt: skip
        except (*MALFORMED, TypeError, AttributeError, OverflowError) as error:
            raise ConfigError(f"{variant[:200]} are no settings of {env}: {error}") from error


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

    network: str = dataclasses.field(default="", kw_only=True)
    """Layers of your own that look at observations, `module:name`, in the place of the family's first ones."""
    inputs: tuple[str, ...] = dataclasses.field(default=(), kw_only=True)
    """Parts of a vector of observations as NAME=SHAPE, such as map=9x9x3, for --network; `apexrl train` finds them."""


@dataclasses.dataclass(frozen=True)
class UpdateConfig:
    """The learner's numbers for its updates; each family has its own, and adds others."""

    batch_size: int = 512
    """Transitions in a batch."""
    optimizer: Literal["adam", "rmsprop"] = "rmsprop"
    """Adam, or RMSProp."""
    learning_rate: Changing = 0.00025
    """Step size. Like all numbers that may change it takes START:END:FRAMES, too: 3e-4:1e-5:16M goes linearly from one
    to the other over so many frames, 3e-4:0 until the run ends, and with :cosine behind it along a cosine."""
    optimizer_epsilon: float = 1e-5
    """Adam adds it to the root of the squared gradients; RMSProp adds it to their variance, inside the root."""
    max_gradient_norm: Changing = 40.0
    """Gradients are scaled down to this norm."""

    @property
    def kept(self) -> Mapping[str, Any]:
        """The fields that the tensors of a checkpoint depend on: a run that goes on cannot change them."""
        return {"optimizer": self.optimizer}


@dataclasses.dataclass(frozen=True)
class ReplayConfig:
    """The replay's numbers."""

    capacity: int = 2_000_000
    """Transitions kept; a soft limit (Ape-X)."""
    min_size_to_sample: int = 50_000
    """Transitions before the first batch (Ape-X); a queue gives what there is."""
    samples_per_insert: Annotated[float, Range(0)] = 0.8
    """Times that a transition is sampled on average; 0: run free. Ape-X: about 0.8. A queue has its own pace."""
    priority_exponent: Annotated[float, Range(0, 1)] = 0.6
    """Exponent of the priorities in sampling (the papers' alpha)."""
    importance_exponent: Annotated[float, Range(0, 1)] = 0.4
    """Exponent of the importance weights (the papers' beta)."""
    eviction_period_batches: int = 100
    """The excess over the capacity is removed, oldest first, after this many batches (Ape-X), or when it gets large."""
    tables: tuple[str, ...] = ()
    """Tables over the log; none: those of --agent. Each is NAME=KIND:SAMPLES_PER_INSERT:MIN_SIZE:CAPACITY:MOST_DRAWS,
    where numbers may be left out. Kinds: priority (transitions), uniform, elite, fifo, lifo (whole unrolls). Actors
    wait for the learner of each; 0 samples an insert: nobody waits. uniform may have a capacity in unrolls, elite
    needs one. An item leaves with the batch that reaches so many draws of it. LOG/NAME: a table of one of several logs,
    in a replay server alone."""
    journal_dir: str = "auto"
    """Where acknowledged experience is kept; off: in memory; auto: in the directory of a run on one machine, or off."""
    journal_flush_seconds: Annotated[float, Range(0, LONGEST_SECONDS)] = 1.0
    """Seconds of experience that a power cut may take from the journal; 0: all that it acknowledges is on the disk."""
    journal_snapshot_seconds: Annotated[float, Range(most=LONGEST_SECONDS)] = 60.0
    """Seconds between snapshots of the priorities beside the journal."""
    max_gb: Annotated[float, Range(0)] = 0.0
    """Gigabytes of compressed unrolls that the replay server keeps at most; 0: --capacity is the only bound."""


@dataclasses.dataclass(frozen=True)
class WireConfig:
    """Where the roles find each other."""

    replay_host: str = "127.0.0.1"
    """Host of the replay server."""
    learner_host: str = "127.0.0.1"
    """Host of the learner; of several hosts, the first."""
    bind_host: str = "127.0.0.1"
    """Address that servers listen on; 0.0.0.0 for other hosts to reach them."""
    actor_port: Annotated[int, Range(1, 65535)] = 51001
    """Replay server's port for actors."""
    batch_port: Annotated[int, Range(1, 65535)] = 51002
    """Replay server's port for learners."""
    parameter_port: Annotated[int, Range(1, 65535)] = 52001
    """Learner's port for parameters."""
    metrics_port: Annotated[int, Range(1, 65535)] = 52002
    """Learner's port for the metrics of all roles."""
    shards: Annotated[int, Range(1, 64)] = 1
    """Replay servers, each with its part of experience and actors; shard s has --actor-port and --batch-port + 2 s."""
    meeting_port: Annotated[int, Range(1, 65535)] = 52003
    """Port of the first learner's host where several learners meet."""
    patience_seconds: Annotated[float, Range(most=LONGEST_SECONDS)] = 600.0
    """Seconds that a role waits for another before it gives up, and the launcher until an environment is made."""
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
    environments_per_worker: Annotated[int, Range(1, 4096)] = 64
    """Environments of one process."""
    environment_groups: Annotated[int, Range(1, 4096)] = 2
    """Parts of a process's environments: while one steps, the actions for the next are chosen."""
    parameter_period_frames: int = 400
    """Frames of one environment between looks for newer parameters (Ape-X)."""
    compression_level: Annotated[int, Range(1, 22)] = 1
    """zstd level of an unroll's block."""


@dataclasses.dataclass(frozen=True)
class LearningConfig:
    """The learner's process: device, memory, and the ends of its work."""

    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    num_learners: Annotated[int, Range(1, 64)] = 1
    """Learner processes of a host, by torchrun, each for its part of the --shards and batches; gradients are added."""
    learner_devices: str = ""
    """Devices of several learners, such as cuda:0,cuda:1; by default a GPU each, or the CPU where there is none."""
    learner_threads: Annotated[int, Range(1, 1024)] = 1
    """CPU threads of the learner's tensor operations. Without a GPU two such computations go on side by side."""
    memory_gb: Annotated[float, Range(0)] = 0.0
    """Gigabytes that experience may take on this host; 0: the free memory of the machine and of its control group."""
    prefetch_batches: Annotated[int, Range(1, 64)] = 8
    """Batches gathered ahead of the update."""
    normalize_observations: bool = False
    """Show networks vectors less the run's mean, in its deviations; both go with the parameters."""
    scale_rewards: bool = False
    """Learn from rewards in deviations of their discounted sum over the run. Reported returns are never scaled."""
    publish_period_updates: int = 25
    """Updates between publications of the parameters (Ape-X codes)."""
    publish_period_seconds: Annotated[float, Range(0, LONGEST_SECONDS)] = 1.0
    """Least seconds between publications: a fast learner makes many updates in that time."""
    publish_megabytes_per_second: Annotated[float, Range(0)] = 250.0
    """Most that all actor hosts together are sent (a fifth of 10 Gbit/s): with many, publications are rarer; 0: any."""
    checkpoint_period_seconds: Annotated[float, Range(most=LONGEST_SECONDS)] = 60.0
    """Seconds between checkpoints."""
    keep_checkpoints: Annotated[int, Range(0)] = 0
    """The newest so many checkpoints are kept, each under its update, for --fork RUN --at UPDATE."""
    total_updates: Annotated[int, Range(0)] = 0
    """End after so many updates; 0: never."""
    total_frames: Annotated[int, Range(0)] = 0
    """End after so many environment frames; 0: never."""
    final_evaluation_seconds: Annotated[float, Range(0, LONGEST_SECONDS)] = 0.0
    """Seconds that a learner at the end of its run waits until its last network is evaluated; 0: it ends."""
    mix_journal: str = ""
    """A share of each batch that replays comes from a journal, DIR=SHARE as in runs/a/journal=1/2 (RLPD)."""


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """Evaluations: whole games, unclipped, nearly without exploration."""

    episodes: Annotated[int, Range(1, 10_000)] = 10
    """Games in an evaluation; as many more, which count too, where it may be the best."""
    evaluation_period_seconds: Annotated[float, Range(0, LONGEST_SECONDS)] = 60.0
    """Seconds from one evaluation's start to the next, while training."""
    checkpoint: str = ""
    """Play this checkpoint once instead of following the learner."""
    record_dir: str = ""
    """Write a video of an evaluation's first game here."""
    film_every: Annotated[int, Range(1)] = 5
    """Film the first evaluation, every so manieth after it, and the last. A film gets 10 seconds of drawing."""
