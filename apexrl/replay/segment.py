"""The records of a journal file: unrolls exactly as they arrived, each with its checksum. Bytes in, bytes out.

A record has these parts, little-endian:
  4 bytes   magic
  uint32    CRC-32 of all that follows
  uint64    number of the unroll
  uint32    bytes of the insert message
  uint32    bytes of the block
  ...       the message, then the block
The first record of a file is its header: another magic, and a `SegmentHeader` in the place of the message. Numbers go
up by one. A reader finds the next record after a damaged one by its magic, its checksum and its number, which is none
from before the first damage: a block is an actor's, and may hold bytes that look like a record of any number.
"""

import struct
import zlib
from typing import BinaryIO, NamedTuple

import msgspec

from apexrl.errors import MALFORMED
from apexrl.types import Count, Name, StreamSpec

FORMAT = 2
HEADER_MAGIC, UNROLL_MAGIC = b"apxH", b"apxU"
MISSING_RECORDS = 4
MAX_HEADER_BYTES = 2**20
MAX_NUMBER = 2**53  # of an unroll, as in messages
SEARCHED = 64  # times the bytes of a file, whose checksums a search behind damages may compute
_FIXED = struct.Struct("<4sIQII")
_CHECKED = struct.Struct("<QII")


class SegmentHeader(msgspec.Struct, frozen=True):
    """The header of a journal file: its log, its life and the number of its first unroll."""

    format: int
    log: Name
    life: Count
    first_number: Count
    spec: StreamSpec


class Entry(NamedTuple):
    """One unroll in a journal file."""

    number: int
    message: bytes
    block: bytes


class Damage(NamedTuple):
    """A range of bytes of a journal file that holds no readable record."""

    offset: int
    num_bytes: int


class Scan(NamedTuple):
    """The content of a journal file."""

    header: SegmentHeader | None  # None when it is damaged
    entries: list[Entry]
    damages: list[Damage]
    end_of_records: int  # behind the last good record
    offsets: list[int]  # in the file, of each entry


def pack(number: int, message: bytes, block: bytes, magic: bytes = UNROLL_MAGIC) -> tuple[bytes, bytes, bytes]:
    """Returns the pieces of one record."""
    checked = _CHECKED.pack(number, len(message), len(block))
    checksum = zlib.crc32(block, zlib.crc32(message, zlib.crc32(checked)))
    return magic + checksum.to_bytes(4, "little") + checked, message, block


def pack_header(header: SegmentHeader) -> bytes:
    """Returns the first record of a file."""
    return b"".join(pack(header.first_number, msgspec.msgpack.encode(header), b"", HEADER_MAGIC))


def scan(data: bytes, first_number: int = 0) -> Scan:
    """Reads a whole file. It never raises, whatever the bytes are.

    Args:
      first_number: number of its first unroll, as its name says, for where its header is damaged.
    """
    header: SegmentHeader | None = None
    entries: list[Entry] = []
    damages: list[Damage] = []
    offsets: list[int] = []
    position = good = 0
    lowest = next_number = first_number  # that a record behind damages may have; and the largest one
    search = SEARCHED * len(data)
    while position < len(data):
        begin = position
        record = _unpack(data, begin, HEADER_MAGIC if begin == 0 else UNROLL_MAGIC)
        if record is None or (damages and not lowest <= record[0].number <= next_number):
            position, search = _next_record(data, begin, lowest, next_number, search)
            damages.append(Damage(begin, position - begin))
            next_number += _most_lost(position - begin)
            continue
        entry, position = record
        good = position
        if damages:  # the record may be made up, in the place of one that is lost
            next_number = max(next_number, entry.number + 1)
        else:
            lowest = next_number = entry.number + 1 if begin > 0 else entry.number
        if begin > 0:
            entries.append(entry)
            offsets.append(begin)
        elif (header := _header(entry.message)) is None:
            damages.append(Damage(begin, position))
    return Scan(header, entries, damages, good, offsets)


def read_header(file: BinaryIO) -> SegmentHeader | None:
    """Returns the header at the beginning of a file, None when no good one is there."""
    data = file.read(_FIXED.size)
    if len(data) == _FIXED.size:
        *_, message_bytes, block_bytes = _FIXED.unpack(data)
        data += file.read(min(message_bytes + block_bytes, MAX_HEADER_BYTES))
    record = _unpack(data, 0, HEADER_MAGIC)
    return _header(record[0].message) if record is not None else None


def _unpack(data: bytes, position: int, magic: bytes) -> tuple[Entry, int] | None:
    """Returns the record at a position and the position behind it, None when no good record is there."""
    start = position + _FIXED.size
    if start > len(data):
        return None
    found, checksum, number, message_bytes, block_bytes = _FIXED.unpack_from(data, position)
    end = start + message_bytes + block_bytes
    if found != magic or end > len(data):
        return None
    if zlib.crc32(memoryview(data)[position + 8 : end]) != checksum or number > MAX_NUMBER:
        return None
    middle = start + message_bytes
    return Entry(number, data[start:middle], data[middle:end]), end


def _most_lost(num_bytes: int) -> int:
    """Returns how many records so many damaged bytes can stand for. A few may be missing without a trace."""
    return num_bytes // _FIXED.size + MISSING_RECORDS


def _next_record(data: bytes, begin: int, lowest: int, next_number: int, search: int) -> tuple[int, int]:
    """Returns where the next good record after a damage begins, or the end of the data, and what is left of `search`.

    No record has a larger number than next_number and those that fit between it and the beginning of the damage.

    Args:
      lowest: the least number that it may have.
      search: bytes of which checksums may be computed. Bytes of a stranger may look like the beginnings of records all
        over, each as long as the rest of the file.
    """
    position = begin
    while search > 0 and 0 <= (position := data.find(UNROLL_MAGIC, position + 1)) <= len(data) - _FIXED.size:
        _, _, number, message_bytes, block_bytes = _FIXED.unpack_from(data, position)
        num_bytes = _FIXED.size + message_bytes + block_bytes
        highest = next_number + _most_lost(position - begin)
        if not lowest <= number <= highest or position + num_bytes > len(data):
            continue
        search -= num_bytes
        if _unpack(data, position, UNROLL_MAGIC) is not None:
            return position, search
    return len(data), search


def _header(message: bytes) -> SegmentHeader | None:
    try:
        header = msgspec.msgpack.decode(message, type=SegmentHeader)
    except MALFORMED:
        return None
    return header if header.spec.unroll_starts else None
