"""Stable-Baselines3's `DQN.train` alone: `python benchmarks/peers/sb3_train.py --frames Pong.npz --batch-size 32 ...`.

It has CnnPolicy and Stable-Baselines3's own replay buffer, filled with the same played game as ours, and steps no
environment. It needs only stable-baselines3, so it can run in an environment of its own. It prints one line of JSON.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from stable_baselines3 import DQN
from stable_baselines3.common.logger import Logger

STACK = 4
NUM_ACTIONS = 6
SAMPLES_A_CALL = 512  # more than in training, so that the work around the steps does not count
WARM_UP_SECONDS = 0.5


class Spaces(gymnasium.Env):
    """Gives the spaces of stacked screens to the network and the buffer. It is never stepped."""

    observation_space = gymnasium.spaces.Box(0, 255, (STACK, 84, 84), np.uint8)
    action_space = gymnasium.spaces.Discrete(NUM_ACTIONS)


def transitions_of(path: Path) -> Iterator[tuple[np.ndarray, np.ndarray, int, float, bool]]:
    """Yields observation, next observation, action, reward and termination of each transition, without end."""
    with np.load(path) as arrays:
        frames, actions = arrays["frames"], arrays["actions"]
        rewards, terminals = arrays["rewards"], arrays["terminals"]
    num_envs, num_steps = actions.shape
    while True:
        for env in range(num_envs):
            for t in range(STACK - 1, num_steps - 1):
                observation, following = frames[env, t - STACK + 1 : t + 1], frames[env, t - STACK + 2 : t + 2]
                yield observation, following, actions[env, t], rewards[env, t], terminals[env, t]


def make_model(frames: Path, batch_size: int, transitions: int, device: str) -> Any:
    """Returns a DQN with a full buffer."""
    model = DQN("CnnPolicy", Spaces(), buffer_size=transitions, batch_size=batch_size, device=device)
    model.set_logger(Logger(folder=None, output_formats=[]))
    for _, (observation, following, action, reward, terminal) in zip(
        range(transitions), transitions_of(frames), strict=False
    ):
        values = (np.array([action]), np.array([reward]), np.array([terminal]))
        model.replay_buffer.add(observation[None], following[None], *values, [{}])
    return model


def timed(model: Any, batch_size: int, seconds: float) -> dict[str, float]:
    """Takes gradient steps for so many seconds after a warm-up."""
    steps_a_call = max(SAMPLES_A_CALL // batch_size, 1)

    def run(duration: float) -> int:
        count, started = 0, time.perf_counter()
        while time.perf_counter() - started < duration:
            model.train(steps_a_call, batch_size)  # reads the loss of each step, so the device has finished them
            count += steps_a_call
        return count

    run(WARM_UP_SECONDS)
    started, cpu_started = time.perf_counter(), time.process_time()
    steps = run(seconds)
    return {
        "steps": steps,
        "seconds": time.perf_counter() - started,
        "cpu_seconds": time.process_time() - cpu_started,
    }


def main() -> None:
    """Prints the number of steps and the time that they took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=Path, required=True, help="a file of benchmarks.replay_frames")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--transitions", type=int, default=25_600, help="held by the buffer")
    parser.add_argument("--threads", type=int, default=0, help="of torch; 0: its default")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=3.0)
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    model = make_model(arguments.frames, arguments.batch_size, arguments.transitions, arguments.device)
    print(json.dumps(timed(model, arguments.batch_size, arguments.seconds)))


if __name__ == "__main__":
    main()
