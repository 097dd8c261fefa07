"""Steps EnvPool's C++ vector environment with random actions, all environments in lockstep.

It has EnvPool's defaults for Atari: 84x84 gray, skip 4, stack of 4, fire at a reset, up to 30 no-ops. Episodes end at a
lost life and rewards are clipped, as usual. `--resize bilinear` resizes as EnvPool's own benchmark does. That is faster
and gives other screens.
"""

import os

import envpool
import numpy as np

from benchmarks.peers.measuring import parse_arguments, report


def main() -> None:
    """Steps the games, and prints the number of steps."""
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
