"""IMPALA's and LASER's update written straightforwardly: eager PyTorch in float32, screens in NCHW, a loop for V-trace.

The peer of `benchmarks.learner --agent impala`, and the learner of `benchmarks.peers.monobeast`. It computes the update
of `agents.impala` for unrolls without resets in them (a test compares the two), from the papers and torch alone.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apexrl.agents.impala_config import ImpalaUpdate
from apexrl.config.schedules import Schedule
from apexrl.networks.config import ActorCriticConfig

RMSPROP_DECAY = 0.99


class Rollouts(NamedTuple):
    """B rollouts of T steps, time first."""

    frames: Tensor  # [T + 1, B, 4, 84, 84] uint8
    actions: Tensor  # [T, B] int64
    rewards: Tensor  # [T, B] float32
    discounts: Tensor  # [T, B] float32: 0 where terminated, else 1
    behavior_logits: Tensor  # [T, B, A] float32
    is_new: Tensor  # [B] bool; False where it is replayed


class PlainNetwork(nn.Module):
    """Logits of a policy and a value of stacked screens."""

    def __init__(self, config: ActorCriticConfig, num_actions: int):
        super().__init__()
        first, second, third = config.channels
        if config.torso == "deep":
            self.torso = nn.Sequential(*_section(4, first), *_section(first, second), *_section(second, third))
            num_features = third * 11 * 11
        else:
            self.torso = nn.Sequential(
                *(nn.Conv2d(4, first, 8, 4), nn.ReLU(), nn.Conv2d(first, second, 4, 2), nn.ReLU()),
                nn.Conv2d(second, third, 3, 1),
            )
            num_features = third * 7 * 7
        self.hidden = nn.Linear(num_features, config.hidden_size)
        self.policy = nn.Linear(config.hidden_size, num_actions)
        self.value = nn.Linear(config.hidden_size, 1)

    def forward(self, frames: Tensor) -> tuple[Tensor, Tensor]:
        """Returns logits [B, A] and values [B] of frames [B, 4, 84, 84] uint8."""
        features = F.relu(self.torso(frames.float() / 255)).flatten(1)
        hidden = F.relu(self.hidden(features))
        return self.policy(hidden), self.value(hidden).squeeze(-1)


class _Residual(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(F.relu(self.conv1(F.relu(x))))


def _section(channels_in: int, channels: int) -> tuple[nn.Module, ...]:
    """Returns one of the three sections of IMPALA's residual network."""
    halved = nn.Conv2d(channels_in, channels, 3, padding=1), nn.MaxPool2d(3, stride=2, padding=1)
    return *halved, _Residual(channels), _Residual(channels)


class PlainLearner:
    """Updates a network from rollouts."""

    def __init__(self, network: PlainNetwork, update: ImpalaUpdate, gamma: float):
        self.network = network
        self._update = update
        self._gamma = gamma
        parameters, rate = network.parameters(), Schedule.of(update.learning_rate).start
        epsilon = update.optimizer_epsilon
        if update.optimizer == "adam":
            self._optimizer: torch.optim.Optimizer = torch.optim.Adam(parameters, rate, eps=epsilon)
        else:
            self._optimizer = torch.optim.RMSprop(parameters, rate, RMSPROP_DECAY, epsilon)

    def step(self, batch: Rollouts) -> float:
        """Takes one optimizer step; returns the loss."""
        loss = self.loss(batch)
        self._optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), self._update.max_gradient_norm)
        self._optimizer.step()
        return loss.item()

    def loss(self, batch: Rollouts) -> Tensor:
        """Returns the loss of policy, value and entropy; a mix that replays has LASER's trust region."""
        update = self._update
        logits, values = self.network(batch.frames.flatten(0, 1))
        logits, values = logits.unflatten(0, batch.frames.shape[:2])[:-1], values.unflatten(0, batch.frames.shape[:2])
        values, bootstrap_value = values[:-1], values[-1].detach()
        log_pi = F.log_softmax(logits, dim=-1)
        log_mu = F.log_softmax(batch.behavior_logits, dim=-1)
        action_log_probs, behavior = (x.gather(-1, batch.actions.unsqueeze(-1)).squeeze(-1) for x in (log_pi, log_mu))
        accepted = torch.ones_like(values)
        if update.trust_region and not batch.is_new.all():
            accepted = (relevance(log_mu, log_pi.detach()) < update.trust_region).float()
        vs, advantages = vtrace(
            action_log_probs.detach() - behavior, self._gamma * batch.discounts, batch.rewards, values.detach(),
            bootstrap_value, accepted,
        )  # fmt: skip
        entropy = -(log_pi.exp() * log_pi).sum(dim=-1)
        new_share = batch.is_new.float().mean()
        entropy_cost = update.entropy_cost * (batch.is_new / new_share if new_share else 1.0)  # LASER: of new rows only
        losses = -advantages * action_log_probs + update.value_cost * 0.5 * (vs - values) ** 2
        losses = accepted * (losses - entropy_cost * entropy)
        return losses.sum() if update.reduction == "sum" else losses.mean()


def vtrace(
    log_rhos: Tensor, discounts: Tensor, rewards: Tensor, values: Tensor, bootstrap_value: Tensor, accepted: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the targets of the values and the advantages, both [T, B], with ratios clipped at 1.

    Source: arXiv:1802.01561, equation 1; accepted [T, B] is lambda of arXiv:1909.11583, section 4.
    """
    rhos = accepted * log_rhos.exp().clamp(max=1)
    next_values = torch.cat([values[1:], bootstrap_value.unsqueeze(0)])
    deltas = rhos * (rewards + discounts * next_values - values)
    error = torch.zeros_like(bootstrap_value)
    errors = []
    for t in reversed(range(len(deltas))):
        error = deltas[t] + discounts[t] * rhos[t] * error
        errors.append(error)
    vs = values + torch.stack(errors[::-1])
    next_vs = torch.cat([vs[1:], bootstrap_value.unsqueeze(0)])
    return vs, rhos * (rewards + discounts * next_vs - values)


def relevance(log_mu: Tensor, log_pi: Tensor) -> Tensor:
    """Returns KL(pi || implied policy) [T, B], the implied policy being min(mu, pi) normalised (LASER)."""
    implied = torch.minimum(log_mu, log_pi).log_softmax(dim=-1)
    return (log_pi.exp() * (log_pi - implied)).sum(dim=-1)
