"""EnvPool's C++ vector environment, all environments in step, stepped at random.

Its defaults for Atari (84x84 gray, skip 4, stack of 4, fire at a reset, up to 30 no-ops) with the usual ends at a lost
life and clipped rewards. `--resize bilinear` is what EnvPool's own benchmark does: faster, and other screens.
"""

import os

import envpool
import numpy as np

from benchmarks.peers.measuring import parse_arguments, report


def main() -> None:
    """Steps the games and prints the count."""
    arguments = parse_arguments(__doc__, resize=("area", "bilinear"))
    envs = envpool.make_gymnasium(
        f"{arguments.game}-v5",
        num_envs=arguments.envs,
        num_threads=arguments.threads or len(os.sched_getaffinity(0)),
        episodic_life=True,
        reward_clip=True,
        use_inter_area_resize=arguments.resize == "area",
    )
    envs.reset()
    rng = np.random.default_rng(0)
    num_actions = envs.action_space.n

    def step() -> int:
        envs.step(rng.integers(num_actions, size=arguments.envs, dtype=np.int32))
        return arguments.envs

    report(step, arguments.seconds)


if __name__ == "__main__":
    main()
