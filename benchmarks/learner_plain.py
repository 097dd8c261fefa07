"""The peers of `benchmarks.learner`: updates in eager float32, with fresh memory for every tensor."""

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view

from apexrl.agents.contract import TransitionBatch
from apexrl.agents.engine.plain import RMSPropForm
from apexrl.agents.replaying.mix import parts_of
from apexrl.config.commands import LearnerCommand
from apexrl.config.schedules import Schedule
from apexrl.losses.value_learning import huber, n_step_targets
from apexrl.networks.dueling import make_network
from apexrl.types import Sample, StreamSpec, Unroll
from benchmarks.peers.plain_vtrace import PlainLearner, PlainNetwork, Rollouts


class EagerLearner:
    """The plain step of Ape-X: the network and loss of ours, and torch's optimizers."""

    def __init__(self, command: LearnerCommand, spec: StreamSpec, device: torch.device):
        self._config = command.update
        self._online = make_network(spec, command.network).to(device).to(memory_format=torch.channels_last)
        self._target = copy.deepcopy(self._online).requires_grad_(False)
        update, parameters = command.update, self._online.parameters()
        numbers: dict[str, Any] = {"lr": Schedule.of(update.learning_rate).start, "eps": update.optimizer_epsilon}
        self._optimizer: torch.optim.Optimizer
        if update.optimizer == "rmsprop":
            self._optimizer = torch.optim.RMSprop(parameters, alpha=RMSPropForm().decay, centered=True, **numbers)
        else:
            self._optimizer = torch.optim.Adam(parameters, fused=True, **numbers)

    def update(self, batch: TransitionBatch) -> np.ndarray:
        """Takes one optimizer step; returns |TD|."""
        q_tm1 = self._online(batch.observation)
        with torch.no_grad():
            prepared = self._online.prepare(batch.next_observation)
            q_online_t, q_target_t = self._online.values(prepared), self._target.values(prepared)
        value_t = q_target_t.gather(1, q_online_t.argmax(dim=1, keepdim=True)).squeeze(1)
        targets = n_step_targets(batch.n_step_return, batch.discount, value_t)
        errors = targets - q_tm1.gather(1, batch.action.unsqueeze(1)).squeeze(1)
        loss = (batch.weight * huber(errors)).mean()
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._online.parameters(), self._config.max_gradient_norm)
        self._optimizer.step()
        return errors.detach().abs().cpu().numpy()


class PlainActorCritic:
    """The plain step of IMPALA and LASER on a buffer of its own, which holds stacked screens as MonoBeast's does."""

    def __init__(self, command: LearnerCommand, spec: StreamSpec, unrolls: list[Unroll], device: torch.device):
        update, self._device = command.update, device
        self._is_new = {part.name: part.is_online for part in parts_of(update.mix)}
        self._rollouts = [rollout_of(unroll, spec.stacked_frames) for unroll in unrolls]
        self.network = PlainNetwork(command.network, spec.num_actions).to(device)
        self._learner = PlainLearner(self.network, update, command.algorithm.gamma)

    def update(self, samples: Mapping[str, Sample]) -> float:
        """Takes one optimizer step with the unrolls of all samples; returns the loss."""
        rows = [self._rollouts[key] for sample in samples.values() for key in sample.keys]
        is_new = [self._is_new[table] for table, sample in samples.items() for _ in sample.keys]
        batch = Rollouts(*(torch.stack(arrays, 1) for arrays in zip(*rows, strict=True)), torch.tensor(is_new))
        return self._learner.step(Rollouts(*(tensor.to(self._device) for tensor in batch)))


def rollout_of(unroll: Unroll, stacked_frames: int) -> tuple[torch.Tensor, ...]:
    """Returns the first fields of `Rollouts` for one unroll, without the axis of the rows."""
    stacks = sliding_window_view(unroll.frames, stacked_frames, axis=0)[: len(unroll.actions) + 1]
    arrays = (
        *(np.moveaxis(stacks, -1, 1), unroll.actions.astype(np.int64), unroll.rewards, unroll.discounts),
        unroll.extras["behavior_log_probs"].astype(np.float32),
    )
    return tuple(torch.from_numpy(np.ascontiguousarray(array)) for array in arrays)
