"""The replay as a service: sample keys, fetch unrolls by number, update priorities, read statistics.

It is for programs that hold no replica of the log: a learner of another algorithm, a tool. One thread owns a client.
A call ends in the time that it is given, whatever the server says meanwhile. After a restart of the server it goes on
by itself. Inserting is `InsertClient`'s.
"""

import collections
import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np
import zmq

from apexrl.errors import PeerTimeout
from apexrl.net import wire
from apexrl.net.arguments import check_named, checked_numbers
from apexrl.net.connection import POLL_MILLISECONDS
from apexrl.net.keyring import Keyring
from apexrl.net.log_client import LogBatch, LogClient, LogFetched, LogStart
from apexrl.types import Granularity, Sample, StreamSpec, Unroll, UnrollHeader
from apexrl.unroll import UnrollCodec

RESEND_SECONDS = 2.0  # without an answer this long a request is sent again


class StoredUnroll(NamedTuple):
    """An unroll of the log, decoded."""

    header: UnrollHeader
    unroll: Unroll


class ReplayClient:
    """Reads a replay server. Batches that it hands out are at most `prefetch_batches` batches old."""

    def __init__(
        self,
        endpoint: str,
        name: str,
        batch_sizes: Mapping[str, int] | None = None,
        prefetch_batches: int = 4,
        keyring: Keyring | None = None,
        context: zmq.Context | None = None,
        with_probabilities: bool = False,
    ):
        """Connects and waits for nobody.

        Args:
          endpoint: the server's port for learners.
          name: for people to read.
          batch_sizes: by table, for those that will be sampled.
          prefetch_batches: batches of each table that come ahead, 1 to 64.
          with_probabilities: whether samples have the probabilities of their keys, or none.
        Raises: ValueError when so many batches ahead, batches of such a size, or such names are not served.
        """
        self.spec: StreamSpec | None = None
        self.granularity: dict[str, Granularity] = {}  # by table: the items that its keys name; set by the first batch
        sizes = batch_sizes or {}
        self._client = LogClient(endpoint, name, sizes, prefetch_batches, False, keyring, context, with_probabilities)
        self._batches: dict[str, collections.deque[Sample]] = {t: collections.deque() for t in batch_sizes or {}}
        self._requests = itertools.count()
        self._answers: dict[int, dict[int, LogFetched]] = {}
        self._statistics: wire.Statistics | None = None

    @property
    def waits_for(self) -> str:
        """Why there is no batch: replay_connection, min_size, actors; empty when there is one."""
        return self._client.waits_for

    def has_batch(self, table: str) -> bool:
        """True when `sample` would not wait.

        Raises: KeyError when the table was not named at the start, PeerRefused when the server refuses us.
        """
        check_named(table, self._batches)
        self._poll(0)  # keeps the connection alive
        return self._poll_until(lambda: bool(self._batches[table]), 0.001)

    def sample(self, table: str, timeout_seconds: float) -> Sample:
        """Returns a batch: keys and importance weights [B], and probabilities where they were asked for.

        Keys of a table of transitions are unroll number * K + offset, those of a table of unrolls unroll numbers.

        Raises: KeyError when the table was not named at the start, PeerTimeout when there is no batch in time,
          PeerRefused when the server refuses us.
        """
        check_named(table, self._batches)
        batches = self._batches[table]
        self._until(lambda: bool(batches), timeout_seconds, f"batch of {table}")
        self._client.batch_used(table)
        return batches.popleft()

    def fetch(self, numbers: Iterable[int], timeout_seconds: float) -> dict[int, StoredUnroll]:
        """Returns unrolls by number, decoded; those that the log does not hold are left out.

        Raises: ValueError when one is no whole number from 0, PeerTimeout when they do not come in time, PeerRefused
          when the server refuses us, WireError when one cannot be decoded.
        """
        wanted = checked_numbers(numbers)
        deadline = time.monotonic() + timeout_seconds
        self._until(lambda: self.spec is not None, timeout_seconds, "log")
        request = next(self._requests)
        found = self._answers[request] = dict[int, LogFetched]()
        try:
            while missing := [number for number in wanted if number not in found][: wire.MAX_FETCH]:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise self._late(f"{len(missing)} unrolls")
                self._client.connection.send(wire.Fetch(request, tuple(missing)))
                expected = len(found) + len(missing)
                self._poll_until(lambda: len(found) >= expected, min(RESEND_SECONDS, left))  # noqa: B023 - used at once
        finally:
            del self._answers[request]
        assert self.spec is not None
        codec, starts = UnrollCodec(self.spec), self.spec.unroll_starts
        return {
            number: StoredUnroll(answer.insert.header(starts), codec.decode(answer.block))
            for number, answer in found.items()
            if answer.insert is not None
        }

    def update_priorities(self, table: str, keys: np.ndarray, priorities: np.ndarray) -> None:
        """Sends new priorities [B] of keys [B]; those of keys no longer held are ignored.

        They may wait for those of the batches that have come already, until one of the next calls.

        Raises: ValueError when keys are no whole numbers from 0, when priorities are negative or not finite, or when
          there are not as many of both; KeyError when the table was not named at the start; PeerRefused when the server
          refuses us.
        """
        self._client.update_priorities(keys, priorities, table)
        self._poll(0)  # keeps the connection alive

    def statistics(self, timeout_seconds: float) -> wire.Statistics:
        """Returns the server's metrics, and how it sees its peers.

        Raises: PeerTimeout when they do not come in time, PeerRefused when the server refuses us.
        """
        self._statistics = None
        deadline = time.monotonic() + timeout_seconds
        while self._statistics is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._late("statistics")
            self._client.connection.send(wire.AskStatistics(next(self._requests)))
            self._poll_until(lambda: self._statistics is not None, min(RESEND_SECONDS, left))
        return self._statistics

    def close(self) -> None:
        """Says goodbye."""
        self._client.close()

    def _until(self, done: Callable[[], bool], timeout_seconds: float, what: str) -> None:
        if not self._poll_until(done, timeout_seconds):
            raise self._late(what)

    def _poll_until(self, done: Callable[[], bool], timeout_seconds: float) -> bool:
        deadline = time.monotonic() + timeout_seconds
        while not done():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self._poll(min(int(left * 1000) + 1, POLL_MILLISECONDS))
        return True

    def _poll(self, timeout_milliseconds: int) -> None:
        match self._client.poll(timeout_milliseconds):
            case LogStart() as event:
                self.spec, self.granularity = event.spec, event.granularity
                if not event.continues:  # keys of another log mean nothing
                    for table, batches in self._batches.items():
                        while batches:
                            batches.pop()
                            self._client.batch_used(table)
            case LogBatch() as event:
                self._batches[event.table].append(event.sample)
            case LogFetched() as event:
                if event.request in self._answers:
                    self._answers[event.request][event.number] = event
            case wire.Statistics() as event:
                self._statistics = event

    def _late(self, what: str) -> PeerTimeout:
        reason = self.waits_for or "its answer"
        return PeerTimeout(
            f"no {what} from the replay server at {self._client.connection.endpoint} in time: it waits for {reason}"
        )
