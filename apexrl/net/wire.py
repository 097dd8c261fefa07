"""Messages between the roles and the replay server, as frames of bytes. No sockets, no clock. See docs/wire.md.

A message is one ZeroMQ multipart: the first frame is a msgpack-encoded, tagged struct, large byte strings follow as
frames of their own. Arrays travel as little-endian bytes. Nothing is ever unpickled, and the bounds in the types are
checked while a message is decoded.

Actor to replay:   Hello, Insert (+ block), Heartbeat, Goodbye
replay to actor:   Welcome, Acknowledge, Dropped, Refused, Stranger
learner to replay: Subscribe, Demand, UpdatePriorities, Delete, Fetch, AskStatistics, Heartbeat, Goodbye
replay to learner: Subscribed, Append (+ message and block of the insert), Batch (+ messages and blocks), Waiting,
                   Standing, Deleted, Fetched (+ message and block), Statistics, Dropped, Refused, Stranger
"""

from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np

from apexrl.casts import exactly
from apexrl.errors import MALFORMED, WireError
from apexrl.net.protocols import PROTOCOLS
from apexrl.types import (
    Count,
    Episode,
    Finite,
    Granularity,
    Name,
    Sample,
    SmallCount,
    StreamSpec,
    Text,
    UnrollHeader,
)

T = TypeVar("T")

MAX_MESSAGE_BYTES = 64 * 2**20
MAX_BATCH = 16_384
MAX_TABLES = 16
MAX_FETCH = 1024
MAX_BATCHES_AHEAD = 64  # of a table, beyond those sent

Array = Annotated[bytes, msgspec.Meta(max_length=8 * MAX_BATCH)]
Bits = Annotated[bytes, msgspec.Meta(max_length=MAX_BATCH // 8)]
Weight = Annotated[float, msgspec.Meta(gt=0, le=1e100)]
LogName = Name | msgspec.UnsetType  # of the log of a server that has several; a server of 0.2.0 knows none
PerTable = Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_TABLES)]


class Hello(msgspec.Struct, tag=True, frozen=True):
    """An actor process introduces itself, again after every loss of contact."""

    protocol: int
    actor: Name  # ends in the mark of its routing id (`identity`)
    num_streams: int
    spec: StreamSpec
    first_sequence: Count  # number of the oldest insert that it has not seen acknowledged
    newest_protocol: int = 0  # that it speaks, `protocol` being the oldest; 0: it speaks no other
    log_name: LogName = msgspec.UNSET


class Welcome(msgspec.Struct, tag=True, frozen=True):
    """The actor's lease of environment slots, one a stream, and where it stands."""

    slots: tuple[int, ...]
    ladder_size: int
    stored_sequence: int  # inserts before this number are stored
    allowed_sequence: int  # inserts before this number may be sent
    waits_for: Name  # why the actor may not go on further than that; empty when it may
    protocol: int = PROTOCOLS[0]  # that both speak from now on
    log_name: LogName = msgspec.UNSET  # as in Hello


class Insert(msgspec.Struct, tag=True, frozen=True):
    """One unroll; its compressed block is the second frame. The replay forwards both to learners as they are."""

    sequence: Count  # counts the inserts of this actor process
    actor: Name
    stream: SmallCount
    first_step: Count
    params_version: Annotated[int, msgspec.Meta(ge=-1, le=2**53)]
    exploration: Finite
    valid: Bits  # K bits, the first one the highest of its byte: a transition starts there
    priorities: Array  # float32 [P]
    episodes: Annotated[tuple[Episode, ...], msgspec.Meta(max_length=MAX_BATCH)] = ()

    @classmethod
    def of(cls, header: UnrollHeader, sequence: int, actor: str) -> "Insert":
        """Returns the message of a header. Raises WireError when its arrays would be changed."""
        try:
            valid, priorities = exactly(header.valid, np.bool_), exactly(header.priorities, np.float32)
        except ValueError as error:
            raise WireError(f"valid or priorities of {error}") from error
        return cls(
            sequence,
            actor,
            header.stream,
            header.first_step,
            header.params_version,
            float(header.exploration),
            np.packbits(valid).tobytes(),
            priorities.tobytes(),
            header.episodes,
        )

    def header(self, unroll_starts: int) -> UnrollHeader:
        """Returns the header as a record.

        Raises: WireError when `valid` or the priorities have a wrong length.
        """
        if len(self.valid) != num_valid_bytes(unroll_starts):
            raise WireError(f"{len(self.valid)} bytes of valid for {unroll_starts} starts")
        return UnrollHeader(
            self.stream,
            self.first_step,
            self.params_version,
            self.exploration,
            np.unpackbits(np.frombuffer(self.valid, np.uint8), count=unroll_starts).view(bool),
            array_from(self.priorities, np.float32),
            self.episodes,
        )


class Acknowledge(msgspec.Struct, tag=True, frozen=True):
    """An actor's stored inserts, and how far it may go on. It is cumulative, so that a lost one does no harm."""

    stored_sequence: int
    allowed_sequence: int
    ladder_size: int
    waits_for: Name


class Heartbeat(msgspec.Struct, tag=True, frozen=True):
    """The peer is alive and asks where it stands: an actor gets an Acknowledge, a learner a Standing."""


class Want(msgspec.Struct, frozen=True, array_like=True):
    """Batches of one table that a learner asks for."""

    table: Name
    batch_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_BATCH)]


class Subscribe(msgspec.Struct, tag=True, frozen=True):
    """A learner asks for batches, and for the log from a position on if it holds a replica."""

    protocol: int
    learner: Name
    request: Count  # counts the subscriptions of this learner; the answer repeats it
    wants: Annotated[tuple[Want, ...], msgspec.Meta(max_length=MAX_TABLES)]
    follows_log: bool
    log: Name  # the log of which it holds a replica, or empty
    life: Count  # life of the server when the replica was last fed
    ring_unrolls: Count  # size of the replica
    next_number: Count  # the first unroll that it lacks of that log
    with_probabilities: bool = False  # of the keys, beside the weights
    with_unrolls: bool = False  # of the keys, behind the batch
    newest_protocol: int = 0  # as in Hello
    log_name: LogName = msgspec.UNSET


class Subscribed(msgspec.Struct, tag=True, frozen=True):
    """The answer to a Subscribe: how to hold a replica, and which unroll and which batches come next."""

    request: int
    log: Name
    life: int  # counts the starts of a server over this log
    continues: bool  # False: the learner's replica is of another log, it starts over
    spec: StreamSpec
    ring_unrolls: int
    next_number: int
    next_batches: tuple[int, ...]  # by wanted table
    granularity: tuple[Granularity, ...]  # by wanted table: the items that its keys name
    protocol: int = PROTOCOLS[0]  # that both speak from now on
    log_name: LogName = msgspec.UNSET  # as in Subscribe
    ancestors: tuple[Name, ...] = ()  # logs whose unrolls this one has, with their numbers


class Demand(msgspec.Struct, tag=True, frozen=True):
    """Flow control of a learner, in totals since it subscribed."""

    applied_number: Count  # unrolls before this number are in the replica
    batches: PerTable  # batches that the server may send, those already sent included, by wanted table


class Append(msgspec.Struct, tag=True, frozen=True):
    """The next unroll of the log; the second and third frame are the insert message and the block."""

    number: int


class Batch(msgspec.Struct, tag=True, frozen=True):
    """A sampled batch. A peer that follows the log has got every unroll that it names.

    To who asked for unrolls it brings two frames for each that its keys name, by ascending number: the insert message
    and the block. Both are empty where they would make the message too large: fetch those.
    """

    table: SmallCount  # position among the wanted ones
    index: Count  # counts the batches of this table since the learner subscribed
    next_number: Count  # unrolls before it were sent before; a peer that lacks one has lost it
    keys: bytes  # int64 [B]
    weights: bytes  # float32 [B]
    largest_weight: Weight  # of the batch, before the weights were divided by it
    probabilities: bytes = b""  # float64 [B], for those who asked

    def sample(self) -> Sample:
        """Returns the arrays.

        Raises: WireError when their lengths disagree.
        """
        sample = Sample(
            array_from(self.keys, np.int64),
            array_from(self.probabilities, np.float64),
            array_from(self.weights, np.float32),
            self.largest_weight,
        )
        size = len(sample.keys)
        if len(sample.weights) != size or len(sample.probabilities) not in (0, size):
            raise WireError("a batch's keys, probabilities and weights differ in length")
        return sample


class UpdatePriorities(msgspec.Struct, tag=True, frozen=True):
    """New priorities of the keys of one or more batches, in order."""

    table: SmallCount  # position among the wanted ones
    keys: Array  # int64 [N]
    priorities: Array  # float32 [N]


class Delete(msgspec.Struct, tag=True, frozen=True):
    """Takes items out of a table for ever, answered with a Deleted."""

    request: Count
    table: Name
    keys: Array = b""  # int64 [N]
    everything: bool = False  # all that the table holds, and its limiter begins anew


class Deleted(msgspec.Struct, tag=True, frozen=True):
    """The answer to a Delete."""

    request: int
    count: int  # items that could be drawn before
    fault: Text = ""  # why nothing was done


class Waiting(msgspec.Struct, tag=True, frozen=True):
    """The reason why a learner waits. The server sends it when it changes."""

    table: SmallCount
    reason: Name


class Standing(msgspec.Struct, tag=True, frozen=True):
    """The answer to a learner's heartbeat: its position if nothing was lost, and why it waits."""

    next_number: int
    next_batches: tuple[int, ...]
    waits_for: tuple[Name, ...]


class Fetch(msgspec.Struct, tag=True, frozen=True):
    """Asks for unrolls by number; each is answered with a Fetched."""

    request: Count
    numbers: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_FETCH)]


class Fetched(msgspec.Struct, tag=True, frozen=True):
    """One unroll that was asked for; the attached frames are empty when the log does not hold it (any more)."""

    request: int
    number: int
    is_held: bool


class AskStatistics(msgspec.Struct, tag=True, frozen=True):
    """Asks for the server's metrics."""

    request: Count
    log_name: LogName = msgspec.UNSET


class PeerStanding(msgspec.Struct, frozen=True):
    """One peer as the server sees it."""

    role: Name
    name: Name
    silent_seconds: float
    waits_for: Name  # why the server makes it wait; empty when it does not


class Statistics(msgspec.Struct, tag=True, frozen=True):
    """The server's metrics and its peers."""

    request: int
    metrics: dict[Text, float]
    peers: tuple[PeerStanding, ...]


class Dropped(msgspec.Struct, tag=True, frozen=True):
    """A message of the peer was dropped; the reason is for a person to read."""

    reason: Text

    @property
    def is_malformed(self) -> bool:
        """Whether the message can never be taken; else it may be sent again later."""
        return self.reason.startswith("malformed:")


class Refused(msgspec.Struct, tag=True, frozen=True):
    """The server will not serve this peer; the reason is for a person to read."""

    reason: Text


class Stranger(msgspec.Struct, tag=True, frozen=True):
    """Introduce yourself again: the server does not know you (any more), or lacks something you have sent."""


class Goodbye(msgspec.Struct, tag=True, frozen=True):
    """The peer leaves. Its slots may be given to others."""


ToReplay = Hello | Insert | Heartbeat | Subscribe | Demand | UpdatePriorities | Delete | Fetch | AskStatistics | Goodbye
FromReplay = (
    Welcome | Acknowledge | Subscribed | Append | Batch | Waiting | Standing | Deleted | Fetched | Statistics
    | Dropped | Refused | Stranger
)  # fmt: skip
NUM_ATTACHMENTS: dict[Any, int] = {Insert: 1, Append: 2, Fetched: 2}

_encoder = msgspec.msgpack.Encoder()
_to_replay: msgspec.msgpack.Decoder[ToReplay] = msgspec.msgpack.Decoder(ToReplay)
_from_replay: msgspec.msgpack.Decoder[FromReplay] = msgspec.msgpack.Decoder(FromReplay)


def encode(message: ToReplay | FromReplay) -> bytes:
    """Returns the first frame of a message."""
    return _encoder.encode(message)


def decode_to_replay(frames: Sequence[bytes]) -> ToReplay:
    """Returns the message of frames that reached a replay server.

    Raises: WireError when it is malformed or has the wrong number of frames.
    """
    return _decode(_to_replay, frames)


def decode_from_replay(frames: Sequence[bytes]) -> FromReplay:
    """Returns the message of frames that came from a replay server.

    Raises: WireError when it is malformed or has the wrong number of frames.
    """
    return _decode(_from_replay, frames)


def decode_insert(frame: bytes) -> Insert:
    """Returns the insert message that a server forwarded to a learner.

    Raises: WireError when it is something else.
    """
    message = _decode(_to_replay, [frame, b""])
    if not isinstance(message, Insert):
        raise WireError(f"an insert was expected, not {type(message).__name__}")
    return message


def num_valid_bytes(unroll_starts: int) -> int:
    """Returns how many bytes `Insert.valid` has."""
    return -(-unroll_starts // 8)


def array_from(data: bytes, dtype: type) -> np.ndarray:
    """Returns a read-only array over bytes.

    Raises: WireError when their number is no multiple of the item size.
    """
    try:
        return np.frombuffer(data, dtype)
    except ValueError as error:
        raise WireError(f"{len(data)} bytes are no array of {np.dtype(dtype)}") from error


def _decode(decoder: msgspec.msgpack.Decoder[T], frames: Sequence[bytes]) -> T:
    if not frames:
        raise WireError("a message without frames")
    try:
        message = decoder.decode(frames[0])
    except MALFORMED as error:
        raise WireError(f"a malformed message: {error}") from error
    expected = NUM_ATTACHMENTS.get(type(message), 0)
    if len(frames) != 1 + expected and not (isinstance(message, Batch) and len(frames) % 2):
        raise WireError(f"{type(message).__name__} comes with {expected} attachments, not {len(frames) - 1}")
    return message
