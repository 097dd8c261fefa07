"""Batches that a reader holds, and the unrolls that it fetches for them."""

import dataclasses
import itertools
from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from apexrl.net import wire
from apexrl.net.log_client import EncodedUnroll, LogBatch
from apexrl.sets import are_in, distinct
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

    def keep(self, numbers: Collection[int]) -> None:
        """Lets go of all other numbers."""
        self.missing = {number: None for number in self.missing if number in numbers}
        self.found = {number: unroll for number, unroll in self.found.items() if number in numbers}
        self.asked.intersection_update(numbers)

    def begin_anew(self) -> None:
        """Forgets what was found: it is of another log."""
        self.missing, self.found = dict.fromkeys(sorted([*self.missing, *self.found])), {}


@dataclasses.dataclass(eq=False)
class Held:
    """A batch that came and was not handed out, and its unrolls that did not come with it."""

    batch: LogBatch
    items: int  # keys that name one unroll
    fetch: Fetch | None = None

    @property
    def numbers(self) -> np.ndarray:
        """The unroll number [B] of each key."""
        return self.batch.sample.keys // self.items

    @property
    def named(self) -> list[int]:
        """The number of each unroll that a key names, once, in rising order."""
        return distinct(self.numbers).tolist()

    def leave_out(self, keys: np.ndarray | None) -> None:
        """Takes keys [N], or all, out of the batch, and the unrolls that no other key names."""
        sample = self.batch.sample
        kept = np.zeros(len(sample.keys), bool) if keys is None else ~are_in(sample.keys, distinct(keys))
        left = set(self.numbers[kept].tolist())
        named = zip(self.named, self.batch.unrolls, strict=False)
        unrolls = tuple(unroll for number, unroll in named if number in left)
        probabilities = sample.probabilities[kept] if len(sample.probabilities) else sample.probabilities
        rest = Sample(sample.keys[kept], probabilities, sample.weights[kept], sample.largest_weight)
        self.batch = dataclasses.replace(self.batch, sample=rest, unrolls=unrolls)
        if self.fetch is not None:
            self.fetch.keep(left)
