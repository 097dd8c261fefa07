"""The learner's thread that follows the log: unrolls are decoded into the store, and draws gathered ahead.

Where the frames lie on a GPU, a draw stays keys and weights until the update gathers them there.
"""

import collections
import logging
import queue
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import torch

from apexrl.agents.contract import ResultsByTable, RowStrategy, Transitions
from apexrl.errors import ConfigError, PeerError, WireError
from apexrl.learning.experience.decoder import Decoder
from apexrl.learning.experience.draw import Draw, DrawQueue
from apexrl.learning.experience.keeping import Keeping
from apexrl.learning.experience.sampler import Sampler
from apexrl.learning.experience.unroll_store import UnrollStore
from apexrl.learning.waiter import ABSENT
from apexrl.lifecycle import Stop
from apexrl.net.log_client import LogAppend, LogBatch, LogEvent, LogStart
from apexrl.types import Episode, LogPosition, StreamSpec

logger = logging.getLogger(__name__)

POLL_MILLISECONDS = 5  # what the learner's thread says meanwhile waits as long
GPU_POLL_MILLISECONDS = 1  # there an update takes less than one
MAX_KEPT_EPISODES = 10_000


class LogSource(Protocol):
    """The replay as a replica follows it: `LogClient`, a journal, or one of this process."""

    waits_for: str

    def poll(self, timeout_milliseconds: int) -> LogEvent | None: ...
    def batch_used(self, table: str) -> None: ...
    def update_priorities(self, keys: np.ndarray, priorities: np.ndarray, table: str) -> None: ...
    def close(self) -> None: ...


class Replica:
    """Owns the connection to the replay; runs in a thread of its own.

    Other threads call `next_draw`, `update_priorities` and `drain_episodes`, and read the counters. The memory of a
    draw is used again after `DeviceStream.depth` + 1 further calls of `next_draw`.
    """

    def __init__(
        self,
        client: LogSource,
        keeping: Keeping,
        counted: LogPosition,
        stop: Stop,
        shard: int = 0,
        draws: DrawQueue | None = None,
    ):
        """Makes a replica that follows nothing yet.

        Args:
          counted: unrolls that were counted by an earlier start of the learner are not counted again.
          shard: number of the log among those of the run.
          draws: where the draws go, by default to a queue of its own.
        """
        self.shard = shard
        self.spec: StreamSpec | None = None
        self.counted = counted
        self.params_versions = collections.deque[int](maxlen=256)  # those that made the newest unrolls
        self.num_undecodable = 0
        self.waits_for = ABSENT
        self.num_updates = 0  # that the learner has made, as its thread says: candidates become fewer with them
        self._client = client
        self._keeping = keeping
        self._stop = stop
        self._draws = draws or DrawQueue()
        self._sampler = Sampler(keeping.wants, shard, client.batch_used)
        self._decoder: Decoder | None = None
        self._rows: RowStrategy | None = None
        # What other threads ask of this one, each with the generation of its draw; None: of any.
        self._asked = queue.SimpleQueue[tuple[int | None, Callable[[], None]]]()
        self._generation = 0  # counts the logs that were followed
        self._episodes: collections.deque[Episode] = collections.deque(maxlen=MAX_KEPT_EPISODES)

    @property
    def store(self) -> UnrollStore | None:
        """The store of the log's unrolls; None while no log is known."""
        return None if self._decoder is None else self._decoder.store

    @property
    def selection_metrics(self) -> Mapping[str, float]:
        """The metrics of the newest rows that were chosen, by table and name."""
        return self._sampler.metrics

    def run(self) -> None:
        """Follows the log until stopped; the body of the thread.

        Raises: PeerError when the server refuses us or changes its spec, ConfigError when memory does not suffice.
        """
        device_stream = self._keeping.device_stream
        if device_stream.cuda is not None:  # else this thread would make a context on the first GPU, too
            torch.cuda.set_device(device_stream.device)
        try:
            milliseconds = POLL_MILLISECONDS if device_stream.cuda is None else GPU_POLL_MILLISECONDS
            while not self._stop.is_set():
                self.follow(milliseconds)
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
                assert self._decoder is not None
                draw = self._sampler.add(event, self._decoder, self._rows, self.num_updates)
                if draw is not None:
                    self._draws.put(draw)
        return event is not None

    def next_draw(self, timeout_seconds: float) -> Draw | None:
        """Returns the next draw, None when there is none in time."""
        draw = self._draws.get(timeout_seconds)
        if draw is not None:
            self.draw_taken()
        return draw

    def draw_taken(self) -> None:
        """Says that a draw of ours was taken out of the queue: another one may come."""
        self._asked.put((None, self._demand))

    def update_priorities(self, generation: int, table: str, keys: np.ndarray, priorities: np.ndarray) -> None:
        """Sends new priorities soon, unless another log has begun since the draw of this generation."""
        self._asked.put((generation, lambda: self._client.update_priorities(keys, priorities, table)))

    def add_results(self, generation: int, by_table: ResultsByTable) -> None:
        """Takes the keys of an update by table, and its results for them: later samples are selected by those."""
        self._asked.put((generation, lambda: self._learn(by_table)))

    def drain_episodes(self) -> list[Episode]:
        """Returns the training games that ended since the last call."""
        episodes = []
        while self._episodes:
            episodes.append(self._episodes.popleft())
        return episodes

    def _send(self) -> None:
        """Does what other threads have asked, but for draws of an earlier log."""
        while not self._asked.empty():
            generation, do = self._asked.get()
            if generation in (None, self._generation):
                do()

    def _demand(self) -> None:
        for want in self._keeping.wants:
            self._client.batch_used(want.table)

    def _learn(self, by_table: ResultsByTable) -> None:
        if self._rows is not None:
            self._rows.learn(by_table)

    def _start(self, start: LogStart) -> None:
        if self.spec is not None and start.spec != self.spec:
            raise PeerError(f"the replay now holds {start.spec}, we learn {self.spec}: restart the learner")
        self._check_views(start)
        if not start.continues:
            self._generation += 1
            self._sampler.forget()
        if self.store is None or self.store.ring_unrolls != start.ring_unrolls or not start.continues:
            self._decoder = Decoder(self._empty_store(start), self._keeping.moments)
            self._rows = self._keeping.make_rows(self._decoder.order)
        self.spec = start.spec
        if start.log != self.counted.log:  # what a mended log, a fork or a copy brings again was counted
            number = self.counted.next_number if self.counted.log in start.ancestors else 0
            self.counted = LogPosition(start.log, number, self.counted.transitions)

    def _empty_store(self, start: LogStart) -> UnrollStore:
        """Returns a store without unrolls, of the size that the log needs; the memory of the old one is used again."""
        if self.store is not None and self.store.ring_unrolls == start.ring_unrolls:
            logger.warning("the replay server began a new log; ours is forgotten")
            self.store.clear(self._generation)
            return self.store
        if self.store is not None:
            self.store.release()
        self._decoder = None
        store = self._keeping.make_store(start.spec, start.ring_unrolls)
        store.generation = self._generation
        return store

    def _check_views(self, start: LogStart) -> None:
        """Raises ConfigError when the keys of a table name something else than the learner wants."""
        for want in self._keeping.wants:
            wanted = "transitions" if isinstance(want.view, Transitions) else "unrolls"
            if start.granularity[want.table] != wanted:
                raise ConfigError(
                    f"the replay's table {want.table} hands out {start.granularity[want.table]}, the agent learns from "
                    f"{wanted}: give the learner and the replay the same --agent, or change --tables"
                )

    def _apply(self, append: LogAppend) -> None:
        assert self._decoder is not None
        starts = self._decoder.store.spec.unroll_starts
        header = append.insert.header(starts)
        number = append.number if append.log_number is None else append.log_number
        is_new = number >= self.counted.next_number
        if is_new:
            transitions = self.counted.transitions + int(header.valid.sum())
            self.counted = LogPosition(self.counted.log, number + 1, transitions)
            self.params_versions.append(header.params_version)
            self._episodes.extend(header.episodes)
        try:
            self._decoder.add(append, header, is_new)
        except WireError as error:  # one actor's fault must not end the run: its unroll is never sampled again
            self.num_undecodable += 1
            logger.warning("unroll %d of %s is dropped: %s", append.number, append.insert.actor, error)
            for want in self._keeping.wants:
                keys = np.array([append.number])
                if isinstance(want.view, Transitions):
                    keys = append.number * starts + np.arange(starts)
                self._client.update_priorities(keys, np.zeros(len(keys), np.float32), want.table)
