"""The replay as a service: sample keys or unrolls, fetch unrolls by number, update priorities, read statistics.

It is for programs that hold no replica of the log: a learner of another algorithm, a tool. One thread owns a client.
A call ends in the time that it is given, whatever the server says meanwhile. After a restart of the server it goes on
by itself. Inserting is `InsertClient`'s.
"""

import collections
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np
import zmq
from numpy.typing import ArrayLike

from apexrl.errors import PeerRefused, PeerTimeout
from apexrl.net import wire
from apexrl.net.arguments import check_named, checked_numbers, checked_update, checked_whole
from apexrl.net.calls import Call, Closing, Steps, call, deadline_of
from apexrl.net.connection import POLL_SECONDS
from apexrl.net.fetches import Fetch, Held, SampledUnrolls, StoredUnroll
from apexrl.net.handed_keys import HandedKeys
from apexrl.net.keyring import Keyring
from apexrl.net.log_client import EncodedUnroll, LogBatch, LogClient, LogFetched, LogStart
from apexrl.types import Granularity, Sample, StreamSpec
from apexrl.unroll import UnrollCodec

RESEND_SECONDS = 2.0  # without an answer this long a request is sent again


class ReplayClient(Closing):
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
        with_unrolls: bool = False,
        log: str = "",
    ):
        """Connects and waits for nobody.

        Args:
          endpoint: the server's port for learners.
          name: for people to read.
          batch_sizes: by table, for those that will be sampled.
          prefetch_batches: batches of each table that come ahead, 1 to 64.
          with_probabilities: whether samples have the probabilities of their keys, or none.
          with_unrolls: whether batches come with their unrolls; else `sample_unrolls` fetches them.
          log: the name of the log, where the server has several.
        Raises: ValueError when so many batches ahead, batches of such a size, or such names are not served.
        """
        self.spec: StreamSpec | None = None
        self.granularity: dict[str, Granularity] = {}  # by table: the items that its keys name; set by the first batch
        sizes = batch_sizes or {}
        self._client = LogClient(
            endpoint, name, sizes, prefetch_batches, False, keyring, context, with_probabilities, with_unrolls, log
        )
        self._batches: dict[str, collections.deque[Held]] = {table: collections.deque() for table in sizes}
        self._taken: list[Held] = []  # whose unrolls a call waits for
        self._requests = itertools.count()
        self._generation = 0  # of the log: another one makes all keys void
        self._fetches: dict[int, Fetch] = {}  # by request
        self._handed: dict[int, HandedKeys] = {}  # by the number of keys that name one unroll
        self._answers: dict[int, wire.Statistics | wire.Deleted | None] = {}  # by request

    @property
    def waits_for(self) -> str:
        """Why there is no batch: replay_connection, crowded, min_size, actors, priorities, or several; else empty."""
        return self._client.waits_for

    def has_batch(self, table: str) -> bool:
        """True when `sample` would not wait.

        Raises: KeyError when the table was not named at the start, PeerRefused when the server refuses us.
        """
        return self.batch_comes(table, 0.001).finish()

    @call
    def batch_comes(self, table: str, timeout_seconds: float) -> Steps[bool]:
        """Is `has_batch` to be awaited, which waits so long for one."""
        check_named(table, self._batches)
        self._poll()  # keeps the connection alive
        return (yield from self._polling(lambda: bool(self._batches[table]), timeout_seconds))

    def sample(self, table: str, timeout_seconds: float) -> Sample:
        """Returns a batch: keys and importance weights [B], and probabilities where they were asked for.

        Keys of a table of transitions are unroll number * K + offset, those of a table of unrolls unroll numbers.

        Raises: KeyError when the table was not named at the start, PeerTimeout when there is no batch in time,
          PeerRefused when the server refuses us.
        """
        return self.sampling(table, timeout_seconds).finish()

    @call
    def sampling(self, table: str, timeout_seconds: float) -> Steps[Sample]:
        """Is `sample` to be awaited."""
        held = yield from self._taking(table, timeout_seconds)
        self._let_go(table, held)
        self._hand_out(table, held.batch.sample.keys)
        return held.batch.sample

    def sample_unrolls(self, table: str, timeout_seconds: float) -> SampledUnrolls:
        """Returns a batch with its unrolls, without those that the log let go before they could be fetched.

        Raises: as `sample`, and WireError when one cannot be decoded.
        """
        return self.sampling_unrolls(table, timeout_seconds).finish()

    @call
    def sampling_unrolls(self, table: str, timeout_seconds: float) -> Steps[SampledUnrolls]:
        """Is `sample_unrolls` to be awaited."""
        sample, numbers, encoded = yield from self.sampling_encoded(table, timeout_seconds)
        starts = sample.keys - numbers * self._items_of(table)
        return SampledUnrolls(sample, numbers, starts, self._decoded(encoded))

    def unroll_batches(self, table: str, timeout_seconds: float) -> Iterator[SampledUnrolls]:
        """Yields batches with their unrolls without end. The next ones are on the way meanwhile.

        Raises: as `sample_unrolls`; `timeout_seconds` are for each.
        """
        return iter(lambda: self.sample_unrolls(table, timeout_seconds), object())  # which goes on after an error

    @call
    def sampling_encoded(
        self, table: str, timeout_seconds: float, check: Callable[[], object] = lambda: None
    ) -> Steps[tuple[Sample, np.ndarray, dict[int, EncodedUnroll]]]:
        """Returns a batch, the unroll number [B] of each key, and the unrolls by number as they were inserted."""
        deadline = deadline_of(timeout_seconds)
        while True:
            held = yield from self._taking(table, deadline - time.monotonic())
            self._taken.append(held)
            try:
                check()  # whether the caller can read them
                found = yield from self._unrolls_of(held, deadline)
            except BaseException:  # the time is up, or nobody waits any more: the next call gets it
                self._taken.remove(held)
                self._batches[table].appendleft(held)
                self._drop_empty(table)
                raise
            self._taken.remove(held)
            self._let_go(table, held)
            sample = held.batch.sample
            if len(sample.keys):  # else its keys were taken out meanwhile, or are of another log
                self._hand_out(table, sample.keys)
                return sample, held.numbers, found

    def fetch(self, numbers: Iterable[int], timeout_seconds: float) -> dict[int, StoredUnroll]:
        """Returns unrolls by number, decoded; those that the log does not hold are left out.

        Raises: ValueError when one is no whole number from 0, PeerTimeout when they do not come in time, PeerRefused
          when the server refuses us, WireError when one cannot be decoded.
        """
        return self.fetching(numbers, timeout_seconds).finish()

    @call
    def fetching(self, numbers: Iterable[int], timeout_seconds: float) -> Steps[dict[int, StoredUnroll]]:
        """Is `fetch` to be awaited."""
        fetch, deadline = self._begin_fetch(checked_numbers(numbers)), deadline_of(timeout_seconds)
        try:
            return self._decoded((yield from self._getting(fetch, deadline)))
        finally:
            del self._fetches[fetch.request]

    def update_priorities(self, table: str, keys: ArrayLike, priorities: ArrayLike) -> None:
        """Sends new priorities [B] of keys [B]; those of keys no longer held, or of an earlier log, are ignored.

        They may wait for those of the batches that have come already, until one of the next calls.

        Raises: ValueError when keys are no whole numbers from 0, when priorities are negative or not finite, or when
          there are not as many of both; KeyError when the table was not named at the start; PeerRefused when the server
          refuses us.
        """
        check_named(table, self._batches)
        names, values = checked_update(keys, priorities)
        current = self._current(table, names)
        self._client.update_priorities(names[current], values[current], table)
        self._poll()  # keeps the connection alive

    def delete(self, table: str, keys: ArrayLike, timeout_seconds: float) -> int:
        """Takes items [N] out of a table for ever; other tables and the log keep them. Any table may be named.

        Keys that were handed out of an earlier log are ignored. Batches that came already lose these, and get smaller.

        Returns: how many could be drawn before. It is less where an answer was lost and the server asked again.
        Raises: ValueError when keys are no whole numbers from 0, PeerTimeout when the server does not answer in time,
          PeerRefused when it has no such table.
        """
        return self.deleting(table, keys, timeout_seconds).finish()

    @call
    def deleting(self, table: str, keys: ArrayLike, timeout_seconds: float) -> Steps[int]:
        """Is `delete` to be awaited."""
        numbers, deadline, count = checked_whole(keys, "keys"), deadline_of(timeout_seconds), 0
        yield from self._until(lambda: self.spec is not None, timeout_seconds, "log")
        numbers, generation = numbers[self._current(table, numbers)], self._generation
        for first in range(0, len(numbers), wire.MAX_BATCH):
            part = numbers[first : first + wire.MAX_BATCH].tobytes()
            count += yield from self._removing(table, part, False, deadline, generation)
        if generation == self._generation:
            self._drop_batches(table, numbers)
        return count

    def reset(self, table: str, timeout_seconds: float) -> int:
        """Takes all items out of a table for ever, and begins its limiter anew, as if nothing had been inserted.

        Returns: how many could be drawn before.
        Raises: PeerTimeout when the server does not answer in time, PeerRefused when it has no such table.
        """
        return self.resetting(table, timeout_seconds).finish()

    @call
    def resetting(self, table: str, timeout_seconds: float) -> Steps[int]:
        """Is `reset` to be awaited."""
        count = yield from self._removing(table, b"", True, deadline_of(timeout_seconds), None)
        self._drop_batches(table)
        return count

    def statistics(self, timeout_seconds: float) -> wire.Statistics:
        """Returns the metrics of the server and of the log, and how it sees the log's peers.

        Raises: PeerTimeout when they do not come in time, PeerRefused when the server refuses us.
        """
        deadline = deadline_of(timeout_seconds)
        log_name = self._client.connection.log_name
        answer = Call(self._asking(lambda n: wire.AskStatistics(n, log_name), "statistics", deadline)).finish()
        assert isinstance(answer, wire.Statistics)
        return answer

    def fileno(self) -> int:
        """Returns a descriptor that becomes readable when the server said something: call `has_batch` then.

        It says so once. Take all batches that there are, until `has_batch` is false, before you wait for it again.
        """
        return self._client.connection.fileno()

    def close(self) -> None:
        """Says goodbye."""
        self._client.close()

    def _taking(self, table: str, timeout_seconds: float) -> Steps[Held]:
        """Takes a batch, which is to be put back or let go."""
        check_named(table, self._batches)
        yield from self._until(lambda: bool(self._batches[table]), timeout_seconds, f"batch of {table}")
        return self._batches[table].popleft()

    def _hand_out(self, table: str, keys: np.ndarray) -> None:
        self._handed.setdefault(self._items_of(table), HandedKeys()).add(keys)

    def _current(self, table: str, keys: np.ndarray) -> np.ndarray:
        """Returns [N] bool: which keys [N] are not known to be of an earlier log."""
        is_old = np.zeros(len(keys), bool)
        for items, handed in self._handed.items():
            if table not in self.granularity or items == self._items_of(table):
                is_old |= handed.are_old(keys)
        return ~is_old

    def _let_go(self, table: str, held: Held) -> None:
        """Makes room for another batch."""
        if held.fetch is not None:
            del self._fetches[held.fetch.request]
        self._client.batch_used(table)

    def _drop_batches(self, table: str, keys: np.ndarray | None = None) -> None:
        """Takes all keys out of the batches that came, or keys [N] alone."""
        taken = (held for held in self._taken if held.batch.table == table)
        for held in (*taken, *self._batches.get(table, ())):
            held.leave_out(keys)
        self._drop_empty(table)

    def _drop_empty(self, table: str) -> None:
        """Lets go of batches that lost all their keys."""
        for held in [held for held in self._batches.get(table, ()) if not len(held.numbers)]:
            self._batches[table].remove(held)
            self._let_go(table, held)

    def _items_of(self, table: str) -> int:
        """Returns how many keys of a table name one unroll."""
        assert self.spec is not None
        return self.spec.unroll_starts if self.granularity[table] == "transitions" else 1

    def _begin_fetch(self, numbers: list[int]) -> Fetch:
        request = next(self._requests)
        self._fetches[request] = Fetch(request, numbers)
        return self._fetches[request]

    def _unrolls_of(self, held: Held, deadline: float) -> Steps[dict[int, EncodedUnroll]]:
        """Returns the unrolls of a batch, and fetches those that did not come with it."""
        named = held.named
        found = {number: unroll for number, unroll in zip(named, held.batch.unrolls, strict=False) if unroll.block}
        if missing := [number for number in named if number not in found]:
            held.fetch = held.fetch or self._begin_fetch(missing)
            found |= yield from self._getting(held.fetch, deadline)
            left = held.named  # some may have been taken out meanwhile
            found = {number: found[number] for number in left if number in found}
        return found

    def _getting(self, fetch: Fetch, deadline: float) -> Steps[dict[int, EncodedUnroll]]:
        """Asks for what is missing, again only where no answer came for RESEND_SECONDS."""
        yield from self._until(lambda: self.spec is not None, deadline - time.monotonic(), "log")
        while fetch.missing:
            now = time.monotonic()
            if not fetch.asked or now - fetch.heard_seconds >= RESEND_SECONDS:
                self._client.connection.send(fetch.ask(now))
            seconds = min(fetch.heard_seconds + RESEND_SECONDS, deadline) - now
            if not (yield from self._polling(lambda: not fetch.asked, seconds)) and time.monotonic() >= deadline:
                raise self._late(f"{len(fetch.missing)} unrolls")
        return {number: unroll for number, unroll in fetch.found.items() if unroll is not None}

    def _decoded(self, encoded: Mapping[int, EncodedUnroll]) -> dict[int, StoredUnroll]:
        assert self.spec is not None
        codec, starts = UnrollCodec(self.spec), self.spec.unroll_starts
        return {
            number: StoredUnroll(wire.decode_insert(message).header(starts), codec.decode(block))
            for number, (message, block) in encoded.items()
        }

    def _removing(self, table: str, keys: bytes, is_all: bool, deadline: float, generation: int | None) -> Steps[int]:
        """Deletes; `generation`: of the log that the keys are of, where they shall leave no other one."""
        yield from self._until(lambda: self.spec is not None, deadline - time.monotonic(), "log")
        self._client.send_updates()  # they came before

        def delete(request: int) -> wire.Delete:
            return wire.Delete(request, table, keys if generation in (None, self._generation) else b"", is_all)

        answer = yield from self._asking(delete, "answer", deadline)
        assert isinstance(answer, wire.Deleted)
        if answer.fault:
            raise PeerRefused(f"the replay server at {self._client.connection.endpoint} refuses: {answer.fault}")
        return answer.count

    def _asking(
        self, ask: Callable[[int], wire.ToReplay], what: str, deadline: float
    ) -> Steps[wire.Statistics | wire.Deleted]:
        """Asks until there is an answer."""
        request = next(self._requests)
        self._answers[request] = None
        try:
            while (answer := self._answers[request]) is None:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise self._late(what)
                self._client.connection.send(ask(request))
                yield from self._polling(lambda: self._answers[request] is not None, min(RESEND_SECONDS, left))
        finally:
            del self._answers[request]
        return answer

    def _until(self, done: Callable[[], bool], timeout_seconds: float, what: str) -> Steps[None]:
        if not (yield from self._polling(done, timeout_seconds)):
            raise self._late(what)

    def _polling(self, done: Callable[[], bool], timeout_seconds: float) -> Steps[bool]:
        deadline = deadline_of(timeout_seconds)
        while not done():
            self._poll()  # also where there is no time: a call that is made again and again gets on
            if done():
                break
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            yield self._client.connection, min(left, POLL_SECONDS)
        return True

    def _poll(self) -> None:
        match self._client.poll(0):
            case LogStart() as event:
                self.spec, self.granularity = event.spec, event.granularity
                if not event.continues:
                    self._forget()
                for fetch in self._fetches.values():
                    fetch.asked.clear()  # a server that did not know us has no questions of ours
            case LogBatch() as event:
                self._batches[event.table].append(Held(event, self._items_of(event.table)))
            case LogFetched() as event if event.request in self._fetches:
                self._fetches[event.request].take(event.number, event.unroll, time.monotonic())
            case (wire.Statistics() | wire.Deleted()) as event if event.request in self._answers:
                self._answers[event.request] = event

    def _forget(self) -> None:
        """Lets go of all that is of another log: keys and numbers of it mean nothing."""
        self._generation += 1
        for handed in self._handed.values():
            handed.begin_anew()
        for table in self._batches:
            self._drop_batches(table)
        for fetch in self._fetches.values():
            fetch.begin_anew()

    def _late(self, what: str) -> PeerTimeout:
        where, reason = self._client.connection.endpoint, self.waits_for or "its answer"
        return PeerTimeout(f"no {what} from the replay server at {where} in time: it waits for {reason}")
