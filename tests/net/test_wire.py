import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apexrl.errors import WireError
from apexrl.net import wire
from apexrl.types import Episode, StreamSpec

SPEC = StreamSpec("Known-v0", (2,), "float32", 3, 4, 1, unroll_starts=8, overlap_steps=2)
INSERT = wire.Insert(7, "actor", 3, 64, 100, 0.4, b"\xfe", np.ones(8, np.float32).tobytes(), (Episode(1.5, 200, 0.4),))
WANTS = (wire.Want("transitions", 32), wire.Want("queue", 1))
TO_REPLAY = [
    wire.Hello(2, "actor", 4, SPEC, 0),
    INSERT,
    wire.Heartbeat(),
    wire.Subscribe(2, "learner", 1, WANTS, True, "log", 3, 100, 32),
    wire.Demand(5, (9, 0)),
    wire.UpdatePriorities(1, b"\0" * 8, b"\0" * 4),
    wire.Fetch(4, (1, 2, 2**53)),
    wire.AskStatistics(9),
    wire.Delete(10, "transitions", bytes(16)),
    wire.Goodbye(),
]
FROM_REPLAY = [
    wire.Welcome((0, 1), 2, 0, 10, "journal"),
    wire.Acknowledge(4, 20, 2, ""),
    wire.Subscribed(1, "log", 3, True, SPEC, 100, 3, (0, 7), ("transitions", "unrolls")),
    wire.Append(3),
    wire.Batch(1, 0, 3, b"\0" * 8, b"\0" * 4, 1.0, b"\0" * 8),
    wire.Waiting(1, "actors"),
    wire.Standing(7, (1, 2), ("", "actors")),
    wire.Deleted(10, 2),
    wire.Fetched(4, 7, True),
    wire.Statistics(2, {"size": 1.5}, (wire.PeerStanding("actor", "a", 0.5, "learner"),)),
    wire.Dropped("malformed"),
    wire.Refused("no"),
    wire.Stranger(),
]


def frames_of(message):
    return [wire.encode(message), *[b"attached"] * wire.NUM_ATTACHMENTS.get(type(message), 0)]


def test_every_message_is_tried_here():
    assert {type(message) for message in TO_REPLAY} == set(wire.ToReplay.__args__)
    assert {type(message) for message in FROM_REPLAY} == set(wire.FromReplay.__args__)


@pytest.mark.parametrize("message", TO_REPLAY)
def test_what_is_said_to_the_replay_arrives(message):
    assert wire.decode_to_replay(frames_of(message)) == message


@pytest.mark.parametrize("name", ["actor\n12:00:00 actors: ended", "actor\n", "\x1b[2J", "a\x00", "\x85", "x" * 201])
def test_a_name_that_would_make_a_line_of_a_log_its_own_is_malformed(name):
    for message in (wire.Hello(2, name, 4, SPEC, 0), wire.Subscribe(2, name, 1, WANTS, True, "log", 3, 100, 32)):
        with pytest.raises(WireError):
            wire.decode_to_replay(frames_of(message))
    assert wire.decode_to_replay(frames_of(wire.Hello(2, "Zoë's laptop/1", 4, SPEC, 0)))


@pytest.mark.parametrize("message", FROM_REPLAY)
def test_what_the_replay_says_arrives(message):
    assert wire.decode_from_replay(frames_of(message)) == message


def test_a_forwarded_insert_is_what_was_sent():
    assert wire.decode_insert(wire.encode(INSERT)) == INSERT
    header = INSERT.header(8)
    assert (header.stream, header.first_step, header.params_version) == (3, 64, 100)
    assert header.valid.tolist() == [True] * 7 + [False]
    assert header.priorities.tolist() == [1.0] * 8 and header.episodes[0].steps == 200
    for other in (b"", b"\xc1", wire.encode(wire.Heartbeat()), wire.encode(wire.Append(1))):
        with pytest.raises(WireError):
            wire.decode_insert(other)


@pytest.mark.parametrize("message", [*TO_REPLAY, *FROM_REPLAY])
def test_a_wrong_number_of_frames_is_malformed(message):
    decode = wire.decode_to_replay if message in TO_REPLAY else wire.decode_from_replay
    frames = frames_of(message)
    for wrong in ([], [*frames, b"more"], frames[:-1]):
        with pytest.raises(WireError):
            decode(wrong)


def test_a_message_of_the_other_direction_is_malformed():
    for message in FROM_REPLAY:
        with pytest.raises(WireError):
            wire.decode_to_replay(frames_of(message))
    for message in TO_REPLAY:
        with pytest.raises(WireError):
            wire.decode_from_replay(frames_of(message))


@pytest.mark.parametrize(
    ("message", "change"),
    [
        (INSERT, {"sequence": -1}),
        (INSERT, {"sequence": 2**60}),
        (INSERT, {"actor": "a" * 201}),
        (INSERT, {"exploration": 1e301}),
        (INSERT, {"exploration": float("nan")}),
        (INSERT, {"valid": bytes(wire.MAX_BATCH // 8 + 1)}),
        (INSERT, {"params_version": -2}),
        (INSERT, {"episodes": (Episode(float("inf"), 1, 0.1),)}),
        (TO_REPLAY[0], {"first_sequence": -1}),
        (TO_REPLAY[0], {"spec": msgspec.structs.replace(SPEC, frame_shape=(1,) * 9)}),
        (TO_REPLAY[0], {"spec": msgspec.structs.replace(SPEC, frame_shape=(-1,))}),
        (TO_REPLAY[0], {"spec": msgspec.structs.replace(SPEC, frame_dtype="float64")}),
        (TO_REPLAY[3], {"wants": (wire.Want("t", 0),)}),
        (TO_REPLAY[3], {"wants": (wire.Want("t", wire.MAX_BATCH + 1),)}),
        (TO_REPLAY[3], {"wants": (wire.Want("t", 1),) * (wire.MAX_TABLES + 1)}),
        (TO_REPLAY[4], {"batches": (1,) * (wire.MAX_TABLES + 1)}),
        (TO_REPLAY[4], {"batches": (-1,)}),
        (TO_REPLAY[5], {"keys": bytes(8 * wire.MAX_BATCH + 1)}),
        (TO_REPLAY[6], {"numbers": (1,) * (wire.MAX_FETCH + 1)}),
    ],
)
def test_what_is_out_of_bounds_is_malformed(message, change):
    with pytest.raises(WireError):
        wire.decode_to_replay(frames_of(msgspec.structs.replace(message, **change)))


def test_arrays_of_odd_length_are_malformed():
    with pytest.raises(WireError, match="7 bytes"):
        wire.array_from(b"1234567", np.int64)
    with pytest.raises(WireError, match="differ"):
        wire.Batch(0, 0, 3, b"\0" * 16, b"\0" * 4, 1.0, b"\0" * 8).sample()
    with pytest.raises(WireError, match="no array"):
        wire.Batch(0, 0, 3, b"\0" * 8, b"\0" * 4, 1.0, b"\0" * 9).sample()


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_only_raise_wire_errors(data):
    for decode in (wire.decode_to_replay, wire.decode_from_replay):
        try:
            decode([data])
        except WireError:
            continue


def test_deep_nesting_is_malformed():
    with pytest.raises(WireError):
        wire.decode_to_replay([b"\x82\xa4type\xa9Heartbeat\xa1x" + b"\x91" * 100_000])


@settings(max_examples=1000, deadline=None)
@given(st.sampled_from([*TO_REPLAY, *FROM_REPLAY]), st.integers(0, 10**6), st.integers(0, 255), st.booleans())
def test_mutated_messages_only_raise_wire_errors(message, position, value, cut):
    first, *attachments = frames_of(message)
    data = bytearray(first)
    position %= len(data)
    data[position] = value
    if cut:
        data = data[:position]
    decode = wire.decode_to_replay if message in TO_REPLAY else wire.decode_from_replay
    try:
        decode([bytes(data), *attachments])
    except WireError:
        return
