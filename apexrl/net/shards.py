"""Several replay servers, each with its own log, read as one service: `ShardedReplayClient`. Belongs to one thread.

An actor process inserts into one shard (`acting.loop`). Readers see keys and unroll numbers that carry their shard:
key * shards + shard. Batches come from the shards in turn, so all shards should hold about as much.
"""

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import zmq
from numpy.typing import ArrayLike

from apexrl.errors import PeerTimeout
from apexrl.net import wire
from apexrl.net.arguments import checked_numbers, checked_update, checked_whole
from apexrl.net.calls import Closing, Steps, call, deadline_of
from apexrl.net.connection import POLL_SECONDS
from apexrl.net.keyring import Keyring
from apexrl.net.replay_client import ReplayClient, SampledUnrolls, StoredUnroll
from apexrl.types import Sample, StreamSpec

LOOK_SECONDS = 0.001  # at each shard, before we wait for any


class ShardedReplayClient(Closing):
    """A `ReplayClient` of several servers. It skips a server that is away while the others have batches.

    Its calls are those of `ReplayClient`, and raise the same; `fileno` is of each of its `shards`.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        name: str,
        batch_sizes: Mapping[str, int] | None = None,
        prefetch_batches: int = 4,
        keyring: Keyring | None = None,
        context: zmq.Context | None = None,
        with_probabilities: bool = False,
        with_unrolls: bool = False,
        log: str = "",
    ):
        """Connects to all servers and waits for none. The order of the endpoints has to stay the same.

        Raises: ValueError when there is no endpoint, or such batches are not served.
        """
        if not endpoints:
            raise ValueError("at least one endpoint is needed")
        settings = batch_sizes, prefetch_batches, keyring, context, with_probabilities, with_unrolls, log
        self.shards = [ReplayClient(endpoint, name, *settings) for endpoint in endpoints]
        self._endpoints = tuple(endpoints)
        self._turns = itertools.cycle(range(len(self.shards)))

    @property
    def spec(self) -> StreamSpec | None:
        """The spec of the unrolls, once a shard has told it."""
        return next((client.spec for client in self.shards if client.spec is not None), None)

    def has_batch(self, table: str) -> bool:
        """True when `sample` would not wait."""
        return any([client.has_batch(table) for client in self.shards])  # each: it keeps the connection alive

    def sample(self, table: str, timeout_seconds: float) -> Sample:
        """Returns a batch of the next shard that has one. Probabilities are over all shards, weights within the shard.

        Raises: as `ReplayClient.sample`; PeerTimeout when no shard has a batch in time, PeerRefused when one refuses.
        """
        return self.sampling(table, timeout_seconds).finish()

    @call
    def sampling(self, table: str, timeout_seconds: float) -> Steps[Sample]:
        """Is `sample` to be awaited."""
        shard = yield from self._next_with_batch(table, deadline_of(timeout_seconds))
        return self._widened((yield from self.shards[shard].sampling(table, timeout_seconds)), shard)

    def sample_unrolls(self, table: str, timeout_seconds: float) -> SampledUnrolls:
        """Returns a batch of the next shard that has one, with its unrolls, as `ReplayClient.sample_unrolls` does."""
        return self.sampling_unrolls(table, timeout_seconds).finish()

    @call
    def sampling_unrolls(self, table: str, timeout_seconds: float) -> Steps[SampledUnrolls]:
        """Is `sample_unrolls` to be awaited."""
        deadline, count = deadline_of(timeout_seconds), len(self.shards)
        shard = yield from self._next_with_batch(table, deadline)
        found = yield from self.shards[shard].sampling_unrolls(table, deadline - time.monotonic())
        unrolls = {number * count + shard: unroll for number, unroll in found.unrolls.items()}
        return SampledUnrolls(self._widened(found.sample, shard), found.numbers * count + shard, found.starts, unrolls)

    def unroll_batches(self, table: str, timeout_seconds: float) -> Iterator[SampledUnrolls]:
        """Yields batches with their unrolls without end, of the shards in turn, as `ReplayClient.unroll_batches`."""
        return iter(lambda: self.sample_unrolls(table, timeout_seconds), object())  # which goes on after an error

    def fetch(self, numbers: Iterable[int], timeout_seconds: float) -> dict[int, StoredUnroll]:
        """Returns decoded unrolls by number, without those that no log holds."""
        return self.fetching(numbers, timeout_seconds).finish()

    @call
    def fetching(self, numbers: Iterable[int], timeout_seconds: float) -> Steps[dict[int, StoredUnroll]]:
        """Is `fetch` to be awaited."""
        deadline, count, found = deadline_of(timeout_seconds), len(self.shards), dict[int, StoredUnroll]()
        wanted = np.array(checked_numbers(numbers), np.int64)
        for shard, own in self._owners(wanted):
            held = yield from self.shards[shard].fetching(wanted[own] // count, deadline - time.monotonic())
            found |= {number * count + shard: unroll for number, unroll in held.items()}
        return found

    def update_priorities(self, table: str, keys: ArrayLike, priorities: ArrayLike) -> None:
        """Sends new priorities [B] of keys [B] to the shards that the keys came from."""
        names, values = checked_update(keys, priorities)
        for shard, own in self._owners(names):
            self.shards[shard].update_priorities(table, names[own] // len(self.shards), values[own])

    def delete(self, table: str, keys: ArrayLike, timeout_seconds: float) -> int:
        """Takes items [N] out of a table of their shards, as `ReplayClient.delete`; returns how many could be drawn.

        Raises: as `ReplayClient.delete`. Items of other shards may be gone then: call it again.
        """
        return self.deleting(table, keys, timeout_seconds).finish()

    @call
    def deleting(self, table: str, keys: ArrayLike, timeout_seconds: float) -> Steps[int]:
        """Is `delete` to be awaited."""
        names, deadline, count = checked_whole(keys, "keys"), deadline_of(timeout_seconds), 0
        for shard, own in self._owners(names):
            left = deadline - time.monotonic()
            count += yield from self.shards[shard].deleting(table, names[own] // len(self.shards), left)
        return count

    def reset(self, table: str, timeout_seconds: float) -> int:
        """Takes all items out of a table of each shard, as `ReplayClient.reset`; returns how many could be drawn.

        Raises: as `ReplayClient.reset`. Other shards may have done it then: call it again.
        """
        return self.resetting(table, timeout_seconds).finish()

    @call
    def resetting(self, table: str, timeout_seconds: float) -> Steps[int]:
        """Is `reset` to be awaited."""
        deadline, count = deadline_of(timeout_seconds), 0
        for client in self.shards:
            count += yield from client.resetting(table, deadline - time.monotonic())
        return count

    def statistics(self, timeout_seconds: float) -> list[wire.Statistics]:
        """Returns the statistics of each shard."""
        deadline = deadline_of(timeout_seconds)
        return [client.statistics(deadline - time.monotonic()) for client in self.shards]

    def close(self) -> None:
        """Says goodbye to all servers and closes the sockets."""
        for client in self.shards:
            client.close()

    def _next_with_batch(self, table: str, deadline: float) -> Steps[int]:
        """Returns the next shard in turn that has a batch: looks at all of them, then waits a moment at each."""
        for seconds in itertools.chain([LOOK_SECONDS], itertools.repeat(POLL_SECONDS / len(self.shards))):
            for shard in itertools.islice(self._turns, len(self.shards)):
                left = max(deadline - time.monotonic(), 0.0)
                if (yield from self.shards[shard].batch_comes(table, min(seconds, left))):
                    return shard
            if time.monotonic() >= deadline:
                break
        waits = (f"{at} waits for {client.waits_for}" for at, client in zip(self._endpoints, self.shards, strict=True))
        raise PeerTimeout(f"no batch of {table} from any replay server in time: {'; '.join(waits)}")

    def _owners(self, keys: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Yields the shards of keys or numbers [N], and [N] bool: which ones are theirs."""
        for shard in range(len(self.shards)):
            if (own := keys % len(self.shards) == shard).any():
                yield shard, own

    def _widened(self, sample: Sample, shard: int) -> Sample:
        """Returns a sample of a shard as one of all."""
        count = len(self.shards)
        return sample._replace(keys=sample.keys * count + shard, probabilities=sample.probabilities / count)
