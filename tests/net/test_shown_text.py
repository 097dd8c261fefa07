"""Text of peers: names and reasons in messages control no terminal, at either end and in any field."""

import msgspec
import pytest

from apexrl.errors import WireError
from apexrl.net import wire
from apexrl.net.metrics_channel import Evaluation, Report
from apexrl.net.outbox import Outbox
from apexrl.networks.headers import ParametersHeader
from apexrl.types import Text
from tests.net.peers import Peers, greeting_of
from tests.net.test_wire_vectors import FROM_REPLAY, TO_REPLAY

STRANGE = ["\x1b]0;title\x07", "\n12:00:00 replay: ", "\x7f", "\x9b31m", "\r", "\u2028", "\u202e"]
FIXED = {"type", "dtype", "at", "frame_dtype", "granularity"}  # fields that are one of some words


def with_strange_text(value, strange, key=""):
    """Yields copies of a message's plain values, in each of which one text is strange."""
    if isinstance(value, str) and key not in FIXED:
        yield value + strange
    elif isinstance(value, dict):
        for name, one in value.items():
            yield from ({**value, name: other} for other in with_strange_text(one, strange, name))
    elif isinstance(value, list):
        for i, one in enumerate(value):
            yield from ([*value[:i], other, *value[i + 1 :]] for other in with_strange_text(one, strange, key))


@pytest.mark.parametrize("strange", STRANGE)
@pytest.mark.parametrize(
    ("decode", "messages"), [(wire.decode_to_replay, TO_REPLAY), (wire.decode_from_replay, FROM_REPLAY)]
)
def test_no_text_of_a_message_controls_a_terminal(decode, messages, strange):
    num_tried = 0
    for message, attachments in messages:
        decode([wire.encode(message), *attachments])
        for values in with_strange_text(msgspec.msgpack.decode(wire.encode(message)), strange):
            num_tried += 1
            with pytest.raises(WireError):
                decode([msgspec.msgpack.encode(values), *attachments])
    assert num_tried > 10


@pytest.mark.parametrize("strange", STRANGE)
def test_no_text_of_a_report_controls_a_terminal(spec, strange):
    messages = [
        Report("actor-1", "run-1", {"actor/lag": 1.0}),
        Evaluation(5, 0.0, (1.0,), (10,), 1.0, "run-1"),
        ParametersHeader(1, spec, "impala", "{}", "run-1"),
    ]
    for message in messages:
        kind, values = type(message), msgspec.msgpack.decode(msgspec.msgpack.encode(message))
        values.pop("video", None)
        for changed in with_strange_text(values, strange):
            with pytest.raises(msgspec.ValidationError):
                msgspec.msgpack.decode(msgspec.msgpack.encode(changed), type=kind)
    with pytest.raises(msgspec.ValidationError):
        tags = {"type": "Report", "sender": "a", "run": "b", "scalars": {f"actor/{strange}": 1.0}}
        msgspec.msgpack.decode(msgspec.msgpack.encode(tags), type=Report)


def test_names_of_people_are_taken(spec):
    for name in ("läufe/eins zwei", "日本", "a-b_c:d.e/f@g"):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(name), type=Text) == name


@pytest.mark.parametrize("strange", STRANGE)
def test_a_reason_with_words_of_the_peer_is_one_line_that_fits_a_message(strange, caplog):
    outbox = Outbox()
    outbox.refuse("actor", b"peer", f"no {strange} here {'x' * 5000}")
    outbox.drop("actor", b"peer", "malformed", f"no {strange} here {'x' * 5000}")
    for message in (wire.decode_from_replay(outgoing.frames) for outgoing in outbox.drain()):
        assert message.reason.isprintable() and "here" in message.reason
    assert all(record.getMessage().isprintable() for record in caplog.records) and caplog.records


def test_a_greeting_with_a_strange_environment_is_malformed(spec, caplog):
    peers = Peers(spec)
    strange = msgspec.structs.replace(spec, env="\x1b[2JPong")
    peers.say("actor", b"actor", greeting_of(b"actor", 1, strange))
    assert peers.dropped == {"malformed": 1} and "\x1b" not in caplog.text
