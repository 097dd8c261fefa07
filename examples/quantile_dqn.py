"""A distribution of returns for each action, on Ape-X's actors and table: QR-DQN (arXiv:1710.10044), double, n-step.

cd examples; bash ../run.sh --agent quantile_dqn:quantile-dqn --env Catch-v0
"""

import dataclasses

import torch
import torch.nn.functional as F
from torch import nn

from apexrl.agents import apex_dqn, apex_dqn_config
from apexrl.agents.engine.plain import Learning, Losses, Target
from apexrl.agents.engine.plain_actor import actor_of
from apexrl.agents.engine.plain_learner import learner_of
from apexrl.agents.families import FAMILIES
from apexrl.errors import ConfigError
from apexrl.networks.config import DuelingConfig
from apexrl.networks.torsos import FrameNetwork, make_torso


@dataclasses.dataclass(frozen=True)
class QuantileConfig(DuelingConfig):
    """Sizes of a network of quantiles."""

    quantiles: int = 32
    """Quantiles of an action's return (QR-DQN: 200)."""


class QuantileNetwork(FrameNetwork):
    """A torso, a hidden layer, and N quantiles of each action's return."""

    def __init__(self, spec, config):
        super().__init__(make_torso(spec, config.channels, config.hidden_size, own=config))
        self.hidden = nn.Linear(self.torso.num_features, config.hidden_size)
        self.last = nn.Linear(config.hidden_size, spec.num_actions * config.quantiles)
        self.num_quantiles = config.quantiles

    def of(self, stacks):
        """Returns the quantiles [B, A, N] of stacks."""
        return self._quantiles(self.torso.features(self.prepare(stacks), self.torso.kernel()))

    def heads(self, features):
        """Returns the values [B, A] that an actor needs: the means of the quantiles."""
        return self._quantiles(features).mean(dim=2)

    def _quantiles(self, features):
        return self.last(F.relu(self.hidden(features))).float().unflatten(1, (-1, self.num_quantiles))


class QuantileLearning(Learning):
    """The learner's half: the quantile Huber loss with threshold 1."""

    acting = called_once = ("q",)

    @property
    def target(self):
        return Target(self.update.target_period_updates)

    def parts(self):
        return {"q": make_network(self.spec, self.network)}

    def from_target(self, target, batches):
        return target["q"].of(batches[self.update.table].next_observation)

    def from_online(self, online, batches, from_target):
        """Returns the quantiles [B, N] of the best next action, as the online network ranks them."""
        best = online["q"](batches[self.update.table].next_observation).argmax(dim=1)  # of the actions that are allowed
        return from_target[torch.arange(len(best), device=best.device), best]

    def losses(self, online, batches, known):
        batch = batches[self.update.table]
        rows = torch.arange(len(batch.action), device=batch.action.device)
        quantiles = online["q"].of(batch.observation)[rows, batch.action]
        targets = batch.n_step_return[:, None] + batch.discount[:, None] * known()
        errors = targets[:, None, :] - quantiles[:, :, None]  # [B, N, N']
        middles = (torch.arange(quantiles.shape[1], device=errors.device) + 0.5) / quantiles.shape[1]
        sides = (middles[:, None] - (errors.detach() < 0).float()).abs()
        losses = (sides * F.huber_loss(errors, torch.zeros_like(errors), reduction="none")).mean(dim=2).sum(dim=1)
        surprise = (targets.mean(dim=1) - quantiles.mean(dim=1)).abs()  # of the expected return, as actors know it
        metrics = {"loss": losses, "td_error": surprise, "q_mean": quantiles}
        return Losses({"q": (batch.weight * losses).sum()}, len(losses), {self.update.table: surprise + 1e-6}, metrics)


def make_network(spec, config):
    """Returns a new network."""
    return QuantileNetwork(spec, config)


def wants(algorithm, update):
    """Returns the wants of Ape-X, whose flags are all taken but for two."""
    for name, value in {"--munchausen": update.munchausen, "--value-rescaling": algorithm.value_rescaling}.items():
        if value:
            raise ConfigError(f"--agent quantile-dqn takes no {name}: leave it out, or give --agent apex-dqn")
    return apex_dqn_config.wants(algorithm, update)


make_actor, make_learner = actor_of(apex_dqn.ApexActing, QuantileConfig, make_network), learner_of(QuantileLearning)
FAMILIES["quantile-dqn"] = apex_dqn_config.FAMILY._replace(network=QuantileConfig(), wants=wants, module="quantile_dqn")
