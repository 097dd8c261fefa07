import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apexrl.errors import WireError
from apexrl.net import wire
from apexrl.types import Episode, StreamSpec

SPEC = StreamSpec("Known-v0", (2,), "float32", 3, 4, 1, unroll_starts=8, n_steps=2)
INSERT = wire.Insert(7, "actor", 3, 64, 100, 0.4, np.ones(8, np.float32).tobytes(), (Episode(1.5, 200, 0.4),))
TO_REPLAY = [
    wire.Hello(1, "actor", 4, SPEC, 0),
    wire.Heartbeat(),
    wire.Goodbye(),
    wire.Subscribe(1, "learner", 1, "", 0, 32),
    wire.Demand(5, 9),
    wire.UpdatePriorities(b"\0" * 8, b"\0" * 4),
]
FROM_REPLAY = [
    wire.Welcome("server", (0, 1), 2, 0, 10),
    wire.Acknowledge(4, 20, 2, ""),
    wire.Subscribed(1, "server", SPEC, 100, 3, 0),
    wire.Batch(0, b"\0" * 8, b"\0" * 8, b"\0" * 4),
    wire.Waiting("actors"),
    wire.Refused("no"),
    wire.Stranger(),
]


def test_round_trips():
    for message in TO_REPLAY:
        assert wire.decode_to_replay([wire.encode(message)]) == message
    for message in FROM_REPLAY:
        assert wire.decode_from_replay([wire.encode(message)]) == message
    assert wire.decode_to_replay([wire.encode(INSERT), b"block"]) == INSERT
    assert wire.decode_insert(wire.encode(INSERT)) == INSERT
    assert wire.decode_from_replay([wire.encode(wire.Append(3)), b"message", b"block"]) == wire.Append(3)


def test_insert_header_is_what_was_sent():
    header = INSERT.header()
    assert (header.stream, header.first_step, header.params_version) == (3, 64, 100)
    assert header.priorities.tolist() == [1.0] * 8 and header.episodes[0].steps == 200


def test_wrong_number_of_frames():
    for frames in ([], [wire.encode(INSERT)], [wire.encode(INSERT), b"", b""], [wire.encode(wire.Heartbeat()), b"x"]):
        with pytest.raises(WireError):
            wire.decode_to_replay(frames)


def test_a_message_of_the_other_direction_is_malformed():
    with pytest.raises(WireError):
        wire.decode_to_replay([wire.encode(wire.Stranger())])


def test_arrays_of_odd_length_are_malformed():
    with pytest.raises(WireError, match="7 bytes"):
        wire.array_from(b"1234567", np.int64)
    with pytest.raises(WireError, match="differ"):
        wire.Batch(0, b"\0" * 16, b"\0" * 8, b"\0" * 4).sample()


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_only_raise_wire_errors(data):
    for decode in (wire.decode_to_replay, wire.decode_from_replay):
        try:
            decode([data])
        except WireError:
            continue


@settings(max_examples=500, deadline=None)
@given(st.sampled_from([*TO_REPLAY, INSERT]), st.integers(0, 10**6), st.integers(0, 255), st.booleans())
def test_mutated_messages_only_raise_wire_errors(message, position, value, cut):
    data = bytearray(wire.encode(message))
    position %= len(data)
    data[position] = value
    if cut:
        data = data[:position]
    try:
        wire.decode_to_replay([bytes(data)] + [b"block"] * isinstance(message, wire.Insert))
    except WireError:
        return
