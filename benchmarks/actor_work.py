"""Measures the parts of our actors alone: `python -m benchmarks.actor_work --work vector --game Pong --envs 32`.

vector     our vector environment with random actions
emulator   CPU microseconds of one agent step of ale-py's emulator without screens, and of its vector environment with
           and without resizing, in turn in this process
"""

import json
import os
import time
from collections.abc import Callable

import numpy as np

from apexrl.config.sections import EnvConfig
from apexrl.environments.atari import FRAMES_PER_STEP, SCREEN
from apexrl.environments.vector import make_environment, take_step
from benchmarks.peers.measuring import WARM_UP_SECONDS, parse_arguments, repeat, report

ROUNDS = 5


def vector(game: str, num_envs: int, num_threads: int) -> Callable[[], int]:
    """Returns a function that takes one step of our vector environment."""
    envs = make_environment(EnvConfig(env=f"{game}NoFrameskip-v4"), num_envs, num_threads=num_threads)
    envs.reset(seed=0)
    rng = np.random.default_rng(0)

    def step() -> int:
        take_step(envs, rng.integers(envs.spec.num_actions, size=num_envs))
        return num_envs

    return step


def ale_vector(game: str, num_envs: int, **options: int) -> Callable[[], int]:
    """Returns a function that steps ale-py's vector environment as ours does, for the newest frame only."""
    from ale_py.vector_env import AtariVectorEnv

    envs = AtariVectorEnv(
        game, num_envs, num_threads=1, reward_clipping=False, life_loss_info=True, stack_num=1, **options
    )
    envs.reset(seed=0)
    num_actions = envs.single_action_space.n
    rng = np.random.default_rng(0)

    def step() -> int:
        envs.step(rng.integers(num_actions, size=num_envs, dtype=np.int32))
        return num_envs

    return step


def emulators(game: str, num_envs: int) -> Callable[[], int]:
    """Returns a function that steps bare emulators: four frames each, without reading a screen."""
    from ale_py import ALEInterface, LoggerMode, roms

    ALEInterface.setLoggerMode(LoggerMode.Error)
    ales = [ALEInterface() for _ in range(num_envs)]
    for index, ale in enumerate(ales):
        ale.setInt("random_seed", index)
        ale.setFloat("repeat_action_probability", 0.0)
        ale.loadROM(roms.get_rom_path(game))
    actions = ales[0].getMinimalActionSet()
    rng = np.random.default_rng(0)

    def step() -> int:
        for ale, choice in zip(ales, rng.integers(len(actions), size=num_envs), strict=True):
            action = actions[choice]
            for _ in range(FRAMES_PER_STEP):
                ale.act(action)
            if ale.game_over():
                ale.reset_game()
        return num_envs

    return step


def take_apart(game: str, num_envs: int, seconds: float) -> dict[str, float]:
    """Returns the CPU microseconds of an agent step of each kind."""
    name = _rom(game)
    height, width = SCREEN
    steps = {
        "emulator": emulators(name, num_envs),
        "resized": ale_vector(name, num_envs),
        "not_resized": ale_vector(name, num_envs, img_height=height, img_width=width),
    }
    for step in steps.values():
        repeat(step, WARM_UP_SECONDS / 2)
    spent = dict.fromkeys(steps, 0.0)
    done = dict.fromkeys(steps, 0)
    for _ in range(ROUNDS):
        for kind, step in steps.items():
            started = time.process_time()
            done[kind] += repeat(step, seconds / ROUNDS)
            spent[kind] += time.process_time() - started
    return {kind: 1e6 * spent[kind] / done[kind] for kind in steps}


def _rom(game: str) -> str:
    """Returns ale-py's name of a game: pong for Pong, space_invaders for SpaceInvaders."""
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in game).lstrip("_")


def main() -> None:
    """Does the chosen work and prints its result as one line of JSON."""
    arguments = parse_arguments(__doc__, work=("vector", "emulator"))
    if arguments.work == "vector":
        threads = arguments.threads or len(os.sched_getaffinity(0))
        report(vector(arguments.game, arguments.envs, threads), arguments.seconds)
    else:
        print(json.dumps(take_apart(arguments.game, arguments.envs, arguments.seconds)))


if __name__ == "__main__":
    main()
