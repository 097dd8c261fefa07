"""Several replay servers, each with its own log, read as one service: `ShardedReplayClient`. Belongs to one thread.

An actor process inserts into one shard, chosen by its name (`shard_of`). Readers see keys and unroll numbers that carry
their shard: key * shards + shard. Batches come from the shards in turn, so all shards should hold about as much.
"""

import itertools
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import zmq

from apexrl.errors import PeerTimeout
from apexrl.net import wire
from apexrl.net.arguments import checked_numbers, checked_update
from apexrl.net.calls import Closing
from apexrl.net.keyring import Keyring
from apexrl.net.replay_client import ReplayClient, StoredUnroll
from apexrl.types import Sample


def shard_of(actor: str, num_shards: int) -> int:
    """Returns the shard that an actor inserts into. A name always gets the same shard."""
    return zlib.crc32(actor.encode()) % num_shards


class ShardedReplayClient(Closing):
    """A `ReplayClient` of several servers. It skips a server that is away while the others have batches."""

    def __init__(
        self,
        endpoints: Sequence[str],
        name: str,
        batch_sizes: Mapping[str, int] | None = None,
        prefetch_batches: int = 4,
        keyring: Keyring | None = None,
        context: zmq.Context | None = None,
        with_probabilities: bool = False,
    ):
        """Connects to all servers and waits for none. The order of the endpoints has to stay the same.

        Raises: ValueError when there is no endpoint, or such batches are not served.
        """
        if not endpoints:
            raise ValueError("at least one endpoint is needed")
        self.shards = [
            ReplayClient(endpoint, name, batch_sizes, prefetch_batches, keyring, context, with_probabilities)
            for endpoint in endpoints
        ]
        self._turns = itertools.cycle(range(len(self.shards)))

    def sample(self, table: str, timeout_seconds: float) -> Sample:
        """Returns a batch of the next shard that has one. Probabilities are over all shards, weights within the shard.

        Raises: PeerTimeout when no shard has a batch in time, PeerRefused when one refuses us.
        """
        for shard in itertools.islice(self._turns, len(self.shards)):
            if self.shards[shard].has_batch(table):
                return self._sample(shard, table, timeout_seconds)
        patience = timeout_seconds / len(self.shards)
        reasons = []
        for shard in itertools.islice(self._turns, len(self.shards)):
            try:
                return self._sample(shard, table, patience)
            except PeerTimeout as error:
                reasons.append(str(error))
        raise PeerTimeout("; ".join(reasons))

    def fetch(self, numbers: Iterable[int], timeout_seconds: float) -> dict[int, StoredUnroll]:
        """Returns decoded unrolls by number, without those that no log holds.

        Raises: as `ReplayClient.fetch`.
        """
        deadline, count = time.monotonic() + timeout_seconds, len(self.shards)
        wanted = np.array(checked_numbers(numbers), np.int64)
        found = {}
        for shard, client in enumerate(self.shards):
            if not (of_shard := wanted % count == shard).any():
                continue
            held = client.fetch(wanted[of_shard] // count, deadline - time.monotonic())
            found.update({number * count + shard: unroll for number, unroll in held.items()})
        return found

    def update_priorities(self, table: str, keys: np.ndarray, priorities: np.ndarray) -> None:
        """Sends new priorities [B] of keys [B] to the shards that the keys came from.

        Raises: as `ReplayClient.update_priorities`.
        """
        keys, priorities = checked_update(keys, priorities)
        count = len(self.shards)
        for shard, client in enumerate(self.shards):
            of_shard = keys % count == shard
            if of_shard.any():
                client.update_priorities(table, keys[of_shard] // count, priorities[of_shard])

    def statistics(self, timeout_seconds: float) -> list[wire.Statistics]:
        """Returns the statistics of each shard.

        Raises: as `ReplayClient.statistics`.
        """
        deadline = time.monotonic() + timeout_seconds
        return [client.statistics(deadline - time.monotonic()) for client in self.shards]

    def close(self) -> None:
        """Says goodbye to all servers and closes the sockets."""
        for client in self.shards:
            client.close()

    def _sample(self, shard: int, table: str, timeout_seconds: float) -> Sample:
        sample = self.shards[shard].sample(table, timeout_seconds)
        count = len(self.shards)
        return sample._replace(keys=sample.keys * count + shard, probabilities=sample.probabilities / count)
