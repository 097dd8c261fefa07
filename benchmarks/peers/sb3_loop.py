"""Stable-Baselines3's loop that collects experience for DQN: network, environments, buffer inserts, no updates.

As in its zoo it has `make_atari_env`, a stack of 4, CnnPolicy (Nature's network) and rounds of four steps
(`train_freq`). Epsilon is 0.01 from the first step on, so that the network acts, as in all but the beginning of a run.
"""

import ale_py
import gymnasium
import torch
from stable_baselines3 import DQN
from stable_baselines3.common.env_util import make_atari_env
from stable_baselines3.common.vec_env import VecFrameStack

from benchmarks.peers.measuring import parse_arguments, report

BUFFER_SIZE = 20_000  # transitions; the cost of an insert does not depend on it
EPSILON = 0.01


def main() -> None:
    """Plays, and prints the number of steps."""
    arguments = parse_arguments(__doc__)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    gymnasium.register_envs(ale_py)
    envs = VecFrameStack(make_atari_env(f"{arguments.game}NoFrameskip-v4", n_envs=arguments.envs, seed=0), 4)
    model = DQN(
        "CnnPolicy",
        envs,
        buffer_size=BUFFER_SIZE,
        train_freq=4,
        exploration_initial_eps=EPSILON,
        exploration_final_eps=EPSILON,
        optimize_memory_usage=True,
        replay_buffer_kwargs={"handle_timeout_termination": False},
        seed=0,
    )
    _, callback = model._setup_learn(10**9)  # as `learn` does before its first round

    def step() -> int:
        # `learn` passes `learning_starts` here, too. With 0, actions are no longer random.
        rollout = model.collect_rollouts(
            model.env, callback, model.train_freq, model.replay_buffer, learning_starts=0, log_interval=None
        )
        return rollout.episode_timesteps

    report(step, arguments.seconds)


if __name__ == "__main__":
    main()
