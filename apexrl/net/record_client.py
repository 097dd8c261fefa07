"""Records of any kind in a replay server: insert them, sample them with their data, give priorities back.

It is the client for everything that is no reinforcement learning: examples, episodes of another format, requests. One
thread owns a client. Each call that waits has a twin that is awaited: `sample` and `await sampling`.
"""

import itertools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec
import numpy as np
import zmq
from numpy.typing import ArrayLike

from apexrl.errors import ApexError
from apexrl.net import wire
from apexrl.net.calls import Closing, Steps, call
from apexrl.net.insert_client import InsertClient
from apexrl.net.keyring import Keyring
from apexrl.net.records import FieldType, RecordCodec, layout_from, layout_of, spec_of
from apexrl.net.replay_client import ReplayClient
from apexrl.types import UnrollHeader

NUM_STREAMS = 256  # a server lets so many and as many again be on the way
PATIENCE_SECONDS = 10.0
LARGEST_PRIORITY = float(np.finfo(np.float32).max)


class Records(NamedTuple):
    """A batch of B records."""

    data: dict[str, np.ndarray]  # by field: [B, *shape]
    keys: np.ndarray  # [B] int64
    weights: np.ndarray  # [B] float32: importance weights, at most 1
    probabilities: np.ndarray  # [B] float64: with which they were drawn


class RecordClient(Closing):
    """Inserts records into a replay server, and samples them. A record is a name and an array for each field."""

    def __init__(
        self,
        endpoints: tuple[str, str],
        name: str,
        fields: Mapping[str, FieldType] | None = None,
        batch_sizes: Mapping[str, int] | None = None,
        prefetch_batches: int = 4,
        keyring: Keyring | None = None,
        context: zmq.Context | None = None,
        log: str = "",
    ):
        """Connects and waits for nobody.

        Args:
          endpoints: the server's port for actors, and that for learners: `ReplayServer.endpoints`.
          name: for people to read.
          fields: by name, the type of a record's arrays, such as "int64", or a type and a shape: ("float32", 64). Types
            are bool, all integers and floats of numpy, and texts of a largest length: "U20", or "S20" for bytes. A
            client that only reads may leave them out.
          batch_sizes: by table, for those that will be sampled.
          prefetch_batches: batches of each table that are on the way or not yet taken, 1 to 64.
          log: the name of the log, where the server has several.
        Raises: ValueError when no server takes such names, fields or numbers.
        """
        if isinstance(endpoints, str) or len(endpoints) != 2:
            raise ValueError(f"endpoints {endpoints!r}: give two, that for actors and that for learners")
        inserts, reads = endpoints
        self._layout = None if fields is None else layout_of(fields)
        self._codec = None if self._layout is None else RecordCodec(self._layout)
        self._counts = itertools.count()
        self._first: wire.Insert | None = None  # the message of the first record
        self._reader = ReplayClient(reads, name, batch_sizes, prefetch_batches, keyring, context, True, True, log)
        self._writer: InsertClient | None = None
        if self._layout is not None:
            try:
                self._writer = InsertClient(inserts, name, spec_of(self._layout), NUM_STREAMS, keyring, context, log)
            except ApexError as error:
                self._reader.close()
                raise ValueError(str(error)) from error

    @property
    def waits_for(self) -> str:
        """Why there is no batch: replay_connection, min_size, actors, priorities, or several; empty where one is."""
        return self._reader.waits_for

    def insert(
        self, record: Mapping[str, ArrayLike], priority: float = 1.0, timeout_seconds: float = PATIENCE_SECONDS
    ) -> None:
        """Sends a record, once the server allows another one. It is stored at the latest when `flush` says so.

        Raises: ValueError when the record has other fields, or a number or text that does not fit; nothing is sent
          then. PeerTimeout when the server does not allow it in time, PeerRefused when its log holds other records.
        """
        writer, message, block = self._prepared(record, priority)
        if not writer.send_now(message, block):
            writer.sending(message, block, timeout_seconds).finish()

    @call
    def inserting(
        self, record: Mapping[str, ArrayLike], priority: float = 1.0, timeout_seconds: float = PATIENCE_SECONDS
    ) -> Steps[None]:
        """Is `insert` to be awaited."""
        writer, message, block = self._prepared(record, priority)
        yield from writer.sending(message, block, timeout_seconds)

    def flush(self, timeout_seconds: float = PATIENCE_SECONDS) -> bool:
        """Waits until every record is stored; returns False when the time is up before.

        Raises: PeerRefused when the server dropped one since the last call.
        """
        return self.flushing(timeout_seconds).finish()

    @call
    def flushing(self, timeout_seconds: float = PATIENCE_SECONDS) -> Steps[bool]:
        """Is `flush` to be awaited."""
        return (yield from self._writes()[0].flushing(timeout_seconds))

    def sample(self, table: str, timeout_seconds: float = PATIENCE_SECONDS) -> Records:
        """Returns a batch with its data. Records that the log let go meanwhile are left out, which is rare.

        Raises: KeyError when the table was not named at the start, PeerTimeout when there is no batch in time,
          PeerRefused when the server refuses us, ApexError when its log holds other records, or none.
        """
        return self.sampling(table, timeout_seconds).finish()

    @call
    def sampling(self, table: str, timeout_seconds: float = PATIENCE_SECONDS) -> Steps[Records]:
        """Is `sample` to be awaited."""
        sample, numbers, unrolls = yield from self._reader.sampling_encoded(table, timeout_seconds, self._reads)
        held = np.array([number in unrolls for number in numbers.tolist()], bool)
        blocks = {number: unroll.block for number, unroll in unrolls.items()}
        data = self._reads().decode(blocks, numbers[held].tolist())
        return Records(data, sample.keys[held], sample.weights[held], sample.probabilities[held])

    def batches(self, table: str, timeout_seconds: float = PATIENCE_SECONDS) -> Iterator[Records]:
        """Yields batches without end. The next ones are on the way meanwhile.

        Raises: as `sample`; `timeout_seconds` are for each.
        """
        return iter(lambda: self.sample(table, timeout_seconds), object())  # which goes on after an error

    def has_batch(self, table: str) -> bool:
        """Returns whether `sample` would not wait for a batch."""
        return self._reader.has_batch(table)

    def update_priorities(self, table: str, keys: ArrayLike, priorities: ArrayLike) -> None:
        """Sends new priorities [B] of keys [B], as `ReplayClient.update_priorities` does."""
        self._reader.update_priorities(table, keys, priorities)

    def delete(self, table: str, keys: ArrayLike, timeout_seconds: float = PATIENCE_SECONDS) -> int:
        """Takes records [N] out of a table for ever, as `ReplayClient.delete` does."""
        return self._reader.delete(table, keys, timeout_seconds)

    @call
    def deleting(self, table: str, keys: ArrayLike, timeout_seconds: float = PATIENCE_SECONDS) -> Steps[int]:
        """Is `delete` to be awaited."""
        return (yield from self._reader.deleting(table, keys, timeout_seconds))

    def reset(self, table: str, timeout_seconds: float = PATIENCE_SECONDS) -> int:
        """Takes all records out of a table for ever, as `ReplayClient.reset` does."""
        return self._reader.reset(table, timeout_seconds)

    @call
    def resetting(self, table: str, timeout_seconds: float = PATIENCE_SECONDS) -> Steps[int]:
        """Is `reset` to be awaited."""
        return (yield from self._reader.resetting(table, timeout_seconds))

    def fileno(self) -> int:
        """Returns a descriptor that becomes readable when batches may have come, as `ReplayClient.fileno` does."""
        return self._reader.fileno()

    def close(self) -> None:
        """Says goodbye. Call `flush` first, or the newest records may be lost."""
        self._reader.close()
        if self._writer is not None:
            self._writer.close()

    def _writes(self) -> tuple[InsertClient, RecordCodec]:
        if self._writer is None or self._codec is None:
            raise ApexError("this client was made without fields, so it only reads: give it those of its records")
        return self._writer, self._codec

    def _prepared(self, record: Mapping[str, ArrayLike], priority: float) -> tuple[InsertClient, wire.Insert, bytes]:
        """Returns a record as its client sends it.

        The first one passes the checks of any unroll. Another one differs in its fields and its priority alone, which
        are checked each time.

        Raises: ValueError when one of those does not fit.
        """
        writer, codec = self._writes()
        with writer.use:
            block = codec.encode(record)
        if not 0 <= priority <= LARGEST_PRIORITY:
            raise ValueError(f"priority {priority}: give a finite float32 number from 0")
        if self._first is None:
            ones = np.ones(1, bool), np.ones(1, np.float32)
            self._first = writer.checked(UnrollHeader(0, 0, 0, 0.0, *ones, ()), block)
        number, priorities = next(self._counts), np.float32(priority).tobytes()
        return writer, msgspec.structs.replace(self._first, first_step=number, priorities=priorities), block

    def _reads(self) -> RecordCodec:
        """Returns the codec of the log, whose spec is known once there was a batch."""
        assert self._reader.spec is not None
        layout = layout_from(self._reader.spec)
        if self._layout not in (None, layout):
            raise ApexError(f"the log holds records of {layout}, this client has {self._layout}")
        if self._codec is None or self._layout is None:
            self._codec, self._layout = RecordCodec(layout), layout
        return self._codec
