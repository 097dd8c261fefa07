"""Trains Stable-Baselines3's DQN with the Atari hyperparameters of its zoo, and evaluates it as ours is evaluated.

`python -m benchmarks.peers.sb3_games --game Breakout --threads 0 --seconds 1800 > sb3-breakout.csv` prints lines like
those of a run's evaluations.csv. An evaluation every EVALUATION_SECONDS, and at the end, plays whole games with 0.1 %
random actions and counts what the game counts. Its time is not counted: ours evaluates beside the training.

On a busy machine `--frames N` ends after so many frames instead, with NUM_EVALUATIONS on the way: so many as a run by
itself makes in the time in question. The zoo stops random play after a tenth of its 10 M agent steps, and begins to
learn after 100,000.
"""

import time

import ale_py
import gymnasium
import numpy as np
import torch
from stable_baselines3 import DQN
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_atari_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecEnv, VecFrameStack

from benchmarks.peers.measuring import argument_parser

FRAMES_PER_STEP = 4
ZOO_STEPS = 10_000_000
EPISODES = 10
EPSILON = 0.001  # of an evaluation
EVALUATION_SECONDS = 300.0
NUM_EVALUATIONS = 6


class Evaluations(BaseCallback):
    """Plays EPISODES games at each evaluation, and ends the run after so many frames, or seconds if they are 0."""

    frames_per_step = FRAMES_PER_STEP

    def __init__(self, envs: VecEnv, seconds: float, frames: int, period_seconds: float = EVALUATION_SECONDS):
        super().__init__()
        self._envs = envs
        self._frames = frames
        self._end = frames or seconds
        self._period = frames / NUM_EVALUATIONS if frames else period_seconds
        self._next = self._period
        self._started = time.perf_counter()

    def _on_step(self) -> bool:
        passed = time.perf_counter() - self._started
        now = self.frames_per_step * self.num_timesteps if self._frames else passed
        if now < min(self._next, self._end):
            return True
        self._evaluate(passed)
        self._next += self._period
        self._started = time.perf_counter() - passed
        return now < self._end

    def _evaluate(self, passed: float) -> None:
        returns = self.play()
        numbers = (np.mean(returns), np.median(returns), np.min(returns), np.max(returns))
        counts = (round(passed), self.frames_per_step * self.num_timesteps, self.model._n_updates, EPISODES)
        print(*counts, *(f"{number:.2f}" for number in numbers), sep=",", flush=True)

    def play(self) -> list[float]:
        """Returns the returns of whole games, unclipped, by Monitor's record: a life's end resets the environment."""
        exploration, self.model.exploration_rate = self.model.exploration_rate, EPSILON
        returns, _ = evaluate_policy(self.model, self._envs, EPISODES, deterministic=False, return_episode_rewards=True)
        self.model.exploration_rate = exploration
        return returns


def main() -> None:
    """Learns for so many frames or seconds, evaluations not counted."""
    parser = argument_parser(__doc__)
    parser.add_argument("--frames", type=int, default=0, help="end after so many instead")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    gymnasium.register_envs(ale_py)

    def make(seed: int) -> VecEnv:
        return VecFrameStack(make_atari_env(f"{arguments.game}NoFrameskip-v4", n_envs=1, seed=seed), 4)

    model = DQN(
        "CnnPolicy",
        make(0),
        learning_rate=1e-4,
        buffer_size=100_000,
        learning_starts=100_000,
        batch_size=32,
        train_freq=4,
        gradient_steps=1,
        target_update_interval=1000,
        exploration_fraction=0.1,
        exploration_final_eps=0.01,
        optimize_memory_usage=True,
        replay_buffer_kwargs={"handle_timeout_termination": False},
        seed=0,
    )
    print("seconds,frames,updates,episodes,mean,median,min,max", flush=True)
    model.learn(ZOO_STEPS, callback=Evaluations(make(1000), arguments.seconds, arguments.frames))


if __name__ == "__main__":
    main()
