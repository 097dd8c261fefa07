"""Measures Stable-Baselines3's PPO while it learns, with the Atari hyperparameters of its zoo and our small network.

`--envs 8` environments make 128 steps each, then come 4 passes over them in batches of 256: 4 samples a transition. The
features are those of our preset `two-cores`: three convolutions of 16, 32 and 32 channels, and 256 units. The window
begins and ends where a rollout begins, after SETTLE_SECONDS of learning. The environments step in this process, as by
default, or in a process each.
"""

import json
import time

import ale_py
import gymnasium
import psutil
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_atari_env
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecFrameStack
from torch import nn

from benchmarks.peers.measuring import parse_arguments

FRAMES_PER_STEP = 4
STEPS, BATCH_SIZE, EPOCHS = 128, 256, 4
SETTLE_SECONDS = 10.0  # seconds of learning before the measurement


class SmallNetwork(BaseFeaturesExtractor):
    """The torso and the hidden layer of our preset `two-cores`."""

    def __init__(self, observation_space: gymnasium.spaces.Box):
        super().__init__(observation_space, features_dim=256)
        self.layers = nn.Sequential(
            *(nn.Conv2d(4, 16, 8, 4), nn.ReLU(), nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.Conv2d(32, 32, 3, 1)),
            *(nn.ReLU(), nn.Flatten(), nn.Linear(32 * 7 * 7, 256), nn.ReLU()),
        )

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        """Returns [B, 256] features of [B, 4, 84, 84] screens."""
        return self.layers(observations)


class Window(BaseCallback):
    """Counts rollouts for so many seconds, then ends the run."""

    def __init__(self, seconds: float):
        super().__init__()
        self.measured: dict[str, float] = {}
        self._seconds = seconds
        self._learning_since = 0.0
        self._begin: tuple[float, int] | None = None

    def _on_rollout_start(self) -> None:
        now = time.perf_counter()
        if self.num_timesteps:
            self._learning_since = self._learning_since or now
        if self._begin is None:
            if self._learning_since and now - self._learning_since >= SETTLE_SECONDS:
                self._begin = now, self.num_timesteps
        elif now - self._begin[0] >= self._seconds and not self.measured:
            steps = self.num_timesteps - self._begin[1]
            here = psutil.Process()
            self.measured = {
                "wall_seconds": now - self._begin[0],
                "frames": FRAMES_PER_STEP * steps,
                "updates": steps * EPOCHS / BATCH_SIZE,
                "samples": steps * EPOCHS,
                "transitions_held": STEPS * self.training_env.num_envs,
                "memory_bytes": sum(process.memory_info().rss for process in [here, *here.children(recursive=True)]),
            }

    def _on_step(self) -> bool:
        return not self.measured


def main() -> None:
    """Learns and prints the counts."""
    arguments = parse_arguments(__doc__, processes=("one", "each"))
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    gymnasium.register_envs(ale_py)
    vector = DummyVecEnv if arguments.processes == "one" else SubprocVecEnv
    name = f"{arguments.game}NoFrameskip-v4"
    envs = VecFrameStack(make_atari_env(name, n_envs=arguments.envs, seed=0, vec_env_cls=vector), 4)
    model = PPO(
        "CnnPolicy",
        envs,
        learning_rate=2.5e-4,
        n_steps=STEPS,
        batch_size=BATCH_SIZE,
        n_epochs=EPOCHS,
        clip_range=0.1,
        vf_coef=0.5,
        ent_coef=0.01,
        policy_kwargs={"features_extractor_class": SmallNetwork},
        seed=0,
    )
    window = Window(arguments.seconds)
    model.learn(10**9, callback=window)
    print(json.dumps(window.measured), flush=True)
    envs.close()


if __name__ == "__main__":
    main()
