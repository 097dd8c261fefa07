"""Continuous actions: a policy climbs a critic of n-step returns (Ape-X DPG, arXiv:1803.00933, appendix D).

cd examples; bash ../run.sh --agent dpg:dpg --env Pendulum-v1
"""

import dataclasses
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from apexrl.agents.contract import Family, Transitions, Want, check_continuous
from apexrl.agents.engine.plain import Acting, Learning, Losses, Target
from apexrl.agents.engine.plain_actor import actor_of
from apexrl.agents.engine.plain_learner import learner_of
from apexrl.agents.families import FAMILIES
from apexrl.config.sections import AlgorithmConfig, Changing, NetworkConfig, Range, UpdateConfig
from apexrl.config.tables import TableSpec
from apexrl.networks.torsos import FrameNetwork, make_torso


@dataclasses.dataclass(frozen=True)
class DpgAlgorithm(AlgorithmConfig):
    """The numbers that actors and the learner must agree on."""

    n_steps: int = 3
    """Rewards in a return before it bootstraps."""
    noise: Annotated[float, Range(0)] = 0.3
    """Deviation of the noise on actions, as a share of half their range."""


@dataclasses.dataclass(frozen=True)
class DpgNetwork(NetworkConfig):
    """Sizes of the policy and of the critic."""

    hidden_size: int = 256
    """Units of each layer."""


@dataclasses.dataclass(frozen=True)
class DpgUpdate(UpdateConfig):
    """The learner's numbers for its updates."""

    batch_size: int = 128
    """Transitions in a batch."""
    learning_rate: Changing = 1e-3
    """Step size of policy and critic."""
    target_rate: Annotated[float, Range(0, 1)] = 0.005
    """Share of the way that the target networks go at each update."""


class Policy(FrameNetwork):
    """Actions within the bounds of the environment."""

    def __init__(self, spec, config):
        super().__init__(make_torso(spec, (32, 64, 64), config.hidden_size, own=config))
        self.action = nn.Linear(self.torso.num_features, len(spec.action_bounds))
        low, high = torch.tensor(spec.action_bounds).T
        self.register_buffer("center", (low + high) / 2, persistent=False)
        self.register_buffer("reach", (high - low) / 2, persistent=False)

    def heads(self, features):
        """Returns the actions [B, size]."""
        return self.center + self.reach * torch.tanh(self.action(features).float())


class Critic(nn.Module):
    """The values of actions at observations that are vectors."""

    def __init__(self, spec, config):
        super().__init__()
        sizes = spec.stacked_frames * spec.frame_size + len(spec.action_bounds), config.hidden_size
        self.layers = nn.Sequential(nn.Linear(*sizes), nn.ReLU(), nn.Linear(sizes[1], sizes[1]), nn.ReLU())
        self.value = nn.Linear(sizes[1], 1)

    def forward(self, observations, actions):
        """Returns the values [B] of actions [B, size] at observations that are vectors."""
        return self.value(self.layers(torch.cat([observations.flatten(1), actions], dim=1))).squeeze(1)


class DpgActing(Acting):
    """The policy's actions and noise."""

    def explore(self, slots, ladder_size):
        return np.full(len(slots), self.algorithm.noise)

    def act(self, values, exploration, rng):
        low, high = np.array(self.spec.action_bounds, np.float32).T
        noise = exploration[:, None] * (high - low) / 2 * rng.standard_normal(values.shape)
        return (values + noise).clip(low, high).astype(np.float32), {}


class DpgLearning(Learning):
    """The critic learns n-step returns; the policy learns what the critic values."""

    acting = ("policy",)

    @property
    def target(self):
        return Target(rate=self.update.target_rate)

    def parts(self):
        return {"policy": make_network(self.spec, self.network), "critic": Critic(self.spec, self.network)}

    def from_target(self, target, batches):
        after = batches["transitions"].next_observation
        return target["critic"](after, target["policy"](after))

    def losses(self, online, batches, known):
        batch = batches["transitions"]
        value = online["critic"](batch.observation, batch.action)
        chosen = online["critic"](batch.observation, online["policy"](batch.observation))
        targets = batch.n_step_return + batch.discount * known()
        errors = F.mse_loss(value, targets, reduction="none") / 2
        losses = {"policy": -(batch.weight * chosen).sum(), "critic": (batch.weight * errors).sum()}
        surprise = (targets - value).abs()
        return Losses(losses, len(value), {"transitions": surprise + 1e-6}, {"td_error": surprise, "q_mean": value})


def make_network(spec, config):
    """Returns a new policy."""
    return Policy(spec, config)


def stream(algorithm, environment):
    """Returns the stream of an environment: unrolls overlap by as many steps as a return has."""
    check_continuous(environment)
    return environment.streamed(algorithm.unroll_starts, overlap_steps=algorithm.n_steps)


make_actor, make_learner = actor_of(DpgActing, DpgNetwork, make_network), learner_of(DpgLearning)
FAMILIES["dpg"] = Family(
    DpgAlgorithm(unroll_starts=20),
    DpgNetwork(),
    DpgUpdate(),
    stream=stream,
    wants=lambda algorithm, update: (
        Want("transitions", update.batch_size, Transitions(algorithm.n_steps, algorithm.gamma)),
    ),
    tables=lambda update: (TableSpec("transitions", "priority"),),
    module="dpg",
    presets={
        "small": {
            "replay": {"capacity": 100_000, "min_size_to_sample": 1_000, "samples_per_insert": 64.0},
            "acting": {"environments_per_worker": 8, "environment_groups": 1, "parameter_period_frames": 20},
            "learning": {"publish_period_updates": 10, "publish_period_seconds": 0.2},
        }
    },
)
