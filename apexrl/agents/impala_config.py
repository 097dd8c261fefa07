"""IMPALA and LASER as a family: numbers with their sources, presets, and their use of the log. Loads no torch."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from apexrl.agents.contract import Family, Preset, Unrolls, Want, check_discrete
from apexrl.agents.recurrence import burn_in_unrolls, recurrent_fields
from apexrl.agents.replaying.mix import Distance, Selection, batch_sizes, parts_of, tables_for
from apexrl.config.schedules import Schedule
from apexrl.config.sections import AlgorithmConfig, Changing, Range, UpdateConfig
from apexrl.config.tables import TableSpec
from apexrl.errors import ConfigError
from apexrl.networks.config import ActorCriticConfig
from apexrl.types import EnvironmentSpec, Field, StreamSpec


@dataclasses.dataclass(frozen=True)
class ImpalaAlgorithm(AlgorithmConfig):
    """The numbers that actors and the learner must agree on."""

    unroll_starts: int = 20
    """Transitions in one unroll (IMPALA)."""
    lstm: bool = False
    """Give the network an LSTM, which also sees the last action and the last reward."""
    lstm_size: int = 256
    """Units of the LSTM (IMPALA)."""
    evaluation_epsilon: Annotated[float, Range(0, 1)] = 0.001
    """Probability of a random action in evaluations, besides the policy's own (C51, Dopamine)."""


@dataclasses.dataclass(frozen=True)
class ImpalaUpdate(UpdateConfig):
    """The learner's numbers for its updates."""

    batch_size: int = 32
    """Unrolls in a batch (IMPALA)."""
    mix: tuple[str, ...] = ("queue=1",)
    """Shares of a batch by kind of replay, each KIND=SHARE, or KIND@CAPACITY=SHARE for the newest unrolls only.
    Kinds: queue (new unrolls, each once), uniform, attentive and elite-1 to elite-4, which keep the most relevant of
    several candidates, and elite-insertion, whose table overwrites the least relevant. queue=1 is IMPALA, queue=1/8
    uniform=7/8 is LASER. The next three flags hold for all parts but those that say otherwise, as
    elite-1:distance=l2:candidates=8:anneal-updates=9000=1/4 does."""
    candidates: int = 4
    """Candidates for each unroll that attentive and elite replay keep (lambda). Where there is no queue,
    --samples-per-insert counts candidates."""
    anneal_updates: Annotated[int, Range(0)] = 0
    """Updates over which the candidates become as few as the kept ones, linearly; 0: their number stays."""
    distance: Distance = "kl"
    """Distance of an unroll from the policy, for elite-1 to elite-4: kl is KL(policy || behaviour), summed over its
    steps; l2 and cosine compare features with those at its first use. attentive compares them with those of the newest
    unrolls, by cosine unless this is l2. elite-insertion always takes kl."""
    optimizer: Literal["adam", "rmsprop"] = "rmsprop"
    """Adam, or RMSProp with decay 0.99, which is not centered (IMPALA)."""
    learning_rate: Changing = "6e-4:0"
    """Step size, which falls linearly until the run ends (IMPALA)."""
    optimizer_epsilon: float = 0.01
    """Adam adds it to the root of the squared gradients; RMSProp adds it to their mean, inside the root (IMPALA)."""
    reduction: Literal["sum", "mean"] = "sum"
    """Whether losses of a batch are added (IMPALA) or averaged. Rate, epsilon and the clip mean something only with it:
    `losses.policy_gradient.sum_losses` says how they change."""
    value_cost: Annotated[Changing, Range(0)] = 0.5
    """Weight of the value's loss (IMPALA)."""
    entropy_cost: Annotated[Changing, Range(0)] = 0.01
    """Weight of the policy's entropy (IMPALA)."""
    entropy_target: Annotated[Changing, Range(-1000, 1000)] = 0.0
    """Entropy in nats that the weight of the entropy is learned to keep, from --entropy-cost on, as SAC's temperature;
    0: it is not learned. The most is log A of A actions. That of a Gaussian is in halves of actions' ranges."""
    rho_bar: float = 1.0
    """Greatest importance ratio of a step's error: it decides which policy's value is learned (IMPALA)."""
    c_bar: float = 1.0
    """Greatest importance ratio of the trace: it decides how fast values are learned (IMPALA)."""
    pg_rho_bar: float = 1.0
    """Greatest importance ratio of an advantage, in the policy's gradient (IMPALA: that of --rho-bar)."""
    trace_lambda: Annotated[float, Range(0, 1)] = 1.0
    """Decay of the trace, besides its ratios (IMPALA: 1)."""
    trust_region: Annotated[float, Range(0)] = 0.1
    """Where a mix replays: states are rejected whose KL from the policy to the one implied by V-trace is not below it
    (LASER, whose authors do not state the number); 0: none is rejected."""
    replay_state: str = "walk"
    """The state with which an LSTM begins a replayed unroll: walk, burn-in:N, stored or zero. walk plays an episode's
    unrolls in order, each from the state in which the one before ended (LASER); attentive and elite replay and parts
    with a capacity, which choose single unrolls, take stored states. burn-in:N takes the state stored N steps earlier,
    and the newest parameters through them; N is a multiple of --unroll-starts. stored is the actor's."""
    policy_cloning_cost: Annotated[Changing, Range(0)] = 0.0
    """Weight of KL(behaviour || policy) on replayed unrolls (CLEAR: 0.01)."""
    value_cloning_cost: Annotated[Changing, Range(0)] = 0.0
    """Weight of the squared distance from the actor's value on replayed unrolls (CLEAR: 0.005)."""
    reward_transform: Literal["none", "soft-asymmetric"] = "none"
    """A change of the rewards in the log. soft-asymmetric (IMPALA's for DMLab) needs --clip-rewards no."""

    @property
    def kept(self) -> Mapping[str, Any]:
        return {**super().kept, "entropy_target": bool(self.entropy_target)}  # whether a temperature is learned


TWO_CORES: Preset = {
    "update": {"batch_size": 4, "optimizer": "adam", "learning_rate": "7e-4:0", "optimizer_epsilon": 1e-5,
               "reduction": "mean", "max_gradient_norm": 0.5, "value_cost": 0.5, "entropy_cost": 0.0015},
    "network": {"torso": "shallow", "channels": (16, 32, 32), "hidden_size": 256},
    "replay": {"capacity": 200_000, "min_size_to_sample": 2_000, "samples_per_insert": 4.0},
    "learning": {"publish_period_updates": 1, "publish_period_seconds": 0.2, "prefetch_batches": 2},
    "acting": {"parameter_period_frames": 80},  # an unroll
}  # fmt: skip
"""For games of Atari on two CPU cores: run i of docs/log/pong.md."""

SMALL: Preset = {
    "update": {**TWO_CORES["update"], "batch_size": 32, "learning_rate": "2e-4:0", "entropy_cost": 0.01},
    "network": {"torso": "shallow", "channels": (16, 32, 32), "hidden_size": 64},
    "replay": {**TWO_CORES["replay"], "capacity": 100_000},
    "learning": {**TWO_CORES["learning"], "publish_period_seconds": 0.02},  # hundreds of updates a second
    "acting": {"environments_per_worker": 8, "environment_groups": 1, "parameter_period_frames": 20},
    "evaluation": {"evaluation_period_seconds": 10.0},
}
"""For observations of a few numbers or pixels, on any machine: CartPole, Catch."""


def stream(algorithm: ImpalaAlgorithm, environment: EnvironmentSpec) -> StreamSpec:
    """Returns the stream of an environment: unrolls without overlap, with the policy that acted and its values.

    Raises: ConfigError when an action is a vector of numbers.
    """
    check_discrete(environment, takes_masks=True)
    return policy_stream(algorithm, environment)


def policy_stream(algorithm: ImpalaAlgorithm, environment: EnvironmentSpec) -> StreamSpec:
    """Returns the stream of an environment, whatever its actions are."""
    extras = [behavior_field(environment), Field("behavior_value", "step", "float16")]
    if algorithm.lstm:
        extras += recurrent_fields(algorithm.lstm_size)
    return environment.streamed(algorithm.unroll_starts, overlap_steps=0, extras=tuple(extras))


def behavior_field(environment: EnvironmentSpec) -> Field:
    """Returns the field of the policy that acted: log-probabilities of all actions, or moments of a Gaussian."""
    if environment.num_actions:  # float16 changes an importance ratio by 0.2 % at most, bfloat16 by 5 %
        return Field("behavior_log_probs", "step", "float16", (environment.num_actions,))
    return Field("behavior_moments", "step", "float32", (2 * len(environment.action_bounds),))


def wants(algorithm: ImpalaAlgorithm, update: ImpalaUpdate) -> tuple[Want, ...]:
    """Returns the wants of the learner: whole unrolls of each part of the mix, or candidates for them.

    Raises: ConfigError when mix and batch size, or the greatest importance ratios, contradict each other, or attentive
      replay has nothing to compare.
    """
    if update.rho_bar < update.c_bar:
        raise ConfigError(
            f"--rho-bar {update.rho_bar:g} is below --c-bar {update.c_bar:g}: V-trace need not converge; give another"
        )
    parts = parts_of(update.mix)
    sizes = batch_sizes(parts, update.batch_size)
    if (update.policy_cloning_cost or update.value_cloning_cost) and all(part.is_online for part in parts):
        raise ConfigError("--policy-cloning-cost and --value-cloning-cost are for replayed unrolls: add some to --mix")
    cost = Schedule.of(update.entropy_cost)
    if update.entropy_target and not (cost.start and cost.is_constant):
        raise ConfigError("--entropy-target learns the weight, from an --entropy-cost above 0 on: give a number alone")
    replays, selections = replay_view(algorithm, update), selections_of(update)
    found = []
    for part in parts:
        size = sizes[part.name]
        if part.is_online:
            found.append(Want(part.name, size, Unrolls()))
        elif part.name in selections:
            candidates = (part.candidates or update.candidates) * size
            found.append(Want(part.name, candidates, replays, num_chosen=size))
        else:
            # Through the whole log: no walk could be drawn from a part of it.
            walks = algorithm.lstm and update.replay_state == "walk" and not part.capacity
            found.append(Want(part.name, size, replays._replace(is_named=walks), is_replaced=walks))
    return tuple(found)


def selections_of(update: ImpalaUpdate) -> dict[str, Selection]:
    """Returns what the learner keeps of more candidates, by table.

    Raises: ConfigError when attentive replay has nothing to compare.
    """
    parts = parts_of(update.mix)
    sizes = batch_sizes(parts, update.batch_size)
    queue = next((part.name for part in parts if part.is_online), "")
    selections = {}
    for part in parts:
        if part.rule is None:
            continue
        if part.rule == "attentive" and not queue:
            raise ConfigError(f"--mix {part.name}: it compares features with those of new unrolls: add queue=SHARE")
        distance, anneal_updates = part.distance, part.anneal_updates
        if distance is None:
            distance = "cosine" if part.rule == "attentive" and update.distance == "kl" else update.distance
        anneal_updates = update.anneal_updates if anneal_updates is None else anneal_updates
        selections[part.name] = Selection(part.rule, sizes[part.name], distance, anneal_updates, queue)
    return selections


def replay_view(algorithm: ImpalaAlgorithm, update: ImpalaUpdate) -> Unrolls:
    """Returns the unrolls that the state of replayed ones needs besides them.

    Raises: ConfigError when --replay-state is none that is known, or the log holds no state so many steps earlier.
    """
    burn_in = burn_in_unrolls(update.replay_state, algorithm.unroll_starts, ("walk", "stored", "zero"))
    return Unrolls(burn_in_unrolls=burn_in if algorithm.lstm else 0)


def idle(command: Any, stream: StreamSpec) -> Mapping[str, str]:
    """Returns the fields without effect.

    Raises: ConfigError when no policy over so many actions has the entropy that is to be kept.
    """
    update, num_actions = command.update, stream.num_actions
    if update.entropy_target and num_actions:
        target, most = Schedule.of(update.entropy_target), math.log(num_actions)
        if not (0 < target.start < most and 0 < target.end < most):
            raise ConfigError(
                f"--entropy-target {update.entropy_target}: a policy over {num_actions} actions has an entropy between "
                f"0 and {most:.3g}: give one between them"
            )
    if update.value_cloning_cost and command.learning.scale_rewards:
        raise ConfigError("--value-cloning-cost: --scale-rewards changes the measure of logged values: leave one out")
    parts, fields = parts_of(update.mix), dict[str, str]()
    if all(part.is_online for part in parts):
        fields |= dict.fromkeys(("trust_region", "replay_state"), "a part of --mix that replays")
    if not command.algorithm.lstm:
        fields |= {"lstm_size": "--lstm", "replay_state": "--lstm"}
    selecting = [part for part in parts if part.rule is not None]
    for name in ("candidates", "distance", "anneal_updates"):
        if all(getattr(part, name) is not None for part in selecting):
            fields[name] = "a part of --mix that keeps some of several candidates, and leaves it to this flag"
    return fields | ({"first_deviation": "actions that are vectors"} if num_actions else {})


def tables(update: Any) -> tuple[TableSpec, ...]:
    """Returns the tables of any algorithm with a `mix`: a queue sets the pace, and nobody waits for other tables."""
    return tables_for(parts_of(update.mix))


FAMILY = Family(
    ImpalaAlgorithm(),
    ActorCriticConfig(),
    ImpalaUpdate(),
    stream,
    wants,
    tables,
    "apexrl.agents.impala",
    {
        "paper": {
            "acting": TWO_CORES["acting"],
            "learning": TWO_CORES["learning"],
            "replay": {"min_size_to_sample": 2_000},
        },
        "gpu": TWO_CORES,  # never trained on a GPU
        "two-cores": TWO_CORES,
        "small": SMALL,
    },
    raw_rewards_flag=lambda update: "--reward-transform" if update.reward_transform != "none" else "",
    idle=idle,
)
