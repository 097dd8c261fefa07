import struct

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from apexrl.replay import segment
from apexrl.replay.segment import (
    FORMAT,
    HEADER_MAGIC,
    SEARCHED,
    UNROLL_MAGIC,
    Entry,
    Scan,
    SegmentHeader,
    pack,
    pack_header,
    scan,
)
from apexrl.types import StreamSpec

SPEC = StreamSpec("Known-v0", (2,), "float32", 3, 4, 1, unroll_starts=8, overlap_steps=2)
HEADER = SegmentHeader(FORMAT, "log", 2, 5, SPEC)

# Blocks may hold what looks like a record's beginning.
CONTENTS = st.lists(st.sampled_from([b"", UNROLL_MAGIC, HEADER_MAGIC, b"\0" * 20, b"bytes"]), max_size=4).map(b"".join)
RECORDS = st.lists(st.tuples(CONTENTS, CONTENTS), max_size=6)


def pieces_of(records):
    """The header and each record as bytes."""
    return [pack_header(HEADER), *(b"".join(pack(5 + i, *record)) for i, record in enumerate(records))]


def entries_of(records):
    return [Entry(5 + i, *record) for i, record in enumerate(records)]


def bounds_of(pieces):
    """Where each piece begins and ends."""
    ends = [sum(map(len, pieces[: i + 1])) for i in range(len(pieces))]
    return list(zip([0, *ends[:-1]], ends, strict=True))


@settings(max_examples=100, deadline=None)
@given(RECORDS)
def test_what_is_written_is_read(records):
    pieces = pieces_of(records)
    offsets = [begin for begin, _ in bounds_of(pieces)[1:]]
    data = b"".join(pieces)
    assert scan(data) == Scan(HEADER, entries_of(records), [], len(data), offsets)


def test_a_number_that_no_message_can_have_is_that_of_no_record():
    good, beyond = b"".join(pack(5, b"a", b"b")), b"".join(pack(2**53 + 1, b"c", b"d"))
    found = scan(pack_header(HEADER) + good + beyond, 5)
    assert found.entries == [Entry(5, b"a", b"b")] and found.damages


def test_an_empty_file_holds_nothing():
    assert scan(b"") == Scan(None, [], [], 0, [])


@settings(max_examples=300, deadline=None)
@given(RECORDS, st.integers(0, 10**6), st.integers(1, 255))
def test_a_damaged_byte_loses_only_the_record_it_hits(records, position, change):
    pieces = pieces_of(records)
    data = bytearray(b"".join(pieces))
    position %= len(data)
    data[position] ^= change
    found = scan(bytes(data), 5)
    hit = next(i for i, (begin, end) in enumerate(bounds_of(pieces)) if begin <= position < end)
    assert found.header == (None if hit == 0 else HEADER)
    assert found.entries == [entry for i, entry in enumerate(entries_of(records), 1) if i != hit]
    assert [(d.offset, d.num_bytes) for d in found.damages] == [(bounds_of(pieces)[hit][0], len(pieces[hit]))]


@settings(max_examples=300, deadline=None)
@given(RECORDS, st.integers(0, 10**6))
def test_a_cut_loses_only_what_lies_behind_it(records, position):
    pieces = pieces_of(records)
    data = b"".join(pieces)
    position %= len(data)
    found = scan(data[:position])
    whole = sum(end <= position for _, end in bounds_of(pieces))
    assert found.entries == entries_of(records)[: max(whole - 1, 0)]
    assert found.header == (HEADER if whole else None)
    assert found.end_of_records == sum(map(len, pieces[:whole]))
    assert sum(d.num_bytes for d in found.damages) == position - found.end_of_records


@settings(max_examples=300, deadline=None)
@given(RECORDS, st.integers(0, 10**6), st.integers(1, 200))
def test_bytes_overwritten_lose_only_the_records_they_belong_to(records, begin, length):
    pieces = pieces_of(records)
    data = b"".join(pieces)
    begin %= len(data)
    end = min(begin + length, len(data))
    left = data[:begin] + bytes(end - begin) + data[end:]
    found = scan(left, 5)
    lost = {i for i, (first, last) in enumerate(bounds_of(pieces)) if left[first:last] != pieces[i]}
    assert found.header == (None if 0 in lost else HEADER)
    assert found.entries == [entry for i, entry in enumerate(entries_of(records), 1) if i not in lost]


@settings(max_examples=300, deadline=None)
@example([(b"", b"apxU"), (b"", b"x")], len(pack_header(HEADER)) + 24, 3)  # its last bytes are the magic that follows
@given(RECORDS, st.integers(0, 10**6), st.integers(0, 10**6))
def test_bytes_cut_out_lose_only_the_records_they_belong_to(records, begin, length):
    pieces = pieces_of(records)
    data = b"".join(pieces)
    begin %= len(data)
    length = min(1 + length % 60, len(data) - begin)
    left = data[:begin] + data[begin + length :]
    found = scan(left, 5)
    assert all(entry in entries_of(records) for entry in found.entries)
    # Where bytes repeat, nobody can tell which of them are gone: a cut nearby leaves the same.
    nearby = range(max(0, begin - length), begin + length + 1)
    cuts = [cut for cut in nearby if data[:cut] + data[cut + length :] == left]
    bounds = list(enumerate(bounds_of(pieces)))
    hits = [{i for i, (first, end) in bounds if first < cut + length and cut < end} for cut in cuts]
    assert any(not lost_beside(hit, found, entries_of(records)) for hit in hits)
    assert found.header == HEADER or any(0 in hit for hit in hits)


def lost_beside(hit, found, entries):
    """The entries that were not found, but for those of the pieces that were hit; the header is piece 0."""
    return [entry for i, entry in enumerate(entries, 1) if i not in hit and entry not in found.entries]


@pytest.mark.parametrize("number", [0, 4, 5, 6, 7, 10**12, 2**64 - 2])
@pytest.mark.parametrize("is_last", [False, True])
def test_a_block_that_looks_like_records_brings_in_no_other_numbers(number, is_last):
    """A power cut tore the record of a block that an actor made for this."""
    forged = [b"".join(pack(number + i, b"forged", b"block")) for i in range(2)]
    pieces = pieces_of([(b"message", b"block"), (b"", b"".join(forged))] + [(b"message", b"block")] * (not is_last))
    pieces[2] = pieces[2][:8] + b"\xff" + pieces[2][9:]
    found = scan(b"".join(pieces))
    genuine = [Entry(n, b"message", b"block") for n in (5, 7)]
    found_forged = [entry.number for entry in found.entries if entry not in genuine]
    expected = [n for n in (number, number + 1) if 6 <= n <= 8]  # one is lost, and they may be in its place
    assert found_forged == expected
    assert [entry for entry in found.entries if entry in genuine] == genuine[: 1 if is_last else 2]
    assert found.entries[-1] == genuine[-1] or is_last  # the later one of a number counts


@settings(max_examples=300, deadline=None)
@given(RECORDS, st.integers(0, 10**6), CONTENTS, st.binary(max_size=60))
def test_garbage_between_records_loses_none(records, position, content, tail):
    pieces = pieces_of(records)
    position = 1 + position % len(pieces)
    found = scan(b"".join([*pieces[:position], content, tail, *pieces[position:]]))
    assert found.header == HEADER
    assert found.entries == entries_of(records)
    assert sum(d.num_bytes for d in found.damages) == len(content + tail)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_can_be_read(data, begins_well):
    found = scan(UNROLL_MAGIC * begins_well + data)
    assert found.header is None and found.entries == []


@pytest.mark.parametrize("message", [b"", b"\xc1", b"\x80"])
def test_a_header_of_another_version_costs_no_record(message):
    records = [(b"message", b"block"), (b"other", b"more")]
    data = b"".join(pack(5, message, b"", HEADER_MAGIC)) + b"".join(pieces_of(records)[1:])
    found = scan(data)
    assert found.header is None
    assert found.entries == entries_of(records)


def test_bytes_that_look_like_long_records_all_over_cost_a_bounded_search(monkeypatch):
    size, computed = 24 * 2**11, []
    fakes = b"".join(UNROLL_MAGIC + struct.pack("<IQII", 0, 0, 0, size - end) for end in range(24, size + 1, 24))
    crc32 = segment.zlib.crc32
    monkeypatch.setattr(
        segment.zlib, "crc32", lambda data, *start: (computed.append(len(data)), crc32(data, *start))[1]
    )
    found = scan(fakes)
    assert not found.entries and sum(computed) <= (SEARCHED + 2) * size
    good = b"".join(pack(3, b"message", b"block"))
    assert scan(fakes[:1200] + good, 3).entries == [Entry(3, b"message", b"block")]
