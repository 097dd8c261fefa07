"""The states with which an LSTM begins replayed unrolls: --replay-state.

The log holds the actor's state, which is one of older parameters. Instead of it an unroll may begin with

* walk: the state in which the unroll before it ended, where that was in the last batch,
* burn-in: the state of the log some unrolls earlier, after the network has gone through those,
* zero: zeros, whatever came before.

No state crosses a reset: the LSTM begins each episode with zeros.
Sources: LASER (arXiv:1909.11583, appendix) walks, R2D2 (ICLR 2019) compares the others.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from apexrl.agents.contract import LAST_BATCH, Batches, UnrollBatch, Unrolls, Want
from apexrl.agents.engine.minibatches import rows_of
from apexrl.agents.recurrence import STATE, lstm_size_of
from apexrl.agents.replaying.mix import Part
from apexrl.agents.replaying.unroll_batches import history_of
from apexrl.types import StreamSpec

NOBODY = -2  # the number of no unroll; -1 says that there is none before another


class ReplayStates:
    """Owns the states in which the walking unrolls of the last batch ended, and their numbers."""

    def __init__(self, parts: Sequence[Part], wants: Sequence[Want], replay_state: str, spec: StreamSpec,
                 device: torch.device):  # fmt: skip
        """Takes the parts of a mix and their wants, in the same order."""
        self._spec, lstm_size = spec, lstm_size_of(spec)
        self._views = {want.table: want.view for want in wants if isinstance(want.view, Unrolls)}
        self._zero = {part.name for part in parts if replay_state == "zero" and lstm_size and not part.is_online}
        self._walking = [want.table for want in wants if want.is_replaced]
        num_walking = sum(want.num_rows for want in wants if want.is_replaced)
        self._numbers = torch.full((num_walking,), NOBODY, device=device)
        self._ended = torch.zeros((num_walking, 2, lstm_size), device=device)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors that updates change, by name."""
        if not len(self._numbers):
            return {}
        return {f"{LAST_BATCH}numbers": self._numbers, f"{LAST_BATCH}states": self._ended}

    def begin(self, batches: Batches, network: Any) -> dict[str, UnrollBatch]:
        """Returns the batches to learn from by table: B rows each, with the states that they begin with."""
        begun = {}
        for table, view in self._views.items():
            batch: UnrollBatch = batches[table]
            if table in self._zero:
                batch = with_state(batch, torch.zeros_like(batch.extras[STATE]))
            elif view.burn_in_unrolls:
                batch = burned_in(batch, view.burn_in_unrolls, network, self._spec)
            elif table in self._walking:
                batch = self._walked(batch)
            begun[table] = batch
        return begun

    def keep(self, batches: Batches, ended: Tensor | None) -> None:
        """Takes the states [B, 2, size] in which the rows of all tables ended, one table after the other."""
        if ended is None or not len(self._numbers):
            return
        parts = dict(zip(self._views, ended.split([len(batches[table].weight) for table in self._views]), strict=True))
        self._numbers.copy_(torch.cat([batches[table].extras["number"] for table in self._walking]))
        self._ended.copy_(torch.cat([parts[table] for table in self._walking]))

    def _walked(self, batch: UnrollBatch) -> UnrollBatch:
        is_before = batch.extras["previous"].unsqueeze(1) == self._numbers  # [B, rows that walk]
        walked = self._ended[is_before.int().argmax(dim=1)]
        extras = {name: values for name, values in batch.extras.items() if name not in ("number", "previous")}
        batch = batch._replace(extras=extras)
        return with_state(batch, torch.where(is_before.any(dim=1)[:, None, None], walked, extras[STATE]))


def with_state(batch: UnrollBatch, state: Tensor) -> UnrollBatch:
    """Returns a batch that begins with states [B, 2, size]."""
    return batch._replace(extras=batch.extras | {STATE: state})


def burned_in(batch: UnrollBatch, num_before: int, network: Any, spec: StreamSpec) -> UnrollBatch:
    """Returns the last B of (num_before + 1) B rows, with the states to which the network comes through the others.

    Args:
      batch: the unrolls furthest before in front; weight 0 where one is not held, and states begin after it.
      network: whose `unroll` gives the state after some steps, too: where the next unroll begins.
    """
    size = len(batch.weight) // (num_before + 1)
    rows = rows_of(batch, slice(0, size), spec)
    for k in range(1, num_before + 1):
        with torch.no_grad():
            ended = network.unroll(rows.observation, history_of(rows), num_steps=spec.unroll_starts).state
        rows = continued(rows, ended, rows_of(batch, slice(k * size, (k + 1) * size), spec))
    return rows


def continued(before: UnrollBatch, ended: Tensor, rows: UnrollBatch) -> UnrollBatch:
    """Returns rows with the states [B, 2, size] in which those before them ended, where these are held."""
    return with_state(rows, torch.where((before.weight > 0)[:, None, None], ended, rows.extras[STATE]))
