"""The wire as docs/wire_vectors.json and docs/wire.md tell it, against the code.

`python -m tests.net.test_wire_vectors` writes the examples anew: after a change of the wire that was meant.
"""

import json
import re
from importlib import import_module
from typing import get_args

import msgspec
import numpy as np
import pytest

from apexrl.errors import WireError
from apexrl.net import wire
from apexrl.net.identity import mark_of, marked, why_not_named
from apexrl.net.protocols import PROTOCOL, PROTOCOLS, why_other_protocol
from apexrl.replay import segment
from apexrl.replay.journal import LogIdentity
from apexrl.replay.snapshot import Snapshot
from apexrl.replay.table import TableState
from apexrl.types import Episode, Field, StreamSpec, Unroll
from apexrl.unroll import UnrollCodec
from tests.fields import slow_arrays, slow_block
from tests.system.processes import ROOT

VECTORS = ROOT / "docs" / "wire_vectors.json"
PAGE = (ROOT / "docs" / "wire.md").read_text()
NAMES = ("left", "stay", "right")
SPEC = StreamSpec("Tiny-v0", (2,), "uint8", 2, 3, 1, action_names=NAMES, unroll_starts=4, overlap_steps=1)
FULL_SPEC = StreamSpec(
    *("Full-v0", (2,), "float32", 1, 0, 1),
    action_bounds=((-2.0, 2.0), (0.0, 1.0)),
    unroll_starts=2,
    overlap_steps=0,
    extras=(
        Field("log_prob", "step", "float32"),
        Field("flag", "observation", "uint8"),
        Field("logits", "observation", "float16", (2,)),
        Field("state", "first", "float32", (1, 2)),
        Field("option", "first", "int32"),
    ),
    has_unroll_priorities=True,
)
BYTES = {"valid", "priorities", "keys", "probabilities", "weights"}  # fields that are hexadecimal in the examples
DECODERS = {"to_replay": wire.decode_to_replay, "from_replay": wire.decode_from_replay}
CLASSES = {"to_replay": get_args(wire.ToReplay), "from_replay": get_args(wire.FromReplay)}

FLOATS = np.array([1.0, 0.5, 0.0, 2.0], np.float32).tobytes()
VALID = np.packbits([True, True, False, True]).tobytes()
KEYS = np.array([4, 9, 14], np.int64).tobytes()
ROUTING_ID = b"0123456789abcdef0123456789abcdef"
ACTOR = marked("host-0", ROUTING_ID)
INSERT = wire.Insert(7, ACTOR, 1, 64, 300, 0.25, VALID, FLOATS, (Episode(-1.5, 200, 0.25),))
UNROLL = Unroll(
    np.arange(14, dtype=np.uint8).reshape(7, 2),
    np.array([0, 1, 2, 1, 0], np.int32),
    np.array([0, 1, -1, 0.5, 0], np.float32),
    np.array([1, 1, 0, 1, 1], np.float32),
    np.array([0, 0, 0, 0, 1, 0], bool),
)
FULL_UNROLL = Unroll(
    np.array([[0.5, 1], [2, -3], [4, 5]], np.float32),
    np.array([[-2, 0.5], [1.5, 0]], np.float32),
    np.array([-0.25, 8], np.float32),
    np.array([1, 0], np.float32),
    np.array([1, 0, 0], bool),
    {
        "log_prob": np.array([-1.5, -0.5], np.float32),
        "flag": np.array([1, 2, 255], np.uint8),
        "logits": np.array([[0.5, -0.5], [1, -1], [2, -2]], np.float16),
        "state": np.array([[[0.125, -8]]], np.float32),
        "option": np.array([-7], np.int32),
    },
)
TO_REPLAY = [
    (wire.Hello(PROTOCOL, ACTOR, 2, SPEC, 0), ()),
    (wire.Hello(PROTOCOLS[0], ACTOR, 1, FULL_SPEC, 8, PROTOCOL), ()),
    (INSERT, (b"block",)),
    (wire.Insert(8, ACTOR, 0, 0, -1, -1.5, VALID, FLOATS[:4]), (b"block",)),
    (wire.Heartbeat(), ()),
    (wire.Goodbye(), ()),
    (wire.Subscribe(PROTOCOL, "learner", 1, (wire.Want("transitions", 3),), True, "", 0, 0, 0), ()),
    (wire.Subscribe(PROTOCOL, "reader", 2, (), False, "0123456789abcdef", 1, 40, 2**53, True), ()),
    (wire.Subscribe(PROTOCOL, "miner", 3, (), False, "", 0, 0, 0, True, True), ()),
    (wire.Demand(5, (9,)), ()),
    (wire.UpdatePriorities(0, KEYS, FLOATS[:12]), ()),
    (wire.Delete(3, "transitions", KEYS), ()),
    (wire.Delete(4, "queue", b"", True), ()),
    (wire.Fetch(1, (0, 300, 70000)), ()),
    (wire.AskStatistics(2), ()),
    (wire.Hello(PROTOCOLS[0], ACTOR, 2, SPEC, 0, PROTOCOL, "pictures"), ()),
    (wire.Subscribe(PROTOCOL, "reader", 1, (), False, "", 0, 0, 0, log_name="pictures"), ()),
    (wire.AskStatistics(3, "pictures"), ()),
]
FROM_REPLAY = [
    (wire.Welcome((0, 1), 2, 7, 13, ""), ()),
    (wire.Acknowledge(8, 8, 2, "learner"), ()),
    (wire.Subscribed(1, "0123456789abcdef", 0, False, SPEC, 40, 3, (0,), ("transitions",)), ()),
    (wire.Append(3), (wire.encode(INSERT), b"block")),
    (wire.Batch(0, 0, 5, KEYS, np.ones(3, np.float32).tobytes(), 4.0), ()),
    (wire.Batch(0, 1, 5, KEYS, np.ones(3, np.float32).tobytes(), 4.0, np.full(3, 0.25).tobytes()), ()),
    (wire.Batch(0, 2, 5, KEYS, np.ones(3, np.float32).tobytes(), 4.0), (wire.encode(INSERT), b"block", b"", b"")),
    (wire.Waiting(0, "min_size"), ()),
    (wire.Standing(4, (1,), ("actors",)), ()),
    (wire.Deleted(3, 2), ()),
    (wire.Deleted(4, 0, "there is no table queue, only transitions"), ()),
    (wire.Fetched(1, 3, True), (wire.encode(INSERT), b"block")),
    (wire.Fetched(1, 300, False), (b"", b"")),
    (wire.Statistics(2, {"size": 16.0}, (wire.PeerStanding("actor", ACTOR, 0.5, ""),)), ()),
    (wire.Dropped("not allowed: insert 9: only those before 9 are allowed"), ()),
    (wire.Refused(why_other_protocol(wire.Hello(PROTOCOL - 1, ACTOR, 1, SPEC, 0))), ()),
    (wire.Stranger(), ()),
    (wire.Welcome((0, 1), 2, 7, 13, "", log_name="pictures"), ()),
    (wire.Subscribed(1, "0123456789abcdef", 0, False, SPEC, 40, 3, (), (), log_name="pictures"), ()),
    (wire.Subscribed(1, "fedcba9876543210", 0, False, SPEC, 40, 3, (), (), ancestors=("0123456789abcdef",)), ()),
]
MESSAGES = [("to_replay", *item) for item in TO_REPLAY] + [("from_replay", *item) for item in FROM_REPLAY]


def fields_of(message):
    """The fields as JSON."""
    fields = {name: getattr(message, name) for name in message.__struct_fields__}
    return as_json({k: v.hex() if k in BYTES else v for k, v in fields.items() if v is not msgspec.UNSET})


def as_json(value):
    return json.loads(msgspec.json.encode(value))


def changed(message, **fields):
    """The first frame with other fields, whatever their bounds; None leaves a field out."""
    content = msgspec.msgpack.decode(wire.encode(message)) | fields
    return msgspec.msgpack.encode({name: value for name, value in content.items() if value is not None})


WIDE = {"name": "wide", "at": "step", "dtype": "float64", "shape": []}


def malformed():
    insert, hello = wire.encode(INSERT), TO_REPLAY[0][0]
    spec = msgspec.to_builtins(SPEC)
    subscribe = TO_REPLAY[6][0]
    return [
        ("to_replay", "cut short", [insert[:-3], b"block"]),
        ("to_replay", "bytes behind the map", [wire.encode(wire.Heartbeat()) + b"\xc0"]),
        ("to_replay", "an empty frame", [b""]),
        ("to_replay", "not a map", [msgspec.msgpack.encode(["Heartbeat"])]),
        ("to_replay", "no type", [msgspec.msgpack.encode({"request": 1})]),
        ("to_replay", "unknown type", [msgspec.msgpack.encode({"type": "Insect"})]),
        ("to_replay", "type of the other direction", [wire.encode(wire.Stranger())]),
        ("to_replay", "exploration is not a number", [changed(INSERT, exploration=float("nan")), b"block"]),
        ("to_replay", "valid is missing", [changed(INSERT, valid=None), b"block"]),
        ("to_replay", "return is not a number", [changed(INSERT, episodes=[[float("nan"), 1, 0.5]]), b"block"]),
        ("to_replay", "episode with a field too few", [changed(INSERT, episodes=[[1.0, 1]]), b"block"]),
        ("to_replay", "sequence below 0", [changed(INSERT, sequence=-1), b"block"]),
        ("to_replay", "sequence above 2^53", [changed(INSERT, sequence=2**53 + 1), b"block"]),
        ("to_replay", "sequence as a float", [changed(INSERT, sequence=7.0), b"block"]),
        ("to_replay", "priorities as a string", [changed(INSERT, priorities="AAAA"), b"block"]),
        ("to_replay", "stream is missing", [changed(INSERT, stream=None), b"block"]),
        ("to_replay", "no attachment", [insert]),
        ("to_replay", "an attachment too many", [insert, b"block", b""]),
        ("to_replay", "a name of 201 characters", [changed(hello, actor="a" * 201)]),
        ("to_replay", "frames of int16", [changed(hello, spec=spec | {"frame_dtype": "int16"})]),
        ("to_replay", "frames of 9 dimensions", [changed(hello, spec=spec | {"frame_shape": [1] * 9})]),
        ("to_replay", "1025 names of actions", [changed(hello, spec=spec | {"action_names": [""] * 1025})]),
        ("to_replay", "a field of float64", [changed(hello, spec=spec | {"extras": [WIDE]})]),
        ("to_replay", "a field at the end", [changed(hello, spec=spec | {"extras": [WIDE | {"at": "end"}]})]),
        ("to_replay", "33 extras", [changed(hello, spec=spec | {"extras": [WIDE | {"dtype": "uint8"}] * 33})]),
        ("to_replay", "a batch of 0", [changed(subscribe, wants=[["transitions", 0]])]),
        ("to_replay", "probabilities as a number", [changed(subscribe, with_probabilities=1)]),
        ("to_replay", "17 tables", [changed(subscribe, wants=[["transitions", 1]] * 17)]),
        ("to_replay", "a Delete without a table", [changed(wire.Delete(1, "a"), table=None)]),
        ("to_replay", "a log's name of 201 characters", [changed(hello, log_name="a" * 201)]),
        ("from_replay", "Append without attachments", [wire.encode(wire.Append(3))]),
        ("from_replay", "Batch with an odd attachment", [wire.encode(FROM_REPLAY[4][0]), b"block"]),
        ("from_replay", "index below 0", [changed(FROM_REPLAY[4][0], index=-1)]),
    ]


def tolerated():
    return [
        ("an unknown field", changed(INSERT, color="red"), INSERT),
        (
            "the type last",
            msgspec.msgpack.encode(dict(reversed(msgspec.msgpack.decode(wire.encode(INSERT)).items()))),
            INSERT,
        ),
        ("an integer for a float", changed(INSERT, exploration=1), msgspec.structs.replace(INSERT, exploration=1.0)),
        ("a default left out", changed(INSERT, episodes=None), msgspec.structs.replace(INSERT, episodes=())),
        ("an episode with more", changed(INSERT, episodes=[[-1.5, 200, 0.25, 9]]), INSERT),
    ]


def make_vectors():
    """The content of the file. Only the decompressed content of its block is the same with every zstd."""
    header = segment.SegmentHeader(segment.FORMAT, "0123456789abcdef", 0, 3, SPEC)
    record = b"".join(segment.pack(3, wire.encode(INSERT), b"block"))
    return {
        "protocol": PROTOCOL,
        "identity": {"routing_id": ROUTING_ID.decode(), "mark": mark_of(ROUTING_ID), "actor": ACTOR},
        "messages": [
            {
                "name": type(message).__name__,
                "direction": direction,
                "fields": fields_of(message),
                "frame": wire.encode(message).hex(),
                "attachments": [attachment.hex() for attachment in attachments],
            }
            for direction, message, attachments in MESSAGES
        ],
        "tolerated": [
            {"why": why, "frame": frame.hex(), "name": "Insert", "fields": fields_of(insert)}
            for why, frame, insert in tolerated()
        ],
        "malformed": [
            {"malformed": why, "direction": direction, "frames": [frame.hex() for frame in frames]}
            for direction, why, frames in malformed()
        ],
        "blocks": [
            {
                "spec": msgspec.to_builtins(spec),
                "arrays": {name: array.tolist() for name, array in slow_arrays(unroll).items()},
                "decompressed": slow_block(spec, unroll).hex(),
                "block": UnrollCodec(spec).encode(unroll).hex(),
            }
            for spec, unroll in ((SPEC, UNROLL), (FULL_SPEC, FULL_UNROLL))
        ],
        "journal": {
            "header": {"fields": msgspec.to_builtins(header), "record": segment.pack_header(header).hex()},
            "record": {"number": 3, "message": wire.encode(INSERT).hex(), "block": b"block".hex()}
            | {"record": record.hex()},
            "malformed": [
                {"malformed": "cut short", "record": record[:-1].hex()},
                {"malformed": "checksum", "record": (record[:-1] + b"\xff").hex()},
                {"malformed": "magic", "record": (b"apxV" + record[4:]).hex()},
            ],
        },
    }  # fmt: skip


@pytest.fixture(scope="module")
def vectors():
    return json.loads(VECTORS.read_text())


def test_the_file_is_what_the_code_makes(vectors):
    made = as_json(make_vectors())
    for block, vector in zip(made["blocks"], vectors["blocks"], strict=True):
        block["block"] = vector["block"]
    assert made == vectors, "the wire has changed: if it was meant to, raise PROTOCOL or write the examples anew"


def test_every_message_has_an_example(vectors):
    for direction, classes in CLASSES.items():
        named = {vector["name"] for vector in vectors["messages"] if vector["direction"] == direction}
        assert named == {message.__name__ for message in classes}


def test_examples_are_encoded_to_their_bytes(vectors):
    for vector in vectors["messages"]:
        fields = {k: bytes.fromhex(v) if k in BYTES else v for k, v in vector["fields"].items()}
        message = msgspec.convert(fields, getattr(wire, vector["name"]), builtin_types=[bytes])
        assert wire.encode(message).hex() == vector["frame"], vector["name"]


def test_examples_are_decoded_to_their_fields(vectors):
    for vector in vectors["messages"]:
        frames = [bytes.fromhex(frame) for frame in (vector["frame"], *vector["attachments"])]
        message = DECODERS[vector["direction"]](frames)
        assert type(message).__name__ == vector["name"]
        assert fields_of(message) == vector["fields"]


def test_what_is_tolerated_is_decoded(vectors):
    for vector in vectors["tolerated"]:
        message = wire.decode_insert(bytes.fromhex(vector["frame"]))
        assert fields_of(message) == vector["fields"], vector["why"]


def test_malformed_examples_raise_wire_errors(vectors):
    assert len(vectors["malformed"]) == len(malformed())
    for vector in vectors["malformed"]:
        with pytest.raises(WireError):
            print(vector["malformed"], DECODERS[vector["direction"]]([bytes.fromhex(f) for f in vector["frames"]]))


def test_the_name_is_that_of_the_routing_id(vectors):
    example = vectors["identity"]
    routing_id = example["routing_id"].encode()
    assert example["actor"].endswith("-" + example["mark"]) and len(example["mark"]) == 24
    assert why_not_named(example["actor"], routing_id) == ""
    for actor, other in ((example["actor"], routing_id[1:]), (example["actor"][:-1], routing_id)):
        assert "mark of your routing id" in why_not_named(actor, other)


def test_the_blocks_hold_their_arrays(vectors):
    for vector in vectors["blocks"]:
        spec = msgspec.convert(vector["spec"], StreamSpec)
        arrays = slow_arrays(UnrollCodec(spec).decode(bytes.fromhex(vector["block"])))
        assert {name: array.tolist() for name, array in arrays.items()} == vector["arrays"]
        assert len(vector["decompressed"]) == 2 * spec.unroll_bytes
        for block in (vector["block"][:-2], vector["decompressed"], ""):
            with pytest.raises(WireError):
                UnrollCodec(spec).decode(bytes.fromhex(block))


def test_the_journal_holds_its_records(vectors):
    journal = vectors["journal"]
    header, record = bytes.fromhex(journal["header"]["record"]), bytes.fromhex(journal["record"]["record"])
    found = segment.scan(header + record)
    assert as_json(found.header) == journal["header"]["fields"] and not found.damages
    (entry,) = found.entries
    assert (entry.number, entry.message.hex(), entry.block.hex()) == tuple(
        journal["record"][name] for name in ("number", "message", "block")
    )
    assert segment.pack_header(found.header) == header and b"".join(segment.pack(*entry)) == record
    for vector in journal["malformed"]:
        broken = bytes.fromhex(vector["record"])
        found = segment.scan(header + broken + record)
        assert found.damages == [(len(header), len(broken))] and len(found.entries) == 1, vector["malformed"]


STRUCTS = [
    Field,
    StreamSpec,
    Episode,
    wire.Want,
    wire.PeerStanding,
    LogIdentity,
    segment.SegmentHeader,
    Snapshot,
    TableState,
]


def sections():
    """The parts of the page that tell of one struct each."""
    return {part.split("`")[0]: part.split("\n## ")[0] for part in PAGE.split("\n### `")[1:]}


def structs_by_name():
    return {struct.__name__: struct for struct in (*CLASSES["to_replay"], *CLASSES["from_replay"], *STRUCTS)}


def test_the_page_names_every_message_and_field():
    assert sections().keys() == structs_by_name().keys()
    for name, struct in structs_by_name().items():
        told = re.findall(r"^\| `(\w+)` \|", sections()[name], re.MULTILINE)
        assert tuple(told) == struct.__struct_fields__, name


def test_the_page_tells_the_defaults_of_the_code():
    names = {"[]": (), "empty": b"", "false": False, "absent": msgspec.UNSET}
    for name, struct in structs_by_name().items():
        told = dict(re.findall(r"^\| `(\w+)` \|[^|]*?(?:default ([^ |;]+))?[ ]*\|", sections()[name], re.MULTILINE))
        for field in msgspec.structs.fields(struct):
            text = told[field.name]
            value = names[text] if text in names else float(text) if text else msgspec.NODEFAULT
            default = field.default.encode() if isinstance(field.default, str) else field.default
            assert value == default, f"{name}.{field.name}"


def test_the_page_tells_the_numbers_of_the_code():
    told = re.findall(r"^\| `(\w+)\.([A-Z_]+)` \| ([\d.]+) \|", PAGE, re.MULTILINE)
    assert len(told) >= 19
    for module, name, value in told:
        assert getattr(import_module(f"apexrl.net.{module}"), name) == float(value), name


if __name__ == "__main__":
    VECTORS.write_text(json.dumps(make_vectors(), indent=1) + "\n")
