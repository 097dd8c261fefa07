"""Batches that a reader holds, and the unrolls that it fetches for them."""

import dataclasses
import itertools
from typing import NamedTuple

import numpy as np

from apexrl.net import wire
from apexrl.net.log_client import EncodedUnroll, LogBatch
from apexrl.types import Sample, Unroll, UnrollHeader


class StoredUnroll(NamedTuple):
    """An unroll of the log, decoded."""

    header: UnrollHeader
    unroll: Unroll


class SampledUnrolls(NamedTuple):
    """A batch of keys, and the unrolls that they name."""

    sample: Sample
    numbers: np.ndarray  # [B] int64: of the unroll of each key
    starts: np.ndarray  # [B] int64: the step that a key of a transition names; 0 where keys name unrolls
    unrolls: dict[int, StoredUnroll]  # by number


class Fetch:
    """Unrolls on their way. Where a call ends before they came, the next one waits for them further."""

    def __init__(self, request: int, numbers: list[int]):
        self.request = request
        self.missing = dict.fromkeys(numbers)  # in order
        self.found: dict[int, EncodedUnroll | None] = {}
        self.asked: set[int] = set()  # for which there is no answer yet
        self.heard_seconds = -1e9  # when there was a question or an answer

    def ask(self, now: float) -> wire.Fetch:
        """Returns the question for the next numbers."""
        numbers = tuple(itertools.islice(self.missing, wire.MAX_FETCH))
        self.asked, self.heard_seconds = set(numbers), now
        return wire.Fetch(self.request, numbers)

    def take(self, number: int, unroll: EncodedUnroll | None, now: float) -> None:
        """Takes an answer."""
        if number in self.missing:
            del self.missing[number]
            self.found[number], self.heard_seconds = unroll, now
            self.asked.discard(number)

    def begin_anew(self) -> None:
        """Forgets what was found: it is of another log."""
        self.missing, self.found = dict.fromkeys(sorted([*self.missing, *self.found])), {}


@dataclasses.dataclass
class Held:
    """A batch that came and was not handed out, and its unrolls that did not come with it."""

    batch: LogBatch
    fetch: Fetch | None = None

    def leave_out(self, keys: np.ndarray, items: int) -> bool:
        """Takes keys [N], of which `items` name one unroll, out of the batch; returns whether others are left."""
        sample = self.batch.sample
        kept = ~np.isin(sample.keys, keys)
        numbers = sample.keys // items
        named = zip(np.unique(numbers).tolist(), self.batch.unrolls, strict=False)
        left, probabilities = set(numbers[kept].tolist()), sample.probabilities
        rows = (sample.keys[kept], probabilities[kept] if len(probabilities) else probabilities, sample.weights[kept])
        unrolls = tuple(unroll for number, unroll in named if number in left)
        self.batch = dataclasses.replace(self.batch, sample=Sample(*rows, sample.largest_weight), unrolls=unrolls)
        return bool(kept.any())
