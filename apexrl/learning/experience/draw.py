"""A draw: one sample of each table that a learner wants, gathered or still named by keys."""

import collections
import threading
from typing import NamedTuple, Protocol

import numpy as np

from apexrl.agents.contract import Batch

NO_VERSIONS = np.zeros(0, np.int64)


class Holder(Protocol):
    """A store that still holds some of the keys of a sample, and others no more."""

    generation: int

    def holds(self, table: str, keys: np.ndarray) -> np.ndarray:
        """Returns [B] bool: whether the keys of a table's sample are held."""
        ...


class SampledKeys(NamedTuple):
    """A sample by name, which the update gathers itself. Some of it may be overwritten by then."""

    store: Holder
    table: str
    generation: int  # the generation of the store's content
    keys: np.ndarray  # [B] int64
    weights: np.ndarray  # [B] float32
    versions: np.ndarray = NO_VERSIONS  # [B] params_version that made each key's unroll, where they are known

    def held(self) -> np.ndarray:
        """Returns [B] bool: which are still there. Call it while the stream is held in which they are gathered."""
        if self.generation != self.store.generation:
            return np.zeros(len(self.keys), bool)
        return self.store.holds(self.table, self.keys)


class Gathered(NamedTuple):
    """A sample as tensors. The first M of its B rows are those that were there; the others have weight 0."""

    keys: np.ndarray  # [M] int64
    batch: Batch
    versions: np.ndarray = NO_VERSIONS  # [M] params_version that made each key's unroll, where they are known


class Draw(NamedTuple):
    """One sample of each wanted table."""

    generation: int  # counts the logs that were followed: keys mean nothing beyond theirs
    samples: dict[str, SampledKeys | Gathered]
    shard: int = 0  # whose log it is of
    largest_weight: float = 1.0  # by which the importance weights of its only table were divided

    @property
    def versions(self) -> dict[str, np.ndarray]:
        """The versions [M] that made each key's unroll, by table."""
        return {table: sample.versions for table, sample in self.samples.items()}

    @property
    def is_gathered(self) -> bool:
        """Whether all samples are tensors already."""
        return all(isinstance(sample, Gathered) for sample in self.samples.values())

    def batches(self) -> dict[str, Batch]:
        """Returns the gathered batches by table."""
        return {table: sample.batch for table, sample in self.samples.items() if isinstance(sample, Gathered)}


class DrawQueue:
    """Draws that wait for their update. The server sends only demanded batches, so that a put never waits."""

    def __init__(self) -> None:
        self._draws: collections.deque[Draw] = collections.deque()
        self._arrived = threading.Condition()

    def put(self, draw: Draw) -> None:
        """Appends a draw."""
        with self._arrived:
            self._draws.append(draw)
            self._arrived.notify()

    def get(self, timeout_seconds: float) -> Draw | None:
        """Removes the oldest draw; None when there is none in time."""
        with self._arrived:
            self._arrived.wait_for(lambda: self._draws, timeout_seconds)
            return self._draws.popleft() if self._draws else None

    def peek(self) -> Draw | None:
        """Returns the oldest draw, and leaves it; None when there is none."""
        with self._arrived:
            return self._draws[0] if self._draws else None


def fill(here_keys: np.ndarray, here_weights: np.ndarray, keys: np.ndarray, weights: np.ndarray) -> None:
    """Writes M keys and weights into memory for B rows; the other B - M rows repeat the keys in turn with weight 0.

    So statistics of a whole batch count no key much more than another. The weights are scaled by B / M: a mean over B
    rows is then the mean over the M real ones.
    """
    size, count = len(here_keys), len(keys)
    here_keys[:] = np.resize(keys, size)
    here_weights[:count] = weights * np.float32(size / count)
    here_weights[count:] = 0
