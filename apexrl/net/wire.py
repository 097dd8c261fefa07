"""Messages between the roles and the replay server, as frames of bytes. No sockets, no clock.

A message is one ZeroMQ multipart: the first frame is a msgpack-encoded, tagged struct, large byte strings follow as
frames of their own. Arrays travel as little-endian bytes. Nothing is ever unpickled.

Actor to replay:   Hello, Insert (+ block), Heartbeat, Goodbye
replay to actor:   Welcome, Acknowledge, Refused, Stranger
learner to replay: Subscribe, Demand, UpdatePriorities, Heartbeat, Goodbye
replay to learner: Subscribed, Append (+ message and block of the insert), Batch, Waiting, Standing, Refused, Stranger
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from apexrl.errors import WireError
from apexrl.types import Episode, Sample, StreamSpec, UnrollHeader

T = TypeVar("T")

PROTOCOL = 1
MAX_MESSAGE_BYTES = 64 * 2**20


class Hello(msgspec.Struct, tag=True, frozen=True):
    """An actor process introduces itself, again after every loss of contact."""

    protocol: int
    actor: str
    num_streams: int
    spec: StreamSpec
    first_sequence: int  # of the oldest insert that it has not seen acknowledged


class Welcome(msgspec.Struct, tag=True, frozen=True):
    """The actor's lease of environment slots, one a stream."""

    server: str  # identity of this life of the server
    slots: tuple[int, ...]
    ladder_size: int
    stored_sequence: int  # inserts before this number are stored
    allowed_sequence: int  # inserts before this number may be sent


class Insert(msgspec.Struct, tag=True, frozen=True):
    """One unroll; its compressed block is the second frame. The replay forwards both to learners as they are."""

    sequence: int  # counts the inserts of this actor process
    actor: str
    stream: int
    first_step: int
    params_version: int
    epsilon: float
    priorities: bytes  # float32 [K]
    episodes: tuple[Episode, ...] = ()

    def header(self) -> UnrollHeader:
        """Returns the header as a record; the caller has checked the length of the priorities."""
        priorities = np.frombuffer(self.priorities, np.float32)
        return UnrollHeader(self.stream, self.first_step, self.params_version, self.epsilon, priorities, self.episodes)


class Acknowledge(msgspec.Struct, tag=True, frozen=True):
    """What is stored of an actor's inserts, and how far it may go on: cumulative, so that a lost one does no harm."""

    stored_sequence: int
    allowed_sequence: int
    ladder_size: int
    waits_for: str  # why the actor may not go on further than that; empty when it may


class Heartbeat(msgspec.Struct, tag=True, frozen=True):
    """The peer is alive and asks where it stands: an actor gets an Acknowledge, a learner a Standing."""


class Subscribe(msgspec.Struct, tag=True, frozen=True):
    """A learner asks for the log from a position on."""

    protocol: int
    learner: str
    request: int  # counts the subscriptions of this learner; the answer repeats it
    server: str  # the life of the server whose log it holds, or empty
    next_number: int  # the first unroll that it lacks of that log
    batch_size: int


class Subscribed(msgspec.Struct, tag=True, frozen=True):
    """What the learner needs to hold a replica, and which unroll and which batch come next."""

    request: int
    server: str
    spec: StreamSpec
    ring_unrolls: int
    next_number: int
    next_batch: int


class Demand(msgspec.Struct, tag=True, frozen=True):
    """Flow control of a learner, in totals since it subscribed."""

    applied_number: int  # unrolls before this number are in the replica
    batches: int  # batches that the server may send, those already sent included


class Append(msgspec.Struct, tag=True, frozen=True):
    """The next unroll of the log; the second and third frame are the insert message and the block."""

    number: int


class Batch(msgspec.Struct, tag=True, frozen=True):
    """A sampled batch; names only unrolls that were sent before it."""

    index: int  # counts the batches since the learner subscribed
    keys: bytes  # int64 [B]
    probabilities: bytes  # float64 [B]
    weights: bytes  # float32 [B]

    def sample(self) -> Sample:
        """Returns the arrays.

        Raises: WireError when their lengths disagree.
        """
        sample = Sample(
            array_from(self.keys, np.int64),
            array_from(self.probabilities, np.float64),
            array_from(self.weights, np.float32),
        )
        if not len(sample.keys) == len(sample.probabilities) == len(sample.weights):
            raise WireError("a batch's keys, probabilities and weights differ in length")
        return sample


class UpdatePriorities(msgspec.Struct, tag=True, frozen=True):
    """New priorities of sampled transitions."""

    keys: bytes  # int64 [B]
    priorities: bytes  # float32 [B]


class Waiting(msgspec.Struct, tag=True, frozen=True):
    """What a learner waits for; sent when it changes."""

    reason: str


class Standing(msgspec.Struct, tag=True, frozen=True):
    """The answer to a learner's heartbeat: what it must have by now if nothing was lost, and what it waits for."""

    next_number: int
    next_batch: int
    waits_for: str


class Refused(msgspec.Struct, tag=True, frozen=True):
    """The server will not serve this peer; the reason is for a person to read."""

    reason: str


class Stranger(msgspec.Struct, tag=True, frozen=True):
    """The server does not know the sender (it was restarted, or gave the peer up): introduce yourself again."""


class Goodbye(msgspec.Struct, tag=True, frozen=True):
    """The peer leaves; what it held may be given to others."""


ToReplay = Hello | Insert | Heartbeat | Subscribe | Demand | UpdatePriorities | Goodbye
FromReplay = Welcome | Acknowledge | Subscribed | Append | Batch | Waiting | Standing | Refused | Stranger
MALFORMED = (msgspec.MsgspecError, ValueError, RecursionError)  # what msgspec raises for bytes of a stranger
NUM_ATTACHMENTS: dict[Any, int] = {Insert: 1, Append: 2}

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
    if len(frames) != 1 + expected:
        raise WireError(f"{type(message).__name__} comes with {expected} attachments, not {len(frames) - 1}")
    return message
