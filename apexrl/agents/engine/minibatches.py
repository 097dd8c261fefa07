"""Minibatches of a draw, for algorithms that take several steps from it, as PPO does (arXiv:1707.06347)."""

from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import Tensor

from apexrl.agents.contract import TransitionBatch, UnrollBatch
from apexrl.types import StreamSpec

B = TypeVar("B", TransitionBatch, UnrollBatch)


def shuffled(num_rows: int, num_minibatches: int, num_epochs: int, device: torch.device) -> Iterator[Tensor]:
    """Yields the rows [num_rows / num_minibatches] of each minibatch: every epoch goes through all, in its own order.

    A graph captures it: the order is drawn anew at each replay.

    Raises: ValueError when the rows cannot be divided.
    """
    if num_rows % num_minibatches:
        raise ValueError(f"{num_rows} rows cannot be divided into {num_minibatches} minibatches")
    for _ in range(num_epochs):
        yield from torch.rand(num_rows, device=device).argsort().chunk(num_minibatches)


def rows_of(batch: B, rows: Tensor | slice, spec: StreamSpec) -> B:
    """Returns some rows [b] of a batch, copied; views of them where they are a slice."""
    if isinstance(batch, TransitionBatch):
        return TransitionBatch(*(tensor[rows] for tensor in batch))
    first = {field.name for field in spec.extras if field.at == "first"} | {"number", "previous"}
    *steps, extras, weight = batch
    observation, action, reward, discount, start = (tensor[:, rows] for tensor in steps)
    own = {name: values[rows] if name in first else values[:, rows] for name, values in extras.items()}
    return UnrollBatch(observation, action, reward, discount, start, own, weight[rows])
