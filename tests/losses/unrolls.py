"""Random unrolls in which episodes end at every position, as the log holds them; time first."""

from typing import NamedTuple

import torch
from torch import Tensor

GAMMA = 0.9
T = 7


class Unrolls(NamedTuple):
    """The arguments of `vtrace`, and where episodes start."""

    log_rhos: Tensor
    discounts: Tensor
    rewards: Tensor
    values: Tensor
    bootstrap_value: Tensor
    valid: Tensor
    accept: Tensor
    starts: Tensor  # [T + 1, B]

    def named(self, *names):
        return {name: getattr(self, name) for name in names}

    @property
    def required(self):
        """The arguments that always have a value, by name."""
        return self.named("log_rhos", "discounts", "rewards", "values", "bootstrap_value")


def ends_everywhere(rng):
    """The last steps of episodes by column: {step: whether it terminated}. Step -1 is the last of the unroll before."""
    single = [{t: terminated} for t in range(-1, T) for terminated in (True, False)]
    pairs = [{t: t % 2 == 0, u: u % 3 == 0} for t in range(-1, T) for u in range(t + 2, T)]
    random = [{t: rng.random() < 0.5 for t in range(-1, T, 2) if rng.random() < 0.4} for _ in range(40)]
    return [{}, *single, *pairs, *random]


def random_unrolls(rng, scale=1.0, accepted=1.0):
    """Unrolls of float64; `scale` is that of log_rhos, and `accepted` the share of accepted states."""
    columns = ends_everywhere(rng)
    shape = (T, len(columns))
    discounts = torch.full(shape, GAMMA, dtype=torch.float64)
    starts = torch.zeros((T + 3, len(columns)), dtype=torch.bool)
    for b, ends in enumerate(columns):
        for t, terminated in ends.items():
            starts[t + 2, b] = True
            if terminated and t >= 0:
                discounts[t, b] = 0
    starts = starts[: T + 1]
    noise = torch.from_numpy(rng.normal(size=(4, *shape)))
    accept = torch.from_numpy(rng.random(shape) < accepted)
    log_rhos, rewards, values, other = noise
    return Unrolls(scale * log_rhos, discounts, rewards, values, other[0], ~starts[1:], accept, starts)
