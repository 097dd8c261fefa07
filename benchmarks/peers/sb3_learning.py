"""Measures Stable-Baselines3's DQN while it learns: one process, `learn` with the Atari hyperparameters of its zoo.

Batches of 32, `train_freq` 4 and a gradient step for each environment give 8 samples a transition, with 1 environment
or 8. The buffer holds 100,000 transitions as in the zoo, with `optimize_memory_usage`, which halves its memory. Two
things are different from the zoo. Learning begins after 10,000 transitions instead of 100,000. From there on epsilon
is 0.01, as in the zoo after a tenth of a run. The rates are measured after that.
"""

import json
import time

import ale_py
import gymnasium
import psutil
import torch
from stable_baselines3 import DQN
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_atari_env
from stable_baselines3.common.vec_env import VecFrameStack

from benchmarks.peers.measuring import parse_arguments

FRAMES_PER_STEP = 4
BATCH_SIZE = 32
LEARNING_STARTS = 10_000
EPSILON = 0.01
BUFFER_SIZE = 100_000
SETTLE_SECONDS = 10.0  # seconds of learning before the measurement


class Window(BaseCallback):
    """Begins to count SETTLE_SECONDS after the first update, counts for so many seconds, then ends the run."""

    def __init__(self, seconds: float):
        super().__init__()
        self.measured: dict[str, float] = {}
        self._seconds = seconds
        self._learning_since = 0.0
        self._begin: tuple[float, float, int, int] | None = None

    def _on_step(self) -> bool:
        if self.model._n_updates == 0:
            return True
        now = time.perf_counter()
        self._learning_since = self._learning_since or now
        if self._begin is None:
            if now - self._learning_since >= SETTLE_SECONDS:
                self._begin = now, time.process_time(), self.num_timesteps, self.model._n_updates
            return True
        started, cpu, steps, updates = self._begin
        if now - started < self._seconds:
            return True
        self.measured = {
            "wall_seconds": now - started,
            "cpu_seconds": time.process_time() - cpu,
            "frames": FRAMES_PER_STEP * (self.num_timesteps - steps),
            "updates": self.model._n_updates - updates,
            "samples": BATCH_SIZE * (self.model._n_updates - updates),
            "transitions_held": min(self.num_timesteps, BUFFER_SIZE),
            "memory_bytes": psutil.Process().memory_info().rss,
        }
        return False


def main() -> None:
    """Learns and prints the counts."""
    arguments = parse_arguments(__doc__)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    gymnasium.register_envs(ale_py)
    envs = VecFrameStack(make_atari_env(f"{arguments.game}NoFrameskip-v4", n_envs=arguments.envs, seed=0), 4)
    model = DQN(
        "CnnPolicy",
        envs,
        learning_rate=1e-4,
        buffer_size=BUFFER_SIZE,
        learning_starts=LEARNING_STARTS,
        batch_size=BATCH_SIZE,
        train_freq=4,
        gradient_steps=arguments.envs,
        target_update_interval=1000,
        exploration_initial_eps=EPSILON,
        exploration_final_eps=EPSILON,
        optimize_memory_usage=True,
        replay_buffer_kwargs={"handle_timeout_termination": False},
        seed=0,
    )
    window = Window(arguments.seconds)
    model.learn(10**9, callback=window)
    print(json.dumps(window.measured), flush=True)


if __name__ == "__main__":
    main()
