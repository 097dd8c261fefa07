"""Records games for replay services: `python -m benchmarks.replay_frames OUT_DIR [--steps N] [--games Pong noise]`.

A random policy plays each game in several environments side by side. The file keeps the newest frame of every step. A
reset is a step like any other here (its action was ignored), so that every measured system gets the same bytes. The
file of a game is written once. Later calls leave it alone, whatever their options are.
"""

import argparse
from pathlib import Path
from typing import NamedTuple

import numpy as np

GAMES = ("Pong", "Breakout", "Seaquest", "noise")
NUM_ENVS = 8
NOISE_SHAPE = (4, 1000)  # incompressible frames cost the same everywhere, so fewer are enough
FRAME_SHAPE = (84, 84)


class Frames(NamedTuple):
    """Steps of E environments. Frame t is the newest one of the observation in which action t was taken."""

    frames: np.ndarray  # [E, steps, 84, 84] uint8
    actions: np.ndarray  # [E, steps] int32
    rewards: np.ndarray  # [E, steps] float32, the reward of action t
    terminals: np.ndarray  # [E, steps] bool: action t ended the episode or cost a life


def load(path: Path | str) -> Frames:
    """Returns the steps of a file written by `make`."""
    with np.load(path) as arrays:
        return Frames(*(arrays[name] for name in Frames._fields))


def make(directory: Path, game: str, num_steps: int, seed: int = 0) -> Path:
    """Writes the file of a game unless it exists; returns its path."""
    path = directory / f"{game}.npz"
    if not path.exists():
        directory.mkdir(parents=True, exist_ok=True)
        steps = noise(seed) if game == "noise" else play(game, num_steps, seed)
        unfinished = path.with_suffix(".part.npz")
        np.savez_compressed(unfinished, **steps._asdict())
        unfinished.rename(path)
    return path


def play(game: str, num_steps: int, seed: int) -> Frames:
    """Returns the steps of a random policy."""
    from apexrl.config.sections import EnvConfig
    from apexrl.environments.vector import make_environment, take_step

    rng = np.random.default_rng(seed)
    environment = make_environment(EnvConfig(env=f"{game}NoFrameskip-v4"), NUM_ENVS)
    steps = _empty(NUM_ENVS, num_steps)
    frames = environment.reset(seed)
    for t in range(num_steps):
        steps.frames[:, t] = frames
        steps.actions[:, t] = rng.integers(environment.spec.num_actions, size=NUM_ENVS)
        seen = take_step(environment, steps.actions[:, t])
        steps.rewards[:, t] = seen.rewards
        steps.terminals[:, t] = seen.discounts == 0
        frames = seen.frames
    environment.close()
    return steps


def noise(seed: int) -> Frames:
    """Returns steps with frames that no codec can compress."""
    rng = np.random.default_rng(seed)
    steps = _empty(*NOISE_SHAPE)
    steps.frames[:] = rng.integers(256, size=steps.frames.shape, dtype=np.uint8)
    steps.actions[:] = rng.integers(6, size=NOISE_SHAPE)
    steps.rewards[:] = rng.integers(-1, 2, size=NOISE_SHAPE)
    steps.terminals[:] = rng.random(NOISE_SHAPE) < 0.005
    return steps


def _empty(num_envs: int, num_steps: int) -> Frames:
    shape = (num_envs, num_steps)
    return Frames(
        np.zeros((*shape, *FRAME_SHAPE), np.uint8),
        np.zeros(shape, np.int32),
        np.zeros(shape, np.float32),
        np.zeros(shape, bool),
    )


def main() -> None:
    """Writes the files asked for and prints their paths."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="OUT_DIR")
    parser.add_argument("--steps", type=int, default=4000, help="steps of each environment")
    parser.add_argument("--games", nargs="+", default=GAMES, help="Atari names, or noise")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for game in arguments.games:
        print(make(arguments.directory, game, arguments.steps, arguments.seed), flush=True)


if __name__ == "__main__":
    main()
