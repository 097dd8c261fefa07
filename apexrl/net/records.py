"""Records as unrolls: each field of a record has a numpy type and a shape, and a log holds one record an unroll.

To the log a record is an unroll of one step. Its bytes, field after field, are the only extra, and the spec's `variant`
says what they mean. Frames, action, reward and discount are zero. The keys of all tables are the numbers of records.
"""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import zstandard
from numpy.typing import DTypeLike

from apexrl.casts import exactly
from apexrl.errors import ApexError, WireError
from apexrl.lines import is_utf8
from apexrl.types import Field, StreamSpec

FieldType = DTypeLike | tuple[DTypeLike, int | tuple[int, ...]]
KINDS = "biufSU"  # truth values, integers, floats, bytes and texts of a largest length
ENV = "records"
_BEFORE = bytes(2 + 4 + 4 + 4)  # two frames of a byte, an action, a reward, a discount
_AFTER = b"\1\0"  # an episode begins at the first observation


def layout_of(fields: Mapping[str, FieldType]) -> np.dtype:
    """Returns the type of a record with these fields.

    Raises: ValueError when there are none, or one has a type that no record can have.
    """
    if not fields or "" in fields:
        raise ValueError("a record without fields, or with one without a name")
    parts = []
    for name, given in fields.items():
        kind, shape = given if isinstance(given, tuple) else (given, ())
        dtype = np.dtype(kind)
        if not is_utf8(name):
            raise ValueError(f"field {name!r}: half of a surrogate pair is no character")
        is_wider = dtype.kind == "f" and dtype.itemsize > 8  # and of other bytes on other machines
        if dtype.kind not in KINDS or is_wider or not np.dtype((dtype, shape)).itemsize:
            of_shape = f" of shape {shape}" if shape else ""
            wanted = "bool, an integer, a float of up to 64 bits, or a text such as U20 or S20"
            raise ValueError(f"field {name!r} of {dtype}{of_shape}: give {wanted}")
        parts.append((name, dtype.newbyteorder("<"), shape))
    return np.dtype(parts)


def spec_of(layout: np.dtype) -> StreamSpec:
    """Returns the spec of a log of such records."""
    fields = [(name, part.base.str, part.shape) for name, part in _parts(layout).items()]
    return StreamSpec(
        ENV, (), "uint8", 1, 1, 1, variant=json.dumps(fields, ensure_ascii=False), unroll_starts=1, overlap_steps=0,
        extras=(Field("record", "first", "uint8", (layout.itemsize,)),),
    )  # fmt: skip


def layout_from(spec: StreamSpec) -> np.dtype:
    """Returns the type of the records of a log.

    Raises: ApexError when it holds none.
    """
    if spec.env == ENV:
        try:
            layout = layout_of({name: (kind, tuple(shape)) for name, kind, shape in json.loads(spec.variant)})
        except (ValueError, TypeError, RecursionError, SyntaxError):  # the last of NumPy, which reads a type as Python
            layout = None
        if layout is not None and spec_of(layout) == spec:
            return layout
    raise ApexError(f"the log holds unrolls of {spec.env}, and no records: read it with ReplayClient.sample_unrolls")


class RecordCodec:
    """Records to the blocks of their unrolls, and back. Two threads may not encode at once."""

    def __init__(self, layout: np.dtype):
        self._fields = _parts(layout)
        self._layout = layout
        self._num_bytes = len(_BEFORE) + layout.itemsize + len(_AFTER)
        self._compressor = zstandard.ZstdCompressor(level=1, write_content_size=True)

    def encode(self, record: Mapping[str, Any]) -> bytes:
        """Returns the block of a record.

        Raises: ValueError when it has not these fields, or one does not fit its type. Nothing is ever cut or cast to
          another number; floats are rounded to their precision.
        """
        if record.keys() != self._fields.keys():
            raise ValueError(f"a record with the fields {sorted(record)}, where {sorted(self._fields)} are needed")
        parts = [_fitted(name, record[name], part).tobytes() for name, part in self._fields.items()]
        return self._compressor.compress(b"".join((_BEFORE, *parts, _AFTER)))

    def decode(self, blocks: Mapping[int, bytes], numbers: list[int]) -> dict[str, np.ndarray]:
        """Returns the fields [B, *shape] of the records with these numbers, which may repeat.

        Raises: WireError when a block is no record.
        """
        inner = slice(len(_BEFORE), -len(_AFTER))
        decompressor = zstandard.ZstdDecompressor()
        records = {number: self._decompressed(decompressor, block)[inner] for number, block in blocks.items()}
        rows = np.frombuffer(b"".join([records[number] for number in numbers]), self._layout)
        return {name: np.array(rows[name]) for name in self._fields}

    def _decompressed(self, decompressor: zstandard.ZstdDecompressor, block: bytes) -> bytes:
        try:
            size = zstandard.frame_content_size(block)
            if size == self._num_bytes:
                return decompressor.decompress(block)
        except zstandard.ZstdError as error:
            raise WireError(f"a record does not decompress: {error}") from error
        raise WireError(f"a record's block says {size} bytes, not {self._num_bytes}")


def _parts(layout: np.dtype) -> dict[str, np.dtype]:
    assert layout.fields is not None
    return {name: part[0] for name, part in layout.fields.items()}


def _fitted(name: str, value: Any, part: np.dtype) -> np.ndarray:
    """Returns a value as its field holds it. Raises ValueError when it does not fit."""
    dtype, shape = part.base, part.shape
    array = np.asarray(value)
    if dtype.kind in "SU":
        if array.dtype.kind != dtype.kind or array.shape != shape or array.dtype.itemsize > dtype.itemsize:
            raise ValueError(f"field {name!r}: {value!s:.40} of {array.dtype}{array.shape}, not {dtype}{shape}")
        leaves = [] if isinstance(value, np.ndarray) else np.asarray(value, object).ravel().tolist()
        if any(leaf[-1:] in ("\0", b"\0") for leaf in leaves):
            raise ValueError(f"field {name!r}: a text that ends in a zero, which numpy does not keep; uint8 keeps it")
        return array.astype(dtype)
    try:
        fitted = exactly(array, dtype, shape)
    except ValueError as error:
        raise ValueError(f"field {name!r}: {error}") from error
    if dtype.kind == "f" and fitted is not array and (np.isinf(fitted) & np.isfinite(array)).any():
        raise ValueError(f"field {name!r}: a number that is too large for {dtype}")
    return fitted
