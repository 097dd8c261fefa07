"""IMPALA, a V-trace actor-critic (arXiv:1802.01561), and LASER, which mixes replay into its batches (arXiv:1909.11583).

`ImpalaActor` logs the probabilities of all actions. `ImpalaLearner` corrects for the difference from its own policy.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from apexrl.agents.cast_copy import CastCopy
from apexrl.agents.contract import Batches, Exploration, Extras, Leave, Observation, Outcome, UnrollBatch
from apexrl.agents.gradient import Gradient
from apexrl.agents.impala_config import ImpalaAlgorithm, ImpalaUpdate, lstm_size_of, wants
from apexrl.agents.mix import parts_of
from apexrl.agents.optimizers import make_optimizer, optimizer_tensors, schedule_rate, step_where_finite
from apexrl.agents.replay_states import ReplayStates
from apexrl.agents.unroll_batches import history_of, joined, row_results
from apexrl.losses.categorical import action_log_probs, entropy, log_probs
from apexrl.losses.clear import policy_cloning_loss, value_cloning_loss
from apexrl.losses.policy_gradient import entropy_loss, policy_gradient_loss, soft_asymmetric, sum_losses, value_loss
from apexrl.losses.relevance import accepted_states, relevance
from apexrl.losses.vtrace import VTrace, vtrace
from apexrl.networks.actor_critic import History, make_network, memory_of, split
from apexrl.networks.config import ActorCriticConfig, from_text
from apexrl.networks.device import autocast_for, copied_dtype
from apexrl.networks.frame_stack import FrameStack
from apexrl.networks.parameters import Parameters
from apexrl.networks.policy import Policy
from apexrl.types import StreamSpec, StreamUnrolls

LEAST_LOG_PROB = -30.0  # of the log: float16 stays precise, and no ratio overflows
MOST_VALUE = 60_000.0  # of the log: the greatest float16 is 65,504
RMSPROP_DECAY = 0.99  # (IMPALA)
MOST_SHOWN_RATIO = 100.0  # in a metric's mean


@dataclasses.dataclass
class ImpalaState:
    """The state of E environments between two calls of `act`."""

    stack: FrameStack
    core_state: np.ndarray  # [E, 2, lstm_size] float32
    last_action: np.ndarray  # [E] int32


class ImpalaActor:
    """Samples actions from the policy. Owned by one thread."""

    def __init__(self, algorithm: ImpalaAlgorithm, parameters: Parameters, device: torch.device):
        self._device = device
        self._policy, self.header = self._make_policy(parameters), parameters.header

    def load(self, parameters: Parameters) -> None:
        if parameters.header.network == self.header.network:
            self._policy.load(parameters.tensors)
        else:  # the learner came back with another network
            self._policy = self._make_policy(parameters)
        self.header = parameters.header

    def initial_state(self, num_envs: int) -> ImpalaState:
        core_state = np.zeros((num_envs, 2, lstm_size_of(self.header.spec)), np.float32)
        return ImpalaState(self._policy.frame_stack(num_envs), core_state, np.zeros(num_envs, np.int32))

    def explore(self, slots: np.ndarray, ladder_size: int) -> Exploration:
        """Returns zeros [E]: the policy itself explores."""
        return np.zeros(len(slots))

    def act(
        self, observation: Observation, exploration: Exploration, state: ImpalaState, rng: np.random.Generator
    ) -> tuple[np.ndarray, Extras, ImpalaState]:
        """Returns sampled actions [E], and the extras of the log.

        Args:
          exploration: [E] share of uniformly random actions; 0 in training.
        """
        frames, starts, rewards = observation
        memory = None
        if state.core_state.size:
            past = (starts, state.last_action.astype(np.int64), rewards, state.core_state)
            memory = memory_of(History(*map(torch.from_numpy, past)), self.header.spec.num_actions).numpy()
        values = torch.from_numpy(self._policy.values(frames, starts, state.stack, memory))
        logits, value, core_state, _ = split(values, self.header.spec.num_actions)
        uniform = torch.from_numpy(exploration).float().unsqueeze(1)
        probabilities = ((1 - uniform) * log_probs(logits).exp() + uniform / logits.shape[1]).numpy()
        actions = sampled(probabilities, rng)
        with np.errstate(divide="ignore"):
            behavior = np.log(probabilities).clip(LEAST_LOG_PROB)
        extras = {"behavior_log_probs": behavior.astype(np.float16),
                  "behavior_value": value.clamp(-MOST_VALUE, MOST_VALUE).numpy().astype(np.float16)}  # fmt: skip
        if core_state is None:
            return actions, extras, state
        extras |= {"core_state": state.core_state.astype(np.float16), "last_action": state.last_action,
                   "last_reward": rewards}  # fmt: skip
        return actions, extras, ImpalaState(state.stack, core_state.numpy(), actions)

    def priorities(self, unrolls: StreamUnrolls, extras: Extras) -> None:
        """Returns None: no table of IMPALA has priorities."""

    def _make_policy(self, parameters: Parameters) -> Policy:
        spec, network = parameters.header.spec, from_text(parameters.header.network, ActorCriticConfig)
        return Policy(spec, lambda: make_network(spec, network, lstm_size_of(spec)), self._device, parameters.tensors)


def sampled(probabilities: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Returns [E] int32 actions drawn by probabilities [E, A]."""
    cumulative = probabilities.cumsum(axis=1, dtype=np.float64)
    chosen = rng.random((len(probabilities), 1)) * cumulative[:, -1:]
    return (cumulative <= chosen).sum(axis=1).astype(np.int32)


class ImpalaLearner:
    """Updates the network from whole unrolls: new ones, and where the mix says so, replayed ones."""

    def __init__(self, algorithm: ImpalaAlgorithm, network: ActorCriticConfig, update: ImpalaUpdate, spec: StreamSpec,
                 device: torch.device):  # fmt: skip
        self.has_side_work = not spec.has_small_frames
        self._algorithm = algorithm
        self._update = update
        self._precision = autocast_for(device, spec)
        self._action_names = spec.action_names or tuple(map(str, range(spec.num_actions)))
        self._parts = parts_of(update.mix)
        self._online_share = float(sum(part.share for part in self._parts if part.is_online))
        self.network = make_network(spec, network, lstm_size_of(spec)).to(device)
        self.network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        wanted = wants(algorithm, update)
        selections = [want.selection for want in wanted if want.selection is not None]
        self._row_results = row_results(self._parts, selections, self.network.policy.in_features, device)
        self._replay_states = ReplayStates(self._parts, wanted, update.replay_state, lstm_size_of(spec), device)
        self._entropy_cost = torch.tensor(update.entropy_cost, device=device)
        self._gradient = Gradient(self.network, is_mean=update.reduction == "mean")
        self._copy = CastCopy(self.network, copied_dtype(device, spec))
        self._optimizer = make_optimizer(update, self._gradient.parameters, RMSPROP_DECAY, centered=False)

    @property
    def gradient(self) -> Tensor:
        return self._gradient.buffer

    def schedule(self, frames: int, share: float) -> None:
        """Sets the learning rate and the weight of the entropy."""
        update = self._update
        schedule_rate(self._optimizer, update, share)
        passed = min(frames / update.entropy_frames, 1.0) if update.entropy_frames else 0.0
        self._entropy_cost.fill_(update.entropy_cost + passed * (update.entropy_cost_end - update.entropy_cost))

    def use_thread(self, leave: Leave) -> None:
        """Leaves gradients of weights to the thread."""
        self._gradient.use_thread(leave, self._copy.network)

    def ahead(self, batches: Batches) -> None: ...  # an update needs nothing ahead

    def beside(self, batches: Batches, ahead: None) -> None: ...  # and nothing beside

    def gradients(self, batches: Batches, beside: Callable[[], None]) -> Outcome:
        """Computes the gradients of the losses: policy, value, entropy, and cloning where it is asked for."""
        algorithm, update = self._algorithm, self._update
        self._copy.cast()
        with self._precision():
            begun = self._replay_states.begin(batches, self._copy.network)
        batch, is_new = self._joined(begun)  # autocast refuses to join float16
        with self._precision():
            output = self._copy.network.unroll(batch.observation, history_of(batch), num_steps=len(batch.action))
        self._replay_states.keep(batches, output.state)
        logits, values = output.logits[:-1], output.values[:-1]
        behavior, valid = batch.extras["behavior_log_probs"], ~batch.start[1:]  # a reset ignored its action
        log_rhos = action_log_probs(logits, batch.action) - action_log_probs(behavior, batch.action)
        accept = None
        if self._online_share < 1 and update.trust_region:
            accept = accepted_states(behavior, logits, update.trust_region, update.rho_bar)
        rewards = soft_asymmetric(batch.reward) if update.reward_transform == "soft-asymmetric" else batch.reward
        targets = vtrace(
            log_rhos, algorithm.gamma * batch.discount, rewards, values, output.values[-1],
            valid=valid, accept=accept,
            lambda_=update.trace_lambda, rho_bar=update.rho_bar, c_bar=update.c_bar, pg_rho_bar=update.pg_rho_bar,
        )  # fmt: skip
        losses = policy_gradient_loss(logits, batch.action, targets.pg_advantages)
        losses = losses + update.value_cost * value_loss(values, targets.vs)
        losses = losses + self._entropy_cost * self._entropy_weight(is_new) * entropy_loss(logits)
        losses = losses.masked_fill(~targets.learned, 0)
        if update.policy_cloning_cost or update.value_cloning_cost:
            cloning = update.policy_cloning_cost * policy_cloning_loss(behavior, logits)
            cloning = cloning + update.value_cloning_cost * value_cloning_loss(batch.extras["behavior_value"], values)
            losses = losses + cloning.masked_fill(is_new, 0)
        loss, count = sum_losses(losses, valid, batch.weight)
        self._gradient.compute(loss, count, by=self._copy.parameters)
        real = valid & (batch.weight > 0)
        metrics = metrics_of(real, logits.detach(), values.detach(), log_rhos.detach(), targets, self._action_names)
        rejected = None if accept is None else ~accept
        rows = self._row_results.of(begun, self._parts, output, behavior, valid, rejected)
        overwriting = [part.name for part in self._parts if part.overwrites_worst]
        priorities = {name: relevance(rows[name]["distance"]) for name in overwriting}
        return Outcome(priorities, {"loss": loss.detach() / count.masked_fill(count == 0, 1)} | metrics, rows)

    def apply(self) -> dict[str, Tensor]:
        """Clips the gradients and takes the optimizer's step."""
        return {"gradient_norm": step_where_finite(self._optimizer, self._gradient, self._update.max_gradient_norm)}

    def is_refresh_due(self, num_updates: int) -> bool:
        return False

    def refresh(self) -> None:
        """Does nothing: there is no target network."""

    def acting_tensors(self) -> dict[str, Tensor]:
        return self.network.state_dict()

    def learning_tensors(self) -> dict[str, Tensor]:
        schedules = {"entropy_cost": self._entropy_cost}
        return schedules | self._replay_states.tensors | optimizer_tensors(self._optimizer, self._gradient)

    def _joined(self, batches: Batches) -> tuple[UnrollBatch, Tensor]:
        """Returns the batches of all parts as one of B rows, and [B] bool: which of them are new."""
        parts = [batches[part.name] for part in self._parts]
        is_new = [torch.full_like(batch.weight, part.is_online, dtype=torch.bool)
                  for part, batch in zip(self._parts, parts, strict=True)]  # fmt: skip
        return joined(parts), torch.cat(is_new)

    def _entropy_weight(self, is_new: Tensor) -> Tensor | float:
        """Returns weights [B]: new unrolls alone keep the entropy up (LASER), with the weight that all would have."""
        return is_new / self._online_share if self._online_share else 1.0


def metrics_of(real: Tensor, logits: Tensor, values: Tensor, log_rhos: Tensor, targets: VTrace,
               action_names: Sequence[str]) -> dict[str, Tensor]:  # fmt: skip
    """Returns means over the real steps [T, B] of a batch, those that are no resets and do not only fill it."""
    share = real / real.sum().clamp(min=1)

    def mean(numbers: Tensor) -> Tensor:
        return (share * numbers.masked_fill(~real, 0)).sum()

    probabilities = (share.unsqueeze(-1) * log_probs(logits).exp()).sum(dim=(0, 1))
    return {
        "td_error": mean(targets.errors.abs()),
        "value_mean": mean(values),
        "entropy": mean(entropy(logits)),
        "importance_ratio": mean(log_rhos.exp().clamp(max=MOST_SHOWN_RATIO)),
        "rejected_share": mean((~targets.learned).float()),
    } | {f"probability_{name}": p for name, p in zip(action_names, probabilities.unbind(), strict=True)}


def check_network(network: ActorCriticConfig, spec: StreamSpec) -> None:
    """Raises ConfigError when the network does not take the observations."""
    with torch.device("meta"):
        make_network(spec, network, lstm_size_of(spec))


make_actor, make_learner = ImpalaActor, ImpalaLearner
