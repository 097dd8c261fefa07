"""The learner's thread beside the log: decodes each unroll into the frame store, and gathers batches ahead.

Where the frames lie on a GPU, batches stay keys and weights until the update gathers them there.
"""

import collections
import logging
import queue
import time

import numpy as np
import torch

from apexrl.errors import ConfigError, PeerError, WireError
from apexrl.learning.unroll_store import DEVICE_RESERVE_BYTES, Batch, FrameStore
from apexrl.lifecycle import Stop
from apexrl.memory import free_memory_bytes
from apexrl.net.log_client import LogAppend, LogBatch, LogClient, LogStart
from apexrl.networks.device_stream import Lane
from apexrl.types import Episode, LogPosition, Sample, StreamSpec
from apexrl.unroll import UnrollCodec

logger = logging.getLogger(__name__)

POLL_MILLISECONDS = 5
MAX_KEPT_EPISODES = 10_000


class Replica:
    """Owns the connection to the replay and the frame store; runs in a thread of its own.

    Other threads call `next_batch`, `update_priorities` and `take_episodes`, and read the counters. A batch is good
    until `next_batch` was called as often again as updates may be in flight, and once more.
    """

    def __init__(
        self,
        client: LogClient,
        gamma: float,
        lane: Lane,
        prefetch_batches: int,
        counted: LogPosition,
        stop: Stop,
        memory_gb: float = 0.0,
    ):
        """Makes a replica; unrolls that were `counted` by an earlier life of the learner are not counted again."""
        self.spec: StreamSpec | None = None
        self.counted = counted
        self.params_versions = collections.deque[int](maxlen=256)  # of the parameters that made the newest unrolls
        self.num_undecodable = 0
        self.store: FrameStore | None = None
        self.waits_for = "replay_connection"
        self._client = client
        self._gamma = gamma
        self._lane = lane
        self._num_batches = prefetch_batches + 2 + lane.depth
        self._stop = stop
        self._memory_gb = memory_gb
        # The server sends only what was demanded, so that a put never waits.
        self._batches: queue.Queue[tuple[int, Batch]] = queue.Queue()
        self._outgoing: queue.SimpleQueue[tuple[int, np.ndarray, np.ndarray] | None] = queue.SimpleQueue()
        self._life = 0  # counts the logs that were followed: keys mean nothing beyond theirs
        self._episodes: collections.deque[Episode] = collections.deque(maxlen=MAX_KEPT_EPISODES)
        self._codec: UnrollCodec | None = None

    def run(self) -> None:
        """Follows the log until stopped; the body of the thread.

        Raises: PeerError when the server refuses us or changes its spec, ConfigError when memory does not suffice.
        """
        try:
            while not self._stop.is_set():
                self._send()
                event = self._client.poll(POLL_MILLISECONDS)
                self.waits_for = self._client.waits_for
                match event:
                    case LogStart():
                        self._start(event)
                    case LogAppend():
                        self._apply(event)
                    case LogBatch():
                        self._gather(event.sample)
            self._send()
        except WireError as error:
            raise PeerError(
                f"the replay server sent what we cannot read ({error}): run one version everywhere"
            ) from error
        finally:
            self._client.close()

    def next_batch(self, timeout_seconds: float) -> tuple[int, Batch] | None:
        """Returns the next batch and the life of the log that it is of, None when there is none in time."""
        try:
            item = self._batches.get(timeout=timeout_seconds)
        except queue.Empty:
            return None
        self._outgoing.put(None)
        return item

    def upcoming_batch(self) -> Batch | None:
        """Returns what `next_batch` will return next, where it is there already. Call it from the same thread."""
        with self._batches.mutex:
            return self._batches.queue[0][1] if self._batches.queue else None

    def update_priorities(self, life: int, keys: np.ndarray, priorities: np.ndarray) -> None:
        """Sends new priorities of a batch soon, unless the log has begun another life."""
        self._outgoing.put((life, keys, priorities))

    def take_episodes(self) -> list[Episode]:
        """Returns the training games that ended since the last call."""
        episodes = []
        while self._episodes:
            episodes.append(self._episodes.popleft())
        return episodes

    def _send(self) -> None:
        while not self._outgoing.empty():
            item = self._outgoing.get()
            if item is None:
                self._client.take()
            elif item[0] == self._life:
                self._client.update_priorities(*item[1:])

    def _start(self, start: LogStart) -> None:
        if self.spec is not None and start.spec != self.spec:
            raise PeerError(f"the replay now holds {start.spec}, we learn {self.spec}: restart the learner")
        self._life += not start.continues
        if self.store is None or self.store.ring_unrolls != start.ring_unrolls:
            started = time.monotonic()
            if self.store is not None:
                self.store.release()
            self.store = None
            self.store = self._make_store(start)
            self._codec = UnrollCodec(start.spec)
            logger.info(
                "frame store on %s: %d unrolls, %.1f GB (%.1f s)",
                self.store.device, start.ring_unrolls, self.store.num_bytes / 1e9, time.monotonic() - started,
            )  # fmt: skip
        elif not start.continues:
            logger.warning("the replay server began a new log; ours is forgotten")
            self.store.clear()
        self.spec = start.spec
        if start.log != self.counted.log:
            self.counted = LogPosition(start.log, 0, self.counted.transitions)

    def _make_store(self, start: LogStart) -> FrameStore:
        """Makes the frame store on the learner's device, or in host memory when it does not fit there.

        Raises: ConfigError when it fits nowhere.
        """
        needed = FrameStore.bytes_needed(start.spec, start.ring_unrolls)
        device = self._lane.device
        if device.type == "cuda":
            with self._lane.turn():
                on_device = torch.cuda.mem_get_info(device)[0]
            if needed + DEVICE_RESERVE_BYTES > on_device:
                logger.warning(
                    "the frame store needs %.1f GB and %.1f GB beside it, %.1f GB are free on %s: "
                    "it goes to host memory, and each batch is copied from there",
                    needed / 1e9, DEVICE_RESERVE_BYTES / 1e9, on_device / 1e9, device,
                )  # fmt: skip
                device = torch.device("cpu")
        if device.type == "cpu":
            free = free_memory_bytes(self._memory_gb)
            if needed > free:
                raise ConfigError(
                    f"the frame store needs {needed / 1e9:.1f} GB on {device}, {free / 1e9:.1f} GB are free: "
                    "start the replay with a smaller --capacity"
                )
        return FrameStore(start.spec, start.ring_unrolls, self._gamma, device, self._num_batches, self._lane)

    def _apply(self, append: LogAppend) -> None:
        assert self.store is not None and self._codec is not None
        header = append.insert.header()
        if append.number >= self.counted.next_number:
            transitions = self.counted.transitions + int((header.priorities > 0).sum())
            self.counted = LogPosition(self.counted.log, append.number + 1, transitions)
            self.params_versions.append(header.params_version)
            self._episodes.extend(header.episodes)
        try:
            self.store.apply(append.number, self._codec.decode(append.block, self.store.room(append.number)))
        except WireError as error:  # one actor's fault must not end the run: its unroll is never sampled again
            self.num_undecodable += 1
            logger.warning("unroll %d of %s is dropped: %s", append.number, append.insert.actor, error)
            starts = self.store.spec.unroll_starts
            keys = append.number * starts + np.arange(starts)
            self._client.update_priorities(keys, np.zeros(starts, np.float32))

    def _gather(self, sample: Sample) -> None:
        assert self.store is not None
        batch = self.store.batch(sample.keys, sample.weights)
        if batch is None:
            self._client.take()
        else:
            self._batches.put((self._life, batch))
