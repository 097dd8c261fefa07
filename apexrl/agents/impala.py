"""IMPALA, a V-trace actor-critic (arXiv:1802.01561), and LASER, which mixes replay into its batches (arXiv:1909.11583).

`ImpalaActing` logs the probabilities of all actions. `ImpalaLearning` corrects for the difference from its own policy.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from apexrl.agents.contract import Batches, Exploration, Extras, UnrollBatch
from apexrl.agents.engine.plain import Acting, Learning, Losses, Networks, RMSPropForm
from apexrl.agents.engine.plain_actor import actor_of
from apexrl.agents.engine.plain_learner import learner_of
from apexrl.agents.impala_config import ImpalaAlgorithm, ImpalaUpdate, behavior_field, selections_of, wants
from apexrl.agents.recurrence import lstm_size_of
from apexrl.agents.replaying.mix import parts_of
from apexrl.agents.replaying.policy_targets import Rows, Traced, metrics_of, policies_of
from apexrl.agents.replaying.replay_states import ReplayStates
from apexrl.agents.replaying.rows import ReplayRows
from apexrl.agents.replaying.unroll_batches import RowResults, history_of, joined
from apexrl.config.schedules import Schedule
from apexrl.losses.categorical import kl_divergence, log_probs
from apexrl.losses.maximum_entropy import temperature_loss
from apexrl.losses.policy_gradient import policy_gradient_loss, soft_asymmetric, sum_losses, value_loss
from apexrl.losses.relevance import accepted_states, relevance
from apexrl.losses.vtrace import vtrace
from apexrl.networks.actor_critic import ActorCriticNetwork
from apexrl.networks.config import ActorCriticConfig
from apexrl.networks.device import in_full_precision
from apexrl.networks.temperature import Temperature
from apexrl.streams import StreamOrder
from apexrl.types import FORBIDDEN, StreamSpec

LEAST_LOG_PROB = -30.0  # of the log: float16 stays precise, and no ratio overflows
MOST_VALUE = 60_000.0  # of the log: the greatest float16 is 65,504


class ImpalaActing(Acting):
    """Samples actions from the policy, and logs it."""

    algorithm: ImpalaAlgorithm

    @property
    def evaluation_exploration(self) -> float:
        return self.algorithm.evaluation_epsilon

    def act(self, values: np.ndarray, exploration: Exploration, rng: np.random.Generator) -> tuple[np.ndarray, Extras]:
        """Returns sampled actions [E], and the extras of the log.

        Args:
          exploration: [E] share of uniformly random actions, of those that are allowed; 0 in training.
        """
        logits, value = torch.from_numpy(values[:, :-1]), torch.from_numpy(values[:, -1])
        uniform, allowed = torch.from_numpy(exploration).float().unsqueeze(1), logits > FORBIDDEN
        drawn = uniform * allowed / allowed.sum(dim=1, keepdim=True)
        probabilities = ((1 - uniform) * log_probs(logits).exp() + drawn).numpy()
        with np.errstate(divide="ignore"):
            behavior = np.log(probabilities).clip(LEAST_LOG_PROB)
        return sampled(probabilities, rng), {
            "behavior_log_probs": behavior.astype(np.float16),
            "behavior_value": value.clamp(-MOST_VALUE, MOST_VALUE).numpy().astype(np.float16),
        }


def sampled(probabilities: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Returns [E] int32 actions drawn by probabilities [E, A]."""
    cumulative = probabilities.cumsum(axis=1, dtype=np.float64)
    chosen = rng.random((len(probabilities), 1)) * cumulative[:, -1:]
    return (cumulative <= chosen).sum(axis=1).astype(np.int32)


class ImpalaLearning(Learning):
    """The losses of whole unrolls: new ones, and where the mix says so, replayed ones."""

    algorithm: ImpalaAlgorithm
    update: ImpalaUpdate
    acting = called_once = ("network",)
    rmsprop = RMSPropForm(decay=0.99, centered=False)  # (IMPALA)

    def __init__(self, *sections: Any):
        super().__init__(*sections)
        update, spec, device = self.update, self.spec, self.device
        self.is_mean = update.reduction == "mean"
        self.policies = policies_of(spec, device)
        self._behavior = behavior_field(spec).name
        self._parts, wanted = parts_of(update.mix), wants(self.algorithm, update)
        self._online_share = float(sum(part.share for part in self._parts if part.is_online))
        num_features = lstm_size_of(spec) or self.network.hidden_size
        self._row_results = RowResults(self._parts, selections_of(update).values(), num_features, device)
        self._replay_states = ReplayStates(self._parts, wanted, update.replay_state, spec, device)

    def parts(self) -> dict[str, nn.Module]:
        parts: dict[str, nn.Module] = {"network": make_network(self.spec, self.network)}
        if self.update.entropy_target:
            parts["temperature"] = Temperature(Schedule.of(self.update.entropy_cost).start)
        return parts

    def tensors(self) -> dict[str, Tensor]:
        cost = torch.as_tensor(self.numbers["entropy_cost"], device=self.device)  # of a checkpoint, changing or not
        return {"entropy_cost": cost} | self._replay_states.tensors

    def losses(self, online: Networks, batches: Batches, known: Callable[[], Any]) -> Losses:
        """Returns the losses of policy, value and entropy, and of cloning where it is asked for."""
        rows = self.unrolled(online["network"], batches)
        self._replay_states.keep(batches, rows.output.state)
        with in_full_precision(self.device):
            return self._losses_of(rows, known, online.get("temperature"))

    def unrolled(self, network: ActorCriticNetwork, batches: Batches) -> Rows:
        """Returns the rows of all parts with the results of a network."""
        begun = self._replay_states.begin(batches, network)
        with in_full_precision(self.device):  # autocast refuses to join float16
            batch, is_new = self._joined(begun)
        output = network.unroll(batch.observation, history_of(batch), num_steps=len(batch.action))
        return Rows(begun, batch, is_new, output)

    def traced(self, rows: Rows) -> Traced:
        """Returns the targets of a network's own policy."""
        update, batch, logits, values = self.update, rows.batch, rows.output.logits[:-1], rows.output.values[:-1]
        behavior, valid = batch.extras[self._behavior], ~batch.start[1:]  # a reset ignored its action
        log_probs = self.policies.log_probs(logits, batch.action)
        log_rhos = log_probs - self.policies.log_probs(behavior, batch.action)
        accept = None
        if self._online_share < 1 and update.trust_region:
            accept = accepted_states(behavior, logits, update.trust_region, update.rho_bar)
        rewards = soft_asymmetric(batch.reward) if update.reward_transform == "soft-asymmetric" else batch.reward
        targets = vtrace(
            log_rhos, self.algorithm.gamma * batch.discount, rewards, values, rows.output.values[-1],
            valid=valid, accept=accept,
            lambda_=update.trace_lambda, rho_bar=update.rho_bar, c_bar=update.c_bar, pg_rho_bar=update.pg_rho_bar,
        )  # fmt: skip
        return Traced(targets, log_rhos, log_probs, accept)

    def policy_loss(self, rows: Rows, known: Callable[[], Any]) -> tuple[Tensor, Traced]:
        """Returns the loss of the policy [T, B], and the targets that it is made of."""
        traced = self.traced(rows)
        loss = policy_gradient_loss(rows.output.logits[:-1], rows.batch.action, traced.targets.pg_advantages)
        return loss, traced

    def _losses_of(self, rows: Rows, known: Callable[[], Any], temperature: Temperature | None) -> Losses:
        update, numbers, (begun, batch, is_new, output) = self.update, self.numbers, rows
        logits, values = output.logits[:-1], output.values[:-1]
        behavior, valid = batch.extras[self._behavior], ~batch.start[1:]
        losses, (targets, log_rhos, _, accept) = self.policy_loss(rows, known)
        losses = losses + numbers["value_cost"] * value_loss(values, targets.vs)
        entropy, entropy_weight = self.policies.entropy(logits), self._entropy_weight(is_new)
        cost = numbers["entropy_cost"] if temperature is None else temperature.price
        losses = losses + cost * entropy_weight * -entropy
        losses = losses.masked_fill(~targets.learned, 0)
        if update.policy_cloning_cost or update.value_cloning_cost:
            cloning = numbers["policy_cloning_cost"] * kl_divergence(behavior, logits)  # CLEAR (arXiv:1811.11682)
            of_values = (batch.extras["behavior_value"] - values).square()  # float16 and float32: float32
            cloning = cloning + numbers["value_cloning_cost"] * of_values
            losses = losses + cloning.masked_fill(is_new, 0)
        loss, count = sum_losses(losses, valid, batch.weight)
        real = valid & (batch.weight > 0)
        metrics = metrics_of(real, logits, values, log_rhos, targets, self.policies)
        rejected = None if accept is None else ~accept
        results = self._row_results.of(begun, output, behavior, valid, rejected)
        overwriting = [part.name for part in self._parts if part.overwrites_worst]
        priorities = {name: relevance(results[name]["distance"]) for name in overwriting}
        mean = loss.detach() / count.masked_fill(count == 0, 1)
        of_parts = {"network": loss}
        if temperature is not None:
            steering = temperature_loss(temperature.logarithm, -entropy, numbers["entropy_target"]) * entropy_weight
            of_parts["temperature"], _ = sum_losses(steering.masked_fill(~targets.learned, 0), valid, batch.weight)
            metrics["temperature"] = cost
        return Losses(of_parts, count, priorities, {"loss": mean} | metrics, results)

    def _joined(self, batches: Batches) -> tuple[UnrollBatch, Tensor]:
        """Returns the batches of all parts as one of B rows, and [B] bool: which of them are new."""
        parts = [batches[part.name] for part in self._parts]
        is_new = [torch.full_like(batch.weight, part.is_online, dtype=torch.bool)
                  for part, batch in zip(self._parts, parts, strict=True)]  # fmt: skip
        return joined(parts), torch.cat(is_new)

    def _entropy_weight(self, is_new: Tensor) -> Tensor | float:
        """Returns weights [B]: new unrolls alone keep the entropy up (LASER), with the weight that all would have."""
        return is_new / self._online_share if self._online_share else 1.0


def make_network(spec: StreamSpec, network: ActorCriticConfig) -> ActorCriticNetwork:
    """Returns a new network for the observations of a stream, with an LSTM where the log holds its states."""
    return ActorCriticNetwork(spec, network, lstm_size_of(spec))


def make_rows(algorithm: ImpalaAlgorithm, update: ImpalaUpdate, order: StreamOrder) -> ReplayRows | None:
    """Returns what walks and selects; None where the tables alone decide."""
    wanted, selections = wants(algorithm, update), selections_of(update)
    chooses = any(want.num_chosen or want.is_replaced for want in wanted)
    return ReplayRows(wanted, selections, order) if chooses else None


make_actor, make_learner = actor_of(ImpalaActing, ActorCriticConfig, make_network), learner_of(ImpalaLearning)
