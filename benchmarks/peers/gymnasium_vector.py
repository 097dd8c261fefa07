"""Steps Gymnasium's SyncVectorEnv over AtariPreprocessing and FrameStackObservation with random actions.

The screens are DQN's: 84x84 gray by area, skip 4, maximum of 2 frames, stack of 4. A lost life is no end of an episode,
because Gymnasium would then reset the whole game, which costs time.
"""

import ale_py
import gymnasium
import numpy as np

from benchmarks.peers.measuring import parse_arguments, report


def make(game: str) -> gymnasium.Env:
    """Returns one preprocessed game."""
    env = gymnasium.make(f"{game}NoFrameskip-v4")
    env = gymnasium.wrappers.AtariPreprocessing(env, noop_max=30, frame_skip=4, screen_size=84)
    return gymnasium.wrappers.FrameStackObservation(env, 4)


def main() -> None:
    """Steps the games, and prints the number of steps."""
    arguments = parse_arguments(__doc__)
    gymnasium.register_envs(ale_py)
    envs = gymnasium.vector.SyncVectorEnv([lambda: make(arguments.game)] * arguments.envs)
    envs.reset(seed=0)
    rng = np.random.default_rng(0)
    num_actions = envs.single_action_space.n

    def step() -> int:
        envs.step(rng.integers(num_actions, size=arguments.envs))
        return arguments.envs

    report(step, arguments.seconds)


if __name__ == "__main__":
    main()
