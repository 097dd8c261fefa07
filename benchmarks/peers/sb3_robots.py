"""Trains Stable-Baselines3's SAC or TD3 with the numbers of its zoo, and evaluates it as ours is evaluated.

`python -m benchmarks.peers.sb3_robots --env HalfCheetah-v5 --agent sac --threads 0 --seconds 2700 > sb3-sac.csv` prints
lines like those of a run's evaluations.csv. An evaluation every 300 s, and at the end, plays ten games without noise.
Its time is not counted: ours evaluates beside the training. The zoo begins to learn after 10,000 random steps, and
makes an update for each step.
"""

import gymnasium
import numpy as np
import torch
from stable_baselines3 import SAC, TD3
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.noise import NormalActionNoise

from benchmarks.peers.measuring import argument_parser
from benchmarks.peers.sb3_games import EPISODES, Evaluations

ENOUGH_STEPS = 10**8  # the time ends the run
FIRST_STEPS = 10_000


class Robots(Evaluations):
    """Evaluations of a policy whose actions are vectors."""

    frames_per_step = 1

    def play(self) -> list[float]:
        returns, _ = evaluate_policy(self.model, self._envs, EPISODES, return_episode_rewards=True)
        return returns


def main() -> None:
    """Learns for so many seconds, evaluations not counted."""
    parser = argument_parser(__doc__)
    parser.add_argument("--env", default="HalfCheetah-v5")
    parser.add_argument("--agent", choices=("sac", "td3"), default="sac")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    size = gymnasium.make(arguments.env).action_space.shape
    noise = NormalActionNoise(np.zeros(size), np.full(size, 0.1))
    envs, more = make_vec_env(arguments.env, seed=arguments.seed), make_vec_env(arguments.env, seed=1000)
    options = {"learning_starts": FIRST_STEPS, "seed": arguments.seed}
    if arguments.agent == "sac":
        model = SAC("MlpPolicy", envs, **options)
    else:
        model = TD3("MlpPolicy", envs, learning_rate=1e-3, action_noise=noise, **options)
    print("seconds,frames,updates,episodes,mean,median,min,max", flush=True)
    model.learn(ENOUGH_STEPS, callback=Robots(more, arguments.seconds, 0))


if __name__ == "__main__":
    main()
