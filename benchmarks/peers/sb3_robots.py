"""Trains Stable-Baselines3's SAC, TD3 or PPO with the numbers of its zoo, and evaluates it as ours is evaluated.

`python -m benchmarks.peers.sb3_robots --env HalfCheetah-v5 --agent sac --threads 0 --seconds 2700 > sb3-sac.csv` prints
lines like those of a run's evaluations.csv. An evaluation every `--period-seconds`, and at the end, plays ten games
without noise. Its time is not counted: ours evaluates beside the training. The zoo's SAC and TD3 begin to learn after
10,000 random steps, and make an update for each step; its PPO has numbers of its own for each environment.
"""

from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from stable_baselines3 import PPO, SAC, TD3
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.noise import NormalActionNoise
from stable_baselines3.common.vec_env import VecNormalize

from benchmarks.peers.measuring import argument_parser
from benchmarks.peers.sb3_games import EPISODES, EVALUATION_SECONDS, Evaluations

ENOUGH_STEPS = 10**8  # the time ends the run
FIRST_STEPS = 10_000


class Ppo(NamedTuple):
    """The zoo's numbers of PPO for an environment: environments, whether observations and rewards are normalized."""

    num_envs: int
    is_normalized: bool
    numbers: dict[str, Any]


PPO_NUMBERS = {
    "LunarLanderContinuous-v3": Ppo(16, False, {
        "n_steps": 1024, "batch_size": 64, "n_epochs": 4, "gamma": 0.999, "gae_lambda": 0.98, "ent_coef": 0.01,
    }),
    "BipedalWalker-v3": Ppo(32, True, {
        "n_steps": 2048, "batch_size": 64, "n_epochs": 10, "gamma": 0.999, "gae_lambda": 0.95, "clip_range": 0.18,
    }),
    "HalfCheetah-v5": Ppo(1, True, {
        "n_steps": 512, "batch_size": 64, "n_epochs": 20, "gamma": 0.98, "gae_lambda": 0.92,
        "learning_rate": 2.0633e-05, "clip_range": 0.1, "ent_coef": 0.000401762, "vf_coef": 0.58096,
        "max_grad_norm": 0.8, "policy_kwargs": {"log_std_init": -2, "ortho_init": False,
            "activation_fn": torch.nn.ReLU, "net_arch": {"pi": [256, 256], "vf": [256, 256]}},
    }),
}  # fmt: skip


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
    parser.add_argument("--agent", choices=("sac", "td3", "ppo"), default="sac")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--period-seconds", type=float, default=EVALUATION_SECONDS, help="between evaluations")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    size = gymnasium.make(arguments.env).action_space.shape
    noise = NormalActionNoise(np.zeros(size), np.full(size, 0.1))
    options = {"learning_starts": FIRST_STEPS, "seed": arguments.seed}
    ppo = PPO_NUMBERS.get(arguments.env) if arguments.agent == "ppo" else None
    if arguments.agent == "ppo" and ppo is None:
        parser.error(f"no numbers of PPO for {arguments.env}: give --env one of {', '.join(PPO_NUMBERS)}")
    envs = make_vec_env(arguments.env, n_envs=ppo.num_envs if ppo else 1, seed=arguments.seed)
    more = make_vec_env(arguments.env, seed=1000)
    if ppo is not None:
        if ppo.is_normalized:
            envs = VecNormalize(envs, gamma=ppo.numbers["gamma"])
            more = VecNormalize(more, training=False, norm_reward=False)
            more.obs_rms = envs.obs_rms
        model = PPO("MlpPolicy", envs, seed=arguments.seed, **ppo.numbers)
    elif arguments.agent == "sac":
        model = SAC("MlpPolicy", envs, **options)
    else:
        model = TD3("MlpPolicy", envs, learning_rate=1e-3, action_noise=noise, **options)
    print("seconds,frames,updates,episodes,mean,median,min,max", flush=True)
    model.learn(ENOUGH_STEPS, callback=Robots(more, arguments.seconds, 0, arguments.period_seconds))


if __name__ == "__main__":
    main()
