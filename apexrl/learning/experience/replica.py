"""The learner's thread that follows the log: it decodes each unroll into the unroll store, and gathers draws ahead.

Where the frames lie on a GPU, a draw stays keys and weights until the update gathers them there.
"""

import collections
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from apexrl.agents.contract import Transitions, Unrolls, Want
from apexrl.errors import ConfigError, PeerError, WireError
from apexrl.learning.experience.draw import Draw, Gathered, SampledKeys
from apexrl.learning.experience.selection import Selector
from apexrl.learning.experience.unroll_store import DEVICE_RESERVE_BYTES, UnrollStore
from apexrl.learning.experience.walks import Streams, Walks
from apexrl.lifecycle import Stop
from apexrl.memory import free_memory_bytes
from apexrl.net.log_client import LogAppend, LogBatch, LogEvent, LogStart
from apexrl.networks.device_stream import DeviceStream
from apexrl.types import Episode, LogPosition, StreamSpec
from apexrl.unroll import UnrollCodec

logger = logging.getLogger(__name__)

POLL_MILLISECONDS = 5
MAX_KEPT_EPISODES = 10_000


class NewPriorities(NamedTuple):
    """New priorities of one table's sample, on their way to the replay."""

    generation: int
    table: str
    keys: np.ndarray  # [M]
    priorities: np.ndarray  # [M]


class NewResults(NamedTuple):
    """Results of an update, for the selection of later samples."""

    generation: int
    by_table: Mapping[str, tuple[np.ndarray, Mapping[str, np.ndarray]]]  # keys [M], and results [M, ...] by name


class LogSource(Protocol):
    """The replay as a replica follows it: `LogClient`, a journal, or one of this process."""

    waits_for: str

    def poll(self, timeout_milliseconds: int) -> LogEvent | None: ...
    def batch_used(self, table: str) -> None: ...
    def update_priorities(self, keys: np.ndarray, priorities: np.ndarray, table: str) -> None: ...
    def close(self) -> None: ...


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


class Replica:
    """Owns the connection to the replay and the unroll store; runs in a thread of its own.

    Other threads call `next_draw`, `update_priorities` and `drain_episodes`, and read the counters. The memory of a
    draw is used again after `DeviceStream.depth` + 1 further calls of `next_draw`.
    """

    def __init__(
        self,
        client: LogSource,
        wants: Sequence[Want],
        device_stream: DeviceStream,
        prefetch_batches: int,
        counted: LogPosition,
        stop: Stop,
        memory_gb: float = 0.0,
        shard: int = 0,
        draws: DrawQueue | None = None,
    ):
        """Makes a replica for a learner that wants some tables.

        Args:
          counted: unrolls that were counted by an earlier start of the learner are not counted again.
          memory_gb: gigabytes that the store may take; 0: the memory that is free.
          shard: number of the log among those of the run.
          draws: where the draws go, by default to a queue of its own.
        """
        self.shard = shard
        self.spec: StreamSpec | None = None
        self.counted = counted
        self.params_versions = collections.deque[int](maxlen=256)  # those that made the newest unrolls
        self.num_undecodable = 0
        self.store: UnrollStore | None = None
        self.waits_for = "replay_connection"
        self.num_updates = 0  # that the learner has made, as its thread says: candidates become fewer with them
        self.selection_metrics: dict[str, float] = {}  # of the newest sample of each table
        self._client = client
        self._wants = tuple(wants)
        self._device_stream = device_stream
        self._num_batches = prefetch_batches + 2 + device_stream.depth
        self._stop = stop
        self._memory_gb = memory_gb
        self._draws = draws or DrawQueue()
        # The samples of each table that wait for those of others, and the versions of their unrolls.
        self._samples = {
            want.table: collections.deque[tuple[SampledKeys | Gathered, np.ndarray]]() for want in self._wants
        }
        self._versions = np.zeros(0, np.int64)  # [ring]: params_version of the unroll at each position
        self._selections = {want.table: want.selection for want in self._wants if want.selection is not None}
        self._selector: Selector | None = None
        self._streams: Streams | None = None
        self._walks: dict[str, Walks] = {}  # by table
        self._outgoing = queue.SimpleQueue[NewPriorities | NewResults | None]()  # None: a draw was used
        self._generation = 0  # counts the logs that were followed
        self._episodes: collections.deque[Episode] = collections.deque(maxlen=MAX_KEPT_EPISODES)
        self._codec: UnrollCodec | None = None

    def run(self) -> None:
        """Follows the log until stopped; the body of the thread.

        Raises: PeerError when the server refuses us or changes its spec, ConfigError when memory does not suffice.
        """
        if self._device_stream.cuda is not None:  # else this thread would make a context on the first GPU, too
            torch.cuda.set_device(self._device_stream.device)
        try:
            while not self._stop.is_set():
                self.follow(POLL_MILLISECONDS)
            self._send()
        except WireError as error:
            raise PeerError(
                f"the replay server sent what we cannot read ({error}): run one version everywhere"
            ) from error
        finally:
            self._client.close()

    def follow(self, timeout_milliseconds: int) -> bool:
        """Sends our messages and applies the next event of the log; returns whether one came in time."""
        self._send()
        event = self._client.poll(timeout_milliseconds)
        self.waits_for = self._client.waits_for
        match event:
            case LogStart():
                self._start(event)
            case LogAppend():
                self._apply(event)
            case LogBatch():
                self._gather(event)
        return event is not None

    def next_draw(self, timeout_seconds: float) -> Draw | None:
        """Returns the next draw, None when there is none in time."""
        draw = self._draws.get(timeout_seconds)
        if draw is not None:
            self.draw_taken()
        return draw

    def draw_taken(self) -> None:
        """Says that a draw of ours was taken out of the queue: another one may come."""
        self._outgoing.put(None)

    def upcoming_draw(self) -> Draw | None:
        """Returns the draw that `next_draw` returns next, where it is there already. Call it from the same thread."""
        return self._draws.peek()

    def update_priorities(self, generation: int, table: str, keys: np.ndarray, priorities: np.ndarray) -> None:
        """Sends new priorities soon, unless another log has begun since the draw of this generation."""
        self._outgoing.put(NewPriorities(generation, table, keys, priorities))

    def add_results(self, generation: int, by_table: Mapping[str, tuple[np.ndarray, Mapping[str, np.ndarray]]]) -> None:
        """Takes the keys of an update by table, and its results for them: later samples are selected by those."""
        self._outgoing.put(NewResults(generation, by_table))

    def drain_episodes(self) -> list[Episode]:
        """Returns the training games that ended since the last call."""
        episodes = []
        while self._episodes:
            episodes.append(self._episodes.popleft())
        return episodes

    def _send(self) -> None:
        while not self._outgoing.empty():
            message = self._outgoing.get()
            if message is None:
                for want in self._wants:
                    self._client.batch_used(want.table)
            elif message.generation != self._generation:
                continue
            elif isinstance(message, NewResults):
                if self._selector is not None:
                    self._selector.add(message.by_table)
            else:
                self._client.update_priorities(message.keys, message.priorities, message.table)

    def _start(self, start: LogStart) -> None:
        if self.spec is not None and start.spec != self.spec:
            raise PeerError(f"the replay now holds {start.spec}, we learn {self.spec}: restart the learner")
        self._check_views(start)
        if not start.continues:
            self._generation += 1
            self._forget_samples()
        if self._selections and not start.continues:
            self._selector = Selector(self._selections, start.ring_unrolls)
        if self.store is None or self.store.ring_unrolls != start.ring_unrolls or not start.continues:
            self._streams = Streams(start.ring_unrolls, start.spec.unroll_starts)
            walking = [want for want in self._wants if isinstance(want.view, Unrolls) and want.view.walks]
            self._walks = {want.table: Walks(self._streams) for want in walking}
        if self.store is None or self.store.ring_unrolls != start.ring_unrolls:
            started = time.monotonic()
            if self.store is not None:
                self.store.release()
            self.store = None
            self.store = self._make_store(start)
            self.store.generation = self._generation
            self._versions = np.full(start.ring_unrolls, -1, np.int64)
            self._codec = UnrollCodec(start.spec)
            logger.info(
                "unroll store on %s: %d unrolls, %.1f GB (%.1f s)",
                self.store.device, start.ring_unrolls, self.store.num_bytes / 1e9, time.monotonic() - started,
            )  # fmt: skip
        elif not start.continues:
            logger.warning("the replay server began a new log; ours is forgotten")
            self.store.clear(self._generation)
        self.spec = start.spec
        if start.log != self.counted.log:
            self.counted = LogPosition(start.log, 0, self.counted.transitions)

    def _check_views(self, start: LogStart) -> None:
        """Raises ConfigError when the keys of a table name something else than the learner wants."""
        for want in self._wants:
            wanted = "transitions" if isinstance(want.view, Transitions) else "unrolls"
            if start.granularity[want.table] != wanted:
                raise ConfigError(
                    f"the replay's table {want.table} hands out {start.granularity[want.table]}, the agent learns from "
                    f"{wanted}: give the learner and the replay the same --agent, or change --tables"
                )

    def _forget_samples(self) -> None:
        """Drops the samples that wait for others: they may be of an older log."""
        for table, samples in self._samples.items():
            while samples:
                samples.popleft()
                self._client.batch_used(table)

    def _make_store(self, start: LogStart) -> UnrollStore:
        """Makes the unroll store on the learner's device, or in host memory when it does not fit there.

        Raises: ConfigError when it fits nowhere.
        """
        needed = UnrollStore.bytes_needed(start.spec, start.ring_unrolls, self._wants)
        device = self._device_stream.device
        if device.type == "cuda":
            with self._device_stream.exclusive():
                on_device = torch.cuda.mem_get_info(device)[0]
            if needed + DEVICE_RESERVE_BYTES <= on_device:
                with contextlib.suppress(torch.OutOfMemoryError):  # another process may take the memory first
                    return self._store_on(device, start)
            logger.warning(
                "the unroll store needs %.1f GB and %.1f GB beside it, %.1f GB were free on %s: "
                "it goes to host memory, and each batch is copied from there",
                needed / 1e9, DEVICE_RESERVE_BYTES / 1e9, on_device / 1e9, device,
            )  # fmt: skip
        free = free_memory_bytes(self._memory_gb)
        if needed > free:
            raise ConfigError(
                f"the unroll store needs {needed / 1e9:.1f} GB in host memory, {free / 1e9:.1f} GB are free: "
                "start the replay with a smaller --capacity"
            )
        return self._store_on(torch.device("cpu"), start)

    def _store_on(self, device: torch.device, start: LogStart) -> UnrollStore:
        return UnrollStore(start.spec, start.ring_unrolls, self._wants, device, self._num_batches, self._device_stream)

    def _apply(self, append: LogAppend) -> None:
        assert self.store is not None and self._codec is not None and self._streams is not None
        header = append.insert.header(self.store.spec.unroll_starts)
        if append.number >= self.counted.next_number:
            transitions = self.counted.transitions + int(header.valid.sum())
            self.counted = LogPosition(self.counted.log, append.number + 1, transitions)
            self.params_versions.append(header.params_version)
            self._episodes.extend(header.episodes)
        self._versions[append.number % self.store.ring_unrolls] = header.params_version
        slot = self.store.begin(append.number)
        try:
            unroll = self._codec.decode(append.block, slot.frames)
            actor, stream, first_step = append.insert.actor, header.stream, header.first_step
            previous = self._streams.add(append.number, actor, stream, first_step, unroll.starts)
            self.store.commit(slot, unroll, previous)
        except WireError as error:  # one actor's fault must not end the run: its unroll is never sampled again
            self.num_undecodable += 1
            logger.warning("unroll %d of %s is dropped: %s", append.number, append.insert.actor, error)
            for want in self._wants:
                keys = np.array([append.number])
                if isinstance(want.view, Transitions):
                    starts = self.store.spec.unroll_starts
                    keys = append.number * starts + np.arange(starts)
                self._client.update_priorities(keys, np.zeros(len(keys), np.float32), want.table)

    def _gather(self, event: LogBatch) -> None:
        """Gathers a table's sample; a draw is complete when every table has given one."""
        assert self.store is not None
        sample = self.store.sample(event.table, *self._selected(event.table, event.sample.keys, event.sample.weights))
        if sample is None:
            self._client.batch_used(event.table)
            return
        numbers = self.store.numbers(event.table, sample.keys)
        self._samples[event.table].append((sample, self._versions[numbers % self.store.ring_unrolls]))
        if all(self._samples.values()):
            parts = {table: samples.popleft() for table, samples in self._samples.items()}
            samples = {table: sample for table, (sample, _) in parts.items()}
            versions = {table: acted for table, (_, acted) in parts.items()}
            largest = event.sample.largest_weight if len(parts) == 1 else 1.0
            self._draws.put(Draw(self._generation, samples, versions, self.shard, largest))

    def _selected(self, table: str, keys: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns keys and weights of a sample, or of those that a selection or walks put in their place."""
        assert self.store is not None
        if table in self._walks:  # a uniform table, whose weights are all the same
            keys = self._walks[table].next_batch(keys.tolist(), len(keys))
            return keys, weights[: len(keys)]
        if self._selector is None or table not in self._selections:
            return keys, weights
        held = self.store.holds(table, keys)
        keys, weights = keys[held], weights[held]
        if len(keys):
            kept = self._selector.keep(table, keys, self.num_updates)
            keys, weights = keys[kept.positions], weights[kept.positions]
            newest = {f"{table}/{name}": value for name, value in kept.metrics.items()}
            self.selection_metrics = self.selection_metrics | newest
        return keys, weights
