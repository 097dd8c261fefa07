"""The actor's thread beside its loop: compresses complete unrolls and inserts them into the replay."""

import logging
import queue
import time
from collections.abc import Callable
from typing import TypeVar

from apexrl.acting.player import Lease, Round
from apexrl.errors import PeerRefused, PeerTimeout
from apexrl.lifecycle import Stop
from apexrl.net.insert_client import InsertClient
from apexrl.types import UnrollHeader
from apexrl.unroll import UnrollCodec

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_QUEUED = 2  # rounds of unrolls that wait to be sent; beyond that the actor waits
POLL_SECONDS = 0.05
FLUSH_SECONDS = 1.5
ASK_SECONDS = 1.0


def patiently(client: InsertClient, patience_seconds: float, call: Callable[[float], T]) -> T:
    """Returns the result of a client's call, which may take as long as a living server lets us wait.

    Args:
      call: takes the seconds that it may take, and is repeated when they were not enough.
    Raises: PeerTimeout when the server has not said where we stand for longer than the patience.
    """
    was_away = False
    while True:
        try:
            return call(ASK_SECONDS)
        except PeerTimeout:
            is_away = client.away_seconds > patience_seconds
            if is_away and was_away:  # once may be because this process was stopped itself
                raise
            was_away = is_away


class UnrollSender:
    """Owns the connection to the replay once its thread runs. The actor's loop may `offer` and read the metrics."""

    def __init__(self, client: InsertClient, codec: UnrollCodec, patience_seconds: float, stop: Stop):
        """Takes over a client that is welcome."""
        self.busy_seconds = 0.0
        self._client = client
        self._codec = codec
        self._patience_seconds = patience_seconds
        self._stop = stop
        self._queue: queue.Queue[Round] = queue.Queue(MAX_QUEUED)

    @property
    def lease(self) -> Lease:
        """The slots leased to us now."""
        return Lease(self._client.slots, self._client.ladder_size)

    @property
    def waited_seconds(self) -> dict[str, float]:
        """Seconds that inserts had to wait, by reason."""
        return dict(self._client.waited_seconds)

    @property
    def bytes_sent(self) -> int:
        """Bytes of the blocks sent."""
        return self._client.bytes_sent

    def offer(self, unrolls: Round) -> bool:
        """Queues unrolls; False when others are still queued after a moment, because the replay takes none."""
        try:
            self._queue.put(unrolls, timeout=POLL_SECONDS)
        except queue.Full:
            return False
        return True

    def run(self) -> None:
        """Sends until stopped, and then until the replay takes no more; the body of the thread.

        Raises: PeerTimeout when the replay is away for longer than the patience, PeerRefused when it refuses us,
          WireError when it takes no such unroll.
        """
        try:
            while True:
                self._client.poll()  # keeps our lease
                try:
                    unrolls = self._queue.get(timeout=POLL_SECONDS)
                except queue.Empty:
                    if self._stop.is_set():
                        break
                    continue
                if not self._send(unrolls):
                    break
        finally:
            self._end()

    def _end(self) -> None:
        try:
            if not self._client.flush(FLUSH_SECONDS):
                logger.warning("%d unrolls were not acknowledged at the end", self._client.num_unacknowledged)
        except PeerRefused as error:
            logger.warning("not all unrolls were stored: %s", error)
        finally:
            self._client.close()

    def _send(self, unrolls: Round) -> bool:
        """Inserts the unroll of each stream; returns False at the first that is not sent, because we are stopped."""
        for i in range(len(unrolls.episodes)):
            started, waited = time.perf_counter(), sum(self.waited_seconds.values())
            block = self._codec.encode(unrolls.unrolls.stream(i))
            sent = self._insert(unrolls.header(i), block)
            waited = sum(self.waited_seconds.values()) - waited
            self.busy_seconds += time.perf_counter() - started - waited
            if not sent:
                return False  # one that is sent later would leave a gap in its stream
        return True

    def _insert(self, header: UnrollHeader, block: bytes) -> bool:
        def insert(seconds: float) -> bool:
            return self._client.insert(header, block, seconds, self._stop.is_set)

        return patiently(self._client, self._patience_seconds, insert)
