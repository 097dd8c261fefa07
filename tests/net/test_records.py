"""Records of other things than games, as the unrolls of a log."""

import msgspec
import numpy as np
import pytest

from apexrl.errors import ApexError, WireError
from apexrl.net.insert_checks import InsertSizes, why_impossible
from apexrl.net.records import RecordCodec, layout_from, layout_of, spec_of
from apexrl.unroll import UnrollCodec

NUMBERS = ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
NUMBERS += ["float16", "float32", "float64"]
EXTREMES = {"b": (False, True), "f": (-np.inf, np.nan)}
ALL = {name: (name, (2,)) for name in NUMBERS} | {"text": "U5", "raw": ("S3", (2, 1)), "one": "float32"}


def record():
    values = {}
    for name in NUMBERS:
        kind = np.dtype(name).kind
        low, high = EXTREMES[kind] if kind in EXTREMES else (np.iinfo(name).min, np.iinfo(name).max)
        values[name] = np.array([low, high], name)
    return values | {"text": "grüße", "raw": np.array([[b"a\0b"], [b""]]), "one": 0.1}


def test_every_type_comes_back_bit_for_bit():
    layout = layout_of(ALL)
    codec, given = RecordCodec(layout), record()
    block, other = codec.encode(given), codec.encode(given | {"text": ""})
    found = codec.decode({3: block, 5: other}, [5, 3, 5])
    assert found["text"].tolist() == ["", "grüße", ""] and found["raw"].tolist() == [[[b"a\0b"], [b""]]] * 3
    for name in NUMBERS:
        assert found[name].dtype == name and found[name].shape == (3, 2)
        assert found[name][1].tobytes() == given[name].tobytes()
    assert found["one"].tolist() == [np.float32(0.1)] * 3 and found["one"].flags.writeable


def test_a_log_and_every_reader_of_unrolls_take_records():
    spec = spec_of(layout_of(ALL))
    block = RecordCodec(layout_of(ALL)).encode(record())
    assert why_impossible(spec) == "" and InsertSizes(spec).why_wrong_block(block) == ""
    unroll = UnrollCodec(spec).decode(block)
    assert (unroll.starts.tolist(), unroll.rewards.tolist()) == ([True, False], [0.0])
    assert UnrollCodec(spec).encode(unroll) == UnrollCodec(spec).encode(UnrollCodec(spec).decode(block))
    assert layout_from(msgspec.json.decode(msgspec.json.encode(spec), type=type(spec))) == layout_of(ALL)


@pytest.mark.parametrize(
    "changes",
    [
        {"variant": "[]"},
        {"variant": '[["a", "(,)i4", []]]'},
        {"variant": "{"},
        {"variant": "[" * 2000},
        {"env": "Pong"},
        {"unroll_starts": 2},
    ],
)
def test_what_holds_no_records_is_said(changes):
    spec = msgspec.structs.replace(spec_of(layout_of({"a": "int8"})), **changes)
    with pytest.raises(ApexError, match="no records"):
        layout_from(spec)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"": "int8"},
        {"a": "O"},
        {"a": "U"},
        {"a": "M8[s]"},
        {"a": "c16"},
        {"a": "longdouble"},
        {"a": ("f4", 0)},
        {"a": "no type"},
        {"\ud800": "int8"},
    ],
)
def test_fields_that_no_record_has_are_refused(fields):
    with pytest.raises((ValueError, TypeError)):
        layout_of(fields)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"int8": [0, 128]}, "128 at 1"),
        ({"uint8": [-1, 0]}, "-1 at 0"),
        ({"uint32": [0.5, 0]}, "0.5 at 0"),
        ({"int64": [np.nan, 0]}, "nan"),
        ({"int64": np.array([2**63, 0], np.uint64)}, "whole numbers"),
        ({"bool": [2, 0]}, "truth values"),
        ({"float16": [1e9, 0]}, "too large for float16"),
        ({"float32": [2**24 + 1, 0]}, "exact in float32"),
        ({"float32": [0.0]}, "shape"),
        ({"float32": ["a", "b"]}, "numbers are needed"),
        ({"text": "longer"}, "longer"),
        ({"text": b"bytes"}, "bytes"),
        ({"text": "end\0"}, "ends in a zero"),
        ({"raw": b"abc"}, "raw"),
        ({"more": 1}, "more"),
    ],
)
def test_what_does_not_fit_is_never_stored_as_something_else(changes, reason):
    with pytest.raises(ValueError, match=reason):
        RecordCodec(layout_of(ALL)).encode(record() | changes)


def test_a_block_of_another_size_is_refused():
    small, large = (RecordCodec(layout_of({"a": kind})) for kind in ("int8", "int64"))
    for block in (small.encode({"a": 1}), b"", b"no block"):
        with pytest.raises(WireError, match="record"):
            large.decode({0: block}, [0])


def test_a_shape_without_numbers_is_told_as_such():
    with pytest.raises(ValueError, match=r"field 'a' of float32 of shape \(0,\): give"):
        layout_of({"a": ("float32", (0,))})


def test_texts_in_a_list_keep_their_zeros_or_are_refused():
    codec = RecordCodec(layout_of({"h": ("S4", 2)}))
    for value in ([b"ab\0\0", b"c"], (b"a", b"\0")):
        with pytest.raises(ValueError, match="a text that ends in a zero, which numpy does not keep"):
            codec.encode({"h": value})
    codec.encode({"h": [b"a\0b", b""]})
