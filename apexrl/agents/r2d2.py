"""R2D2: recurrent n-step double Q-learning from prioritized sequences (Kapturowski et al., ICLR 2019).

A sequence is one or more unrolls of a stream in a row, of which the table drew the last one. So sequences overlap, and
the log holds each step once. Where an unroll before the drawn one is not held, the sequence is shorter.

Deviations: an actor knows the errors of the newest unroll alone, so the first priority is that one's; the last reward
that the LSTM sees is clipped.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from apexrl.agents.apex_dqn import ApexActing
from apexrl.agents.contract import Batches, Extras, UnrollBatch
from apexrl.agents.engine.minibatches import rows_of
from apexrl.agents.engine.plain import SMALLEST_PRIORITY, Learning, Losses, Networks, Target
from apexrl.agents.engine.plain_actor import actor_of
from apexrl.agents.engine.plain_learner import learner_of
from apexrl.agents.r2d2_config import R2d2Algorithm, R2d2Update
from apexrl.agents.recurrence import STATE, burn_in_unrolls, lstm_size_of
from apexrl.agents.replaying.replay_states import continued, with_state
from apexrl.agents.replaying.unroll_batches import history_of
from apexrl.losses.value_learning import n_step_targets, sequence_priorities
from apexrl.losses.windows import n_step_windows, valid_starts
from apexrl.networks.config import ActorCriticConfig
from apexrl.networks.dueling import RecurrentDuelingNetwork
from apexrl.types import StreamSpec, StreamUnrolls


class R2d2Acting(ApexActing):
    """Ape-X's epsilon-greedy actors, with one priority for each unroll."""

    algorithm: R2d2Algorithm

    def priorities(self, unrolls: StreamUnrolls, extras: Extras) -> np.ndarray:
        """Returns the mixed n-step TD errors [1, E] by the actor's own values."""
        errors = super().priorities(unrolls, extras)
        valid = torch.from_numpy(valid_starts(unrolls.starts, len(errors)))
        return sequence_priorities(torch.from_numpy(errors), valid, self.algorithm.max_share).unsqueeze(0).numpy()


class R2d2Learning(Learning):
    """The losses of sequences: the networks go through all of a sequence, after a burn-in without gradient."""

    algorithm: R2d2Algorithm
    update: R2d2Update
    acting = ("q",)

    @property
    def called_once(self) -> tuple[str, ...]:  # type: ignore[override]
        """The layers are called once where a sequence is one unroll."""
        return ("q",) if self.update.sequence_unrolls == 1 else ()

    @property
    def target(self) -> Target:
        return Target(self.update.target_period_updates)

    def parts(self) -> dict[str, nn.Module]:
        return {"q": make_network(self.spec, self.network)}

    def from_target(self, target: Networks, batches: Batches) -> Tensor:
        """Returns the target network's values [S, B, A] of the observations of sequences."""
        return self._values(target["q"], batches[self.update.table])

    def losses(self, online: Networks, batches: Batches, known: Callable[[], Tensor]) -> Losses:
        """Returns weight * half the squared n-step double-Q error, summed over steps, and priorities of sequences."""
        algorithm, unrolls = self.algorithm, self._unrolls(batches[self.update.table])[self._burn_in :]
        steps = ((unroll.action, unroll.reward, unroll.discount, unroll.start) for unroll in unrolls)
        action, reward, discount, start = map(self._in_time, zip(*steps, strict=True))
        returns, discounts, offsets = n_step_windows(reward, discount, start, algorithm.gamma, algorithm.n_steps)
        is_held = torch.cat([(unroll.weight > 0).expand(self.spec.unroll_starts, -1) for unroll in unrolls])
        valid, weight, num_starts = is_held & ~start[1 : len(returns) + 1], unrolls[-1].weight, len(returns)
        q = self._values(online["q"], batches[self.update.table])
        bootstrap = known().gather(2, q.detach().argmax(dim=2, keepdim=True)).squeeze(2)
        ends = torch.arange(num_starts, device=q.device).unsqueeze(1) + offsets
        targets = n_step_targets(returns, discounts, bootstrap.gather(0, ends), rescaling=algorithm.value_rescaling)
        taken = q[:num_starts].gather(2, action[:num_starts].unsqueeze(2)).squeeze(2)
        errors = (targets - taken).masked_fill(~valid, 0)
        loss = 0.5 * (weight * errors.square()).sum()
        magnitude, count = errors.detach().abs(), valid.sum(dim=0).clamp(min=1)
        greatest = q.detach().amax(dim=2)[:num_starts].masked_fill(~valid, 0)
        metrics = {"loss": loss.detach() / len(weight), "td_error": magnitude.sum(dim=0) / count,
                   "value_mean": greatest.sum(dim=0) / count, "q_max": q.detach().amax(dim=(0, 2)),
                   "importance_weight": weight.mean()}  # fmt: skip
        priorities = sequence_priorities(magnitude + SMALLEST_PRIORITY, valid, algorithm.max_share)
        return Losses({"q": loss}, len(weight), {self.update.table: priorities}, metrics)

    @property
    def _burn_in(self) -> int:
        """Unrolls before each sequence, through which the networks go without gradient."""
        return burn_in_unrolls(self.update.replay_state, self.spec.unroll_starts, ("stored", "zero"))

    def _unrolls(self, batch: UnrollBatch) -> list[UnrollBatch]:
        """Returns the unrolls of burn-ins and sequences in their order, B rows each; weight 0 where one is not held."""
        size = len(batch.weight) // (self._burn_in + self.update.sequence_unrolls)
        if self.update.replay_state == "zero":
            batch = with_state(batch, torch.zeros_like(batch.extras[STATE]))
        rows = range(0, len(batch.weight), size)
        return [rows_of(batch, slice(first, first + size), self.spec) for first in rows]

    def _in_time(self, of_unrolls: Sequence[Tensor]) -> Tensor:
        """Returns the entries [S, B, ..] of sequences: without those that an unroll shares with the next one."""
        *before, last = of_unrolls
        return torch.cat([*(entries[: self.spec.unroll_starts] for entries in before), last])

    def _values(self, network: RecurrentDuelingNetwork, batch: UnrollBatch) -> Tensor:
        """Returns the values [S, B, A] of the observations of sequences; unrolls begin where those before ended."""
        rows, *others = self._unrolls(batch)
        values: list[Tensor] = []
        for number, following in enumerate([*others, None]):
            with torch.set_grad_enabled(torch.is_grad_enabled() and number >= self._burn_in):
                of_rows, state = network.unroll(rows.observation, history_of(rows), self.spec.unroll_starts)
            values.append(of_rows)
            if following is not None:
                rows = continued(rows, state, following)
        return self._in_time(values[self._burn_in :])


def make_network(spec: StreamSpec, network: ActorCriticConfig) -> RecurrentDuelingNetwork:
    """Returns a new network for the observations of a stream."""
    return RecurrentDuelingNetwork(spec, network, lstm_size_of(spec))


make_actor, make_learner = actor_of(R2d2Acting, ActorCriticConfig, make_network), learner_of(R2d2Learning)
