"""The acting half of a one-file DQN in CleanRL's style, written from its description: one environment, one network.

The wrappers and the buffer are Stable-Baselines3's, which that style uses. Gymnasium's wrappers resize the screens and
make them gray. Two things are in its favor: it keeps no gradients when it acts, and it logs no episodes.
"""

import random

import ale_py
import gymnasium
import numpy as np
import torch
from stable_baselines3.common import atari_wrappers
from stable_baselines3.common.buffers import ReplayBuffer
from torch import nn

from benchmarks.peers.measuring import parse_arguments, report

BUFFER_SIZE = 20_000  # transitions; the cost of an insert does not depend on it
EPSILON = 0.01


class QNetwork(nn.Module):
    """Nature's network."""

    def __init__(self, num_actions: int):
        super().__init__()
        self.network = nn.Sequential(
            *(nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3, 1)),
            *(nn.ReLU(), nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, num_actions)),
        )

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        """Returns [B, A] action values of [B, 4, 84, 84] screens."""
        return self.network(observations / 255.0)


def make(game: str) -> gymnasium.Env:
    """Returns one preprocessed game."""
    env = gymnasium.make(f"{game}NoFrameskip-v4")
    env = atari_wrappers.NoopResetEnv(env, noop_max=30)
    env = atari_wrappers.MaxAndSkipEnv(env, skip=4)
    env = atari_wrappers.EpisodicLifeEnv(env)
    if "FIRE" in env.unwrapped.get_action_meanings():
        env = atari_wrappers.FireResetEnv(env)
    env = atari_wrappers.ClipRewardEnv(env)
    env = gymnasium.wrappers.ResizeObservation(env, (84, 84))
    env = gymnasium.wrappers.GrayscaleObservation(env)
    return gymnasium.wrappers.FrameStackObservation(env, 4)


def main() -> None:
    """Plays, and prints the number of steps."""
    arguments = parse_arguments(__doc__)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    gymnasium.register_envs(ale_py)
    same_step = gymnasium.vector.AutoresetMode.SAME_STEP
    envs = gymnasium.vector.SyncVectorEnv([lambda: make(arguments.game)] * arguments.envs, autoreset_mode=same_step)
    network = QNetwork(envs.single_action_space.n)
    spaces = envs.single_observation_space, envs.single_action_space
    options = {"n_envs": arguments.envs, "optimize_memory_usage": True, "handle_timeout_termination": False}
    buffer = ReplayBuffer(BUFFER_SIZE, *spaces, "cpu", **options)
    observations, _ = envs.reset(seed=0)

    @torch.no_grad()
    def step() -> int:
        nonlocal observations
        if random.random() < EPSILON:
            actions = np.array([envs.single_action_space.sample() for _ in range(arguments.envs)])
        else:
            actions = network(torch.Tensor(observations)).argmax(dim=1).numpy()
        next_observations, rewards, terminated, truncated, info = envs.step(actions)
        final_observations = next_observations.copy()
        for index in np.flatnonzero(terminated | truncated):
            final_observations[index] = info["final_obs"][index]
        buffer.add(observations, final_observations, actions, rewards, terminated, [{}] * arguments.envs)
        observations = next_observations
        return arguments.envs

    report(step, arguments.seconds)


if __name__ == "__main__":
    main()
